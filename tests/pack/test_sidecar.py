"""A file beside a pack is as it was written, or refused: every byte of it is under a checksum."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thermocline.errors import BadFile
from thermocline.offline.need_trace import Trace, read_trace, write_trace
from thermocline.pack import sidecar
from thermocline.pack.activity_profile import PROFILE, SAMPLES, open_profile, open_samples
from thermocline.pack.pack import Pack

Run = Callable[..., Any]
STAMP = "0" * 64
FACTS = {"tokens": 12, "note": "two words"}
LAYOUT: sidecar.TensorShapes = {
    "layers.0.counts": ("i8", (2, 5)),
    "layers.0.none": ("u1", (0,)),
    "layers.1.input": ("f2", (7,)),
}
ARRAYS = (np.arange(10).reshape(2, 5), np.zeros(0, np.uint8), np.linspace(0, 1, 7))


def written(path: Path) -> bytes:
    sidecar.write(path, "profile", STAMP, FACTS, LAYOUT, ARRAYS)
    return path.read_bytes()


def read(path: Path) -> None:
    found = sidecar.Sidecar.open(path, "profile", STAMP, "thermocline profile")
    assert found is not None
    try:
        for name, (dtype, shape) in LAYOUT.items():
            found.read(name, np.dtype(dtype).newbyteorder("<").str if dtype != "u1" else "|u1", shape)
    finally:
        found.close()


def test_no_flipped_bit_goes_unnoticed(tmp_path: Path) -> None:
    """Without checksums 33 to 44 in a hundred did, and were trained on, planned with, replayed."""
    path = tmp_path / "profile.safetensors"
    whole = written(path)
    read(path)
    for at in range(len(whole)):
        harmed = bytearray(whole)
        harmed[at] ^= 1 << at % 8
        path.write_bytes(harmed)
        with pytest.raises(BadFile, match=r"profile\.safetensors"):
            read(path)


def test_a_file_from_before_checksums_is_refused_with_the_command_that_makes_it_again(tmp_path: Path) -> None:
    path = tmp_path / "profile.safetensors"
    path.write_bytes(written(path).replace(rb"\"version\":2", rb"\"version\":1"))
    with pytest.raises(
        BadFile, match="is 'profile' version 1, not profile version 2; run `thermocline profile` again"
    ):
        read(path)


def test_a_file_that_verify_finds_from_before_checksums_is_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "profile.safetensors"
    path.write_bytes(written(path).replace(rb"\"version\":2", rb"\"version\":1"))
    (tmp_path / "pack.json").write_text("{}")
    (problem,) = sidecar.problems(tmp_path)
    assert problem == f"{path}: is 'profile' version 1, not version 2; make it again"


@pytest.fixture
def profiled(tiny_pack: Path, tmp_path: Path, thermocline: Run) -> Path:
    pack, text = tmp_path / "pack", tmp_path / "text.txt"
    shutil.copytree(tiny_pack, pack)
    text.write_text("The thermocline is a thin layer of water. " * 40)
    ran = thermocline("profile", pack, "--corpus", text, "--tokens", "256", "--samples", "32", "-q")
    assert ran.code == 0, ran.err
    return pack


def harm(path: Path, back: int) -> None:
    data = bytearray(path.read_bytes())
    data[-back] ^= 1
    path.write_bytes(data)


def test_verify_looks_at_all_that_was_made_for_a_pack(profiled: Path, thermocline: Run) -> None:
    assert thermocline("verify", profiled).code == 0
    for name in (PROFILE, SAMPLES):
        harm(profiled / name, 3)
        ran = thermocline("verify", profiled, "--json")
        assert ran.code == 3 and "remove it, or make it again" in ran.err
        (problem,) = json.loads(ran.out)["problems"]
        assert name in problem and "checksum mismatch in layers.1" in problem
        assert problem.endswith(": damaged; make it again")  # "run `the command that made it` again" was said
        harm(profiled / name, 3)
    assert thermocline("verify", profiled).code == 0


def test_damage_is_noticed_where_it_is_read(profiled: Path, tmp_path: Path) -> None:
    pack, trace = Pack.open(profiled), tmp_path / "trace"
    spec = pack.spec
    active = np.zeros((4, -(-spec.ffn_dim // 8)), np.uint8)
    write_trace(trace, pack, Trace(4, "", "exact", 0, spec.ffn_dim, 1, (active,) * spec.n_layers))
    for path in (profiled / PROFILE, profiled / SAMPLES, trace):
        harm(path, 1)

    def last_of_samples() -> None:
        found = open_samples(pack)
        assert found is not None
        with found:
            found.layer(spec.n_layers - 1)

    for reading in (lambda: open_profile(pack), last_of_samples, lambda: read_trace(trace, pack)):
        with pytest.raises(BadFile, match=r"checksum mismatch in layers\.1"):
            reading()
