"""GGUF headers and files: what is well-formed is read exactly, everything else is refused in a line."""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_gguf
import gguf_files as g
import pytest
from test_fuzz_readers import peak_of

from thermocline.errors import BadFile, IOFailure, Unsupported
from thermocline.files import gguf_header
from thermocline.files.gguf import GGUF
from thermocline.files.gguf_header import TYPES, parse_header

FUZZED = 20_000  # `python -P tests/fuzz_gguf.py 500000` does more


def parse(data: bytes) -> Any:
    return parse_header(data, len(data), "m.gguf")


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    data = g.gguf_file(g.EVERY_KIND, g.TENSORS).data
    read = parse(data)
    assert not read.powerinfer
    for key, kind, value in g.EVERY_KIND:
        got = read.metadata[key]
        if kind == g.ARRAY:
            assert list(got) == value[1], key
        else:
            assert got == (struct.unpack("<f", struct.pack("<f", value))[0] if kind == g.F32 else value), key
            assert type(got) is type(value), key
    assert {n: (t.type, t.shape, t.end - t.start) for n, t in read.tensors.items()} == {
        "a.weight": ("q8_0", (2, 32), 68),
        "b": ("f32", (4,), 16),
        "c.weight": ("q4_0", (2, 1, 32), 36),
    }
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with GGUF(path) as file:
        for name, t in read.tensors.items():
            assert file.read_rows(name, 0, t.rows).tobytes() == data[t.start : t.end]
        second = read.tensors["a.weight"].start + 34
        assert file.read_rows("a.weight", 1, 2).tobytes() == data[second : second + 34]


def test_powerinfers_magic_is_known() -> None:
    assert parse(g.gguf_file([], g.TENSORS, magic=b"PWRI").data).powerinfer


