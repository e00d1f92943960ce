"""Checksums of single neurons: made once, made again where they are another pack's, right to the byte."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from thermocline import _native
from thermocline.errors import BadFile, IOFailure
from thermocline.pack import checksums, sidecar
from thermocline.pack.pack import Pack, read_tensor


@pytest.fixture
def own_pack(tiny_pack: Path, tmp_path: Path) -> Pack:
    return Pack.open(shutil.copytree(tiny_pack, tmp_path / "pack"))


def expected(pack: Pack, name: str) -> list[int]:
    return [_native.crc32c(row) for row in read_tensor(pack, name)]


def test_every_row_has_its_checksum(own_pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of a few rows, which neither begin nor end with a block."""
    monkeypatch.setattr(checksums, "WINDOW_BYTES", 7000)
    seen: list[tuple[int, int]] = []
    made = checksums.open_checksums(own_pack, lambda done, total: seen.append((done, total)))
    for i in range(own_pack.spec.n_layers):
        assert made.bundle[i].tolist() == expected(own_pack, f"layers.{i}.bundle")
        assert made.gate[i].tolist() == expected(own_pack, f"layers.{i}.gate.weight")
    assert seen[-1][0] == seen[-1][1] and len(seen) > 4


def test_they_are_made_once(own_pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    first = checksums.open_checksums(own_pack)
    monkeypatch.setattr(checksums, "_made", lambda pack, progress: pytest.fail("made again"))
    again = checksums.open_checksums(own_pack)
    for a, b in zip(first.bundle + first.gate, again.bundle + again.gate, strict=True):
        assert np.array_equal(a, b)
    assert not list(own_pack.path.glob("*.tmp-*"))


def stale(path: Path) -> None:
    """Another pack's: what stamps it has changed by one digit."""
    data = bytearray(path.read_bytes())
    at = data.index(b'\\"pack\\":\\"') + len(b'\\"pack\\":\\"')
    data[at] = ord("0") if data[at] != ord("0") else ord("1")
    path.write_bytes(data)


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


@pytest.mark.parametrize("harm", [stale, damaged, short])
def test_what_is_another_packs_or_damaged_is_made_again(harm: object, own_pack: Pack) -> None:
    right = checksums.open_checksums(own_pack)
    path = own_pack.path / checksums.FILE
    good = path.read_bytes()
    harm(path)  # type: ignore[operator]
    assert path.read_bytes() != good
    again = checksums.open_checksums(own_pack)
    assert np.array_equal(again.bundle[1], right.bundle[1]) and path.read_bytes() == good


def test_a_damaged_weight_file_is_not_given_checksums(own_pack: Pack) -> None:
    with open(own_pack.weights_path, "r+b") as f:
        f.seek(own_pack.tensors["layers.1.bundle"].offset + 5)
        f.write(b"\xff\xfe")
    with pytest.raises(BadFile, match="checksum mismatch"):
        checksums.open_checksums(own_pack)
    assert not (own_pack.path / checksums.FILE).exists()


def test_a_full_disk_is_said_and_does_not_stop_a_run(
    own_pack: Pack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise IOFailure("pack/records.safetensors: cannot write: No space left on device")

    monkeypatch.setattr(sidecar, "replace", full)
    made = checksums.open_checksums(own_pack)
    assert made.bundle[0].tolist() == expected(own_pack, "layers.0.bundle")
    (line,) = caplog.messages
    assert "No space left" in line and "next time" in line
