"""The cache finds a pack by what its source holds: a replaced file is another model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import gguf_twins
import kept_twins
import pytest

from thermocline.convert import importer, pack_cache
from thermocline.convert.from_gguf import gguf_hash
from thermocline.errors import BadFile
from thermocline.files import source_key
from thermocline.files.gguf import GGUF


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model counts as one that is too large to hash whole, and small tensors as large ones."""
    monkeypatch.setattr(source_key, "HASH_ALL_BELOW", 0)
    monkeypatch.setattr(source_key, "SAMPLE_BYTES", 16)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kept_twins.write("llama", tmp_path_factory.mktemp("twin") / "llama")


@pytest.fixture
def gguf(hf: Path, tmp_path: Path) -> Path:
    return gguf_twins.write(hf, tmp_path / "m.gguf")


def damage(path: Path, at: int) -> None:
    """One bit of one weight, with the time of writing as it was."""
    before = path.stat()
    with open(path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 0x40]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def first_bytes_of(path: Path) -> list[int]:
    """Where each tensor of more than 8 KiB begins: far from the 4 KiB in its middle."""
    with GGUF(path) as opened:
        return [t.start for t in opened.tensors.values() if t.end - t.start > 8192]


def resolved(path: Path, cache: Path) -> Path:
    return pack_cache.resolve(path, cache, None)


def test_a_damaged_gguf_does_not_answer_for_the_good_one_that_took_its_place(
    gguf: Path, tmp_path: Path
) -> None:
    good = pack_cache.source_hash(gguf)
    places = first_bytes_of(gguf)
    assert len(places) > 10
    for at in places:
        damage(gguf, at)
        assert pack_cache.source_hash(gguf) != good
        damage(gguf, at)
    assert pack_cache.source_hash(gguf) == good
    damage(gguf, places[0])
    bad = resolved(gguf, tmp_path / "cache")
    damage(gguf, places[0])
    fine = resolved(gguf, tmp_path / "cache")
    assert bad != fine
    assert (bad / "weights.bin").read_bytes() != (fine / "weights.bin").read_bytes()


def test_a_copy_of_a_small_gguf_is_the_same_model(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    copy = Path(shutil.copyfile(gguf, tmp_path / "elsewhere" / "m.gguf"))
    assert resolved(gguf, tmp_path / "cache") == resolved(copy, tmp_path / "cache")


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("kind", ["gguf", "directory"])
def test_a_large_model_that_was_replaced_is_packed_again_and_a_line_says_why(
    kind: str, gguf: Path, hf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, file, cache = gguf, gguf, tmp_path / "cache"
    if kind == "directory":
        source = shutil.copytree(hf, tmp_path / "hf")
        file = source / "model.safetensors"
    first = resolved(source, cache)
    assert resolved(source, cache) == first and not any("looks like" in s for s in caplog.messages)
    content = pack_cache.source_hash(source)
    new = Path(shutil.copyfile(file, tmp_path / "new"))
    damage(new, file.stat().st_size - 2)  # where no sample looks
    os.utime(new, ns=(0, file.stat().st_mtime_ns))
    os.replace(new, file)  # the same size, the same time of writing: another inode
    assert pack_cache.source_hash(source) == content, "the content is only sampled: this cannot tell"
    second = resolved(source, cache)
    assert second != first
    doubts = [s for s in caplog.messages if "looks like" in s]
    assert len(doubts) == 1 and f"`thermocline rm {first.name}`" in doubts[0] and "\n" not in doubts[0]
    os.utime(file, ns=(0, 1))
    assert resolved(source, cache) not in (first, second)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("how", ["written in place", "another file under its name and number"])
def test_a_large_file_that_was_replaced_and_looks_the_same_is_not_mistaken(
    how: str, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `rsync --inplace -t` and a copy do: the size, the time of writing, even the inode's number stay."""
    first, before = resolved(gguf, tmp_path / "cache"), gguf.stat()
    if how == "written in place":
        damage(gguf, before.st_size - 2)
    else:
        new = Path(shutil.copyfile(gguf, tmp_path / "new"))
        damage(new, before.st_size - 2)
        os.utime(new, ns=(0, before.st_mtime_ns))
        os.replace(new, gguf)
        stat = os.fstat

        def recycled(fd: int) -> os.stat_result:
            s = stat(fd)
            own = tuple(before.st_ino if i == 1 else x for i, x in enumerate(s[:10]))
            return os.stat_result(own, {f: getattr(s, f) for f in ("st_mtime_ns", "st_ctime_ns")})

        monkeypatch.setattr(os, "fstat", recycled)
    now = gguf.stat()
    assert (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    second = resolved(gguf, tmp_path / "cache")
    assert second != first
    assert (first / "weights.bin").read_bytes() != (second / "weights.bin").read_bytes()


def test_a_file_that_changes_while_it_is_packed_leaves_no_pack(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = importer.pack

    def meanwhile(*args: Any, **options: Any) -> Any:
        cost = made(*args, **options)
        damage(gguf, gguf.stat().st_size - 2)
        return cost

    monkeypatch.setattr(pack_cache, "pack", meanwhile)
    with pytest.raises(BadFile, match=r"m\.gguf: was changed or replaced while it was packed"):
        resolved(gguf, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.usefixtures("large")
def test_of_a_large_model_headers_and_samples_are_read(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with GGUF(gguf) as opened:
        headers, tensors = sum(p.header.bytes for p in opened.parts), len(opened.tensors)
        count = [0]
        read = opened.parts[0].read_bytes

        def counted(start: int, size: int) -> Any:
            count[0] += size
            return read(start, size)

        monkeypatch.setattr(opened.parts[0], "read_bytes", counted)
        gguf_hash(opened)
    assert headers <= count[0] <= headers + 32 + 16 * tensors < gguf.stat().st_size / 10