def test_the_table_of_types_is_the_packages() -> None:
    gguf = pytest.importorskip("gguf")
    theirs = {int(t): (t.name.lower(), *gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGMLQuantizationType}
    assert {k: v for k, v in TYPES.items() if k in theirs} == theirs


def test_a_header_longer_than_the_first_read_is_read(tmp_path: Path) -> None:
    words = [f"word {i}" * 3 for i in range(100_000)]
    path = tmp_path / "m.gguf"
    path.write_bytes(g.gguf_file([("tokens", g.ARRAY, (g.STRING, words))], g.TENSORS).data)
    assert path.stat().st_size > 2 << 20
    with GGUF(path) as file:
        assert file.metadata["tokens"] == words
        assert len(file.read_rows("b", 0, 1)) == 1


# --- damage -------------------------------------------------------------------------------------------------


def test_a_file_cut_anywhere_in_its_header_or_data_is_refused() -> None:
    data = g.gguf_file(g.EVERY_KIND, g.TENSORS).data
    end = max(t.end for t in parse(data).tensors.values())
    for size in range(end):
        with pytest.raises(BadFile):
            parse(data[:size])
    parse(data[:end])


DIMS = [n + d for n in (2**31, 2**32, 2**42, 2**63) for d in (-1, 0, 1)] + [0, 2**64 - 1]


@pytest.mark.parametrize("kind", [0, 1, 2, 8, 12, 14, 30])
def test_no_shape_overflows(kind: int) -> None:
    """2^32 x 2^32 of anything wraps to 0 in 64 bits."""
    for dim in DIMS:
        for dims in (
            (dim,),
            (dim, 1),
            (256, dim),
            (dim, dim),
            (1 << 16, 1 << 16, dim),
            (dim,) * 4,
            (dim,) * 5,
        ):
            with pytest.raises(BadFile):
                parse(g.gguf_file([], [("t", dims, kind, 64)]).data)


HEADER = struct.Struct("<4sIQQ")
MANY = 1 << 62


def tensor(name: bytes = b"t", dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    out = len(name).to_bytes(8, "little") + name + struct.pack("<I", len(dims))
    return out + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


def with_tensors(*infos: bytes) -> bytes:
    head = HEADER.pack(b"GGUF", 3, len(infos), 0) + b"".join(infos)
    return head + bytes(-len(head) % 32) + bytes(64)


def with_key(key: bytes, kind: int, value: bytes, more: bytes = b"") -> bytes:
    head = HEADER.pack(b"GGUF", 3, 0, 1 + bool(more)) + len(key).to_bytes(8, "little") + key
    return head + struct.pack("<I", kind) + value + more


def array(kind: int, n: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, n) + data


ONE_KEY = (1).to_bytes(8, "little") + b"k" + struct.pack("<IB", g.U8, 1)
WRONG: dict[str, tuple[bytes, str]] = {
    "magic": (b"GGUT" + bytes(60), "not a GGUF file"),
    "nothing": (b"", "an empty file"),
    "only a magic": (b"GGUF", "truncated"),
    "old GGML": (b"lmgg" + bytes(60), "old llama.cpp"),
    "zip": (b"PK\x03\x04" + bytes(60), "zip"),
    "HTML": (b"<!DOCTYPE html>" + bytes(60), "HTML"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
    "version 1": (b"GGUF" + struct.pack("<I", 1) + bytes(60), "version 1"),
    "version 4": (b"GGUF" + struct.pack("<I", 4) + bytes(60), "version 4"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(60), "big-endian"),
    "tensors without end": (HEADER.pack(b"GGUF", 3, MANY, 0), "number of tensors"),
    "tensors beyond the file": (HEADER.pack(b"GGUF", 3, 1000, 0) + bytes(100), "number of tensors is 1000"),
    "keys without end": (HEADER.pack(b"GGUF", 3, 0, MANY), "number of keys"),
    "key without end": (HEADER.pack(b"GGUF", 3, 0, 1) + (MANY).to_bytes(8, "little") + bytes(64), "a key"),
    "empty key": (with_key(b"", g.U8, b"\1" * 20), "not allowed"),
    "key not UTF-8": (with_key(b"\xff\xfe", g.U8, b"\1"), "not UTF-8"),
    "key twice": (with_key(b"k", g.U8, b"\1", ONE_KEY), "occurs twice"),
    "kind unknown": (with_key(b"k", 13, bytes(16)), "unknown type 13"),
    "array of arrays": (with_key(b"k", g.ARRAY, array(g.ARRAY, 1, bytes(64))), "array of arrays"),
    "array of unknown": (with_key(b"k", g.ARRAY, array(77, 1, bytes(64))), "unknown type 77"),
    "array without end": (with_key(b"k", g.ARRAY, array(g.U8, MANY, bytes(64))), "length of key"),
    "array beyond the file": (with_key(b"k", g.ARRAY, array(g.F64, 20, bytes(64))), "truncated"),
    "strings beyond the file": (with_key(b"k", g.ARRAY, array(g.STRING, 1 << 25, bytes(64))), "truncated"),
    "string without end": (with_key(b"k", g.STRING, b"\xff" * 8), "length of key"),
    "string not UTF-8": (with_key(b"k", g.STRING, struct.pack("<Q", 2) + b"\xc3\x28"), "not UTF-8"),
    "bool of 2": (with_key(b"k", g.BOOL, b"\2"), "not true or false"),
    "alignment 0": (with_key(b"general.alignment", g.U32, bytes(4)), "alignment"),
    "alignment 3": (with_key(b"general.alignment", g.U32, struct.pack("<I", 3)), "alignment"),
    "alignment 2^31": (with_key(b"general.alignment", g.U32, struct.pack("<I", 1 << 31)), "alignment"),
    "alignment as u64": (with_key(b"general.alignment", g.U64, struct.pack("<Q", 32)), "alignment"),
    "alignment as text": (with_key(b"general.alignment", g.STRING, struct.pack("<Q", 1) + b"8"), "alignment"),
    "tensor name empty": (with_tensors(tensor(b"")), "not allowed"),
    "tensor name NUL": (with_tensors(tensor(b"a\0b")), "not allowed"),
    "tensor name not UTF-8": (with_tensors(tensor(b"\xff")), "not UTF-8"),
    "tensor name long": (with_tensors(tensor(b"x" * 5000)), "length of the name"),
    "tensor twice": (with_tensors(tensor(), tensor(offset=32)), "occurs twice"),
    "no dimensions": (with_tensors(tensor(dims=())), "0 dimensions"),
    "5 dimensions": (with_tensors(tensor(dims=(1,) * 5)), "5 dimensions"),
    "2^32 - 1 dimensions": (with_tensors(tensor(dims=()).replace(b"t" + bytes(4), b"t" + b"\xff" * 4)),
                            "dimensions"),
    "type unknown": (with_tensors(tensor(kind=99)), "type 99"),
    "type retired": (with_tensors(tensor(kind=4)), "type 4"),
    "part of a block": (with_tensors(tensor(dims=(33,), kind=8)), "whole number of q8_0's blocks"),
    "offset misaligned": (with_tensors(tensor(offset=4)), "not a multiple"),
    "offset beyond the end": (with_tensors(tensor(offset=96)), "truncated"),
    "offset 2^64 - 32": (with_tensors(tensor(offset=(1 << 64) - 32)), "truncated"),
    "overlapping": (with_tensors(tensor(dims=(16,)), tensor(b"u", offset=32)), "overlaps"),
    "at the same place": (with_tensors(tensor(), tensor(b"u")), "overlaps"),
    "smaller than its place": (
        with_tensors(tensor(dims=(32,), kind=2), tensor(b"u", offset=64)),
        "18 bytes as q4_0, and 64 bytes are there",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", list(WRONG))
def test_what_is_wrong_is_named(case: str) -> None:
    data, said = WRONG[case]
    with pytest.raises((BadFile, Unsupported), match=said) as caught:
        parse(data)
    assert str(caught.value).startswith("m.gguf: ") and "\n" not in str(caught.value)


def test_damaged_files_are_refused_or_read_as_the_package_reads_them() -> None:
    pytest.importorskip("gguf")
    tally = fuzz_gguf.fuzz(FUZZED)
    assert FUZZED > tally.understood > FUZZED // 20  # neither all harmless nor all nonsense
    assert tally.agreed > tally.understood // 2


@pytest.mark.parametrize("n", [4_000, pytest.param(40_000, marks=pytest.mark.slow)])
def test_reading_a_header_takes_memory_in_proportion(n: int) -> None:
    """The most expensive there are: many tiny strings, many keys, many tensors; and lies about how many."""
    packed = [("general.alignment", g.U32, 1)]
    hostile = [
        g.gguf_file([("k", g.ARRAY, (g.STRING, ["ab"] * n))], []).data,
        g.gguf_file([("k", g.ARRAY, (g.STRING, ["\u0120"] * n))], []).data,
        g.gguf_file([("k", g.ARRAY, (g.STRING, ["\U0001f600"] * n))], []).data,
        g.gguf_file([(f"{i:x}", g.U8, 1) for i in range(n)], []).data,
        g.gguf_file([("k", g.ARRAY, (g.U8, [0] * (1 << 18)))], []).data,
        g.gguf_file(packed, [(f"{i:x}", (1,), 24, 1) for i in range(n)], alignment=1).data,
        *(data for data, _ in WRONG.values()),
    ]
    for data in hostile:
        peak = peak_of(parse, data)
        assert peak <= 12 * len(data) + (1 << 20), (len(data), peak)


def test_a_vocabulary_of_gemmas_size_is_read() -> None:
    """262,144 tokens and 514,906 merges, all short, were "too many values to be what it claims"."""
    arrays = [("tokens", 262_144, "▁ab"), ("merges", 514_906, "▁ an")]
    body = b""
    for key, count, text in arrays:
        raw = text.encode()
        body += len(key).to_bytes(8, "little") + key.encode() + struct.pack("<I", g.ARRAY)
        body += array(g.STRING, count, (len(raw).to_bytes(8, "little") + raw) * count)
    metadata = parse(HEADER.pack(b"GGUF", 3, 0, len(arrays)) + body).metadata
    assert [len(metadata[key]) for key, _, _ in arrays] == [262_144, 514_906]


def test_a_header_longer_than_any_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "MAX_HEADER_BYTES", 1000)
    texts = g.gguf_file([("k", g.ARRAY, (g.STRING, ["ab"] * 100))], []).data
    with pytest.raises(BadFile, match="more than 1000 bytes before the data"):
        parse(texts)


def test_a_sparse_file_of_2_to_the_43_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(HEADER.pack(b"GGUF", 3, 0, 1) + (1).to_bytes(8, "little") + b"k"
                     + struct.pack("<I", g.ARRAY) + array(g.U64, 1 << 25))  # fmt: skip
    os.truncate(path, 1 << 43)
    began = time.process_time()
    with pytest.raises(BadFile, match="before the data"):
        GGUF(path)
    assert time.process_time() - began < 10


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda p: os.symlink("/dev/zero", p)])
def test_only_regular_files_are_opened(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "m.gguf")
    with pytest.raises(BadFile, match="not a file"):
        GGUF(tmp_path / "m.gguf")


# --- split files --------------------------------------------------------------------------------------------


def split(directory: Path, count: int = 3, **changes: Any) -> list[Path]:
    """`count` parts with one tensor each."""
    paths = []
    for i in range(count):
        said = {"split.no": i, "split.count": count, "split.tensors.count": count} | changes
        kinds = {"split.no": g.U16, "split.count": g.U16, "split.tensors.count": g.I32}
        metadata: list[Any] = [(k, kinds[k], v) for k, v in said.items()]
        if i == 0:
            metadata.append(("general.name", g.STRING, "whole"))
        paths.append(directory / f"m-{i + 1:05d}-of-{count:05d}.gguf")
        paths[-1].write_bytes(g.gguf_file(metadata, [(f"t{i}", (4,), 0, 16)]).data)
    return paths


def test_any_part_of_a_split_model_opens_all(tmp_path: Path) -> None:
    for path in split(tmp_path):
        with GGUF(path) as file:
            assert file.metadata["general.name"] == "whole"
            assert list(file.tensors) == ["t0", "t1", "t2"]
            assert math.prod(file.read_rows("t2", 0, 1).shape) == 16


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    paths = split(tmp_path)
    second = paths[1].read_bytes()
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(BadFile, match="part 3 of 3, and its name part 2"):
        GGUF(paths[0])
    paths[1].unlink()
    with pytest.raises(IOFailure, match=r"00002-of-00003\.gguf: part is missing"):
        GGUF(paths[0])
    paths[1].write_bytes(second)
    renamed = tmp_path / "m.gguf"
    renamed.write_bytes(paths[0].read_bytes())
    with pytest.raises(BadFile, match="one of 3 parts, which must be named"):
        GGUF(renamed)


def test_a_split_that_lies_about_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"split\.tensors\.count is 4, the parts hold 3"):
        GGUF(split(tmp_path, **{"split.tensors.count": 4})[0])
    with pytest.raises(BadFile, match="must be named"):
        GGUF(split(tmp_path, **{"split.count": 60000})[0])
    paths = split(tmp_path)
    same = g.gguf_file([("split.no", g.U16, 1), ("split.count", g.U16, 3)], [("t0", (4,), 0, 16)]).data
    paths[1].write_bytes(same)
    with pytest.raises(BadFile, match=r"'t0' is in m-00001-of-00003\.gguf too"):
        GGUF(paths[0])
    paths[1].write_bytes(g.gguf_file([("split.no", g.STRING, "1"), ("split.count", g.U16, 3)], []).data)
    with pytest.raises(BadFile, match=r"split\.no is '1'"):
        GGUF(paths[0])
