"""The safetensors reader: agrees with the library on valid files, refuses others, stays in bounds."""

from __future__ import annotations

import json
import os
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kept_twins
import numpy as np
import pytest

from thermocline.errors import BadFile, IOFailure, ThermoclineError, Unsupported
from thermocline.files import bounded
from thermocline.files import safetensors as st

Json = dict[str, Any]


def file_bytes(header: Json | str | bytes, data: bytes = b"", size: int | None = None) -> bytes:
    """A safetensors file with this header (JSON value or text); `size` lies about the header's length."""
    text = (
        header
        if isinstance(header, bytes)
        else (header if isinstance(header, str) else json.dumps(header)).encode()
    )
    return (len(text) if size is None else size).to_bytes(8, "little") + text + data


def tensor(start: int, end: int, shape: Any = None, dtype: Any = "F32") -> Json:
    return {
        "dtype": dtype,
        "shape": [(end - start) // 4] if shape is None else shape,
        "data_offsets": [start, end],
    }


def opened(data: bytes) -> dict[str, st.Entry]:
    """What `SafeTensors` does, without a disk."""
    n = st.header_size(data[:64], len(data), "file")
    return st.parse_header(data[8 : 8 + n], len(data), "file")


GOOD = file_bytes(
    {"__metadata__": {"format": "pt"}, "a": tensor(0, 8), "b": tensor(8, 24, [2, 2])}, bytes(range(24))
)


# --- what is valid ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama_sharded", "opt"])
def test_tensors_and_rows_are_the_librarys(name: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    with st.Checkpoint(kept_twins.write(name, tmp_path / name)) as checkpoint:
        assert len(checkpoint.tensors) >= 30
        for shard in checkpoint.shards:
            for key, wanted in load_file(shard.path).items():
                assert np.array_equal(shard.read_rows(key, 0, len(wanted)), wanted)
                assert np.array_equal(shard.read_rows(key, 1, len(wanted) - 2), wanted[1:-2])


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_each_loadable_dtype_widens_exactly(dtype: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    x = torch.randn(7, 5, 3).to(getattr(torch, dtype))
    save_file({"x": x}, tmp_path / "f.safetensors")
    with st.SafeTensors(tmp_path / "f.safetensors") as f:
        assert f.tensors["x"].shape == (7, 5, 3)
        rows = x.reshape(35, 3)  # of a stack of matrices: one matrix after the other
        assert np.array_equal(f.read_rows("x", 2, 31), rows[2:31].float().numpy())


def test_other_dtypes_are_described_but_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(
        file_bytes({"x": tensor(0, 8, [1], "F64"), "y": tensor(8, 9, [2], "F4")}, bytes(9))
    )
    with st.SafeTensors(tmp_path / "f") as f:
        assert f.tensors["x"].dtype == "F64" and f.tensors["y"].shape == (2,)
        with pytest.raises(Unsupported, match="tensor 'x' is F64; F32, F16, BF16 can be loaded"):
            f.read_rows("x", 0, 1)


VALID: dict[str, bytes] = {
    "no tensors": file_bytes({}),
    "no tensors, spaces": file_bytes("{ }   "),
    "metadata only": file_bytes({"__metadata__": {"a": 'b{}\\"'}}),
    "scalar": file_bytes({"x": tensor(0, 4, [])}, bytes(4)),
    "empty tensor": file_bytes({"x": tensor(0, 0, [0, 5]), "y": tensor(0, 4)}, bytes(4)),
    "padded with spaces": file_bytes(json.dumps({"x": tensor(0, 4)}) + "     ", bytes(4)),
    "fields in another order": file_bytes('{"x":{"shape":[1],"data_offsets":[0,4],"dtype":"F32"}}', bytes(4)),
    "tensors in another order": file_bytes({"b": tensor(4, 8), "a": tensor(0, 4)}, bytes(8)),
    "white space": file_bytes(
        '{\n "x" : { "dtype" : "F32",\t"shape": [ 1 ], "data_offsets": [0, 4]} }', bytes(4)
    ),
    "braces in a name": file_bytes({'a{}"\\,:': tensor(0, 4)}, bytes(4)),
    "name in another script": file_bytes({"слой.0.вес😀": tensor(0, 4)}, bytes(4)),
    "escaped name": file_bytes('{"\\u0061\\ud83d\\ude00":' + json.dumps(tensor(0, 4)) + "}", bytes(4)),
}


@pytest.mark.parametrize("case", VALID)
def test_unusual_but_valid_headers_are_read_as_the_library_reads_them(case: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    ours = opened(VALID[case])
    (tmp_path / "f").write_bytes(VALID[case])
    with safe_open(tmp_path / "f", "np") as theirs:
        assert sorted(ours) == sorted(theirs.keys())
        for key in ours:
            assert list(ours[key].shape) == list(theirs.get_slice(key).get_shape())


# --- what is not --------------------------------------------------------------------------------------------

ONE = json.dumps(tensor(0, 4))
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "an empty file"),
    "seven bytes": (b"\x02\0\0\0\0\0\0", "7 bytes is too short"),
    "git-lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n",
        "git lfs pull",
    ),
    "HTML": (b"\n <!DOCTYPE html><title>404</title>", "an HTML page"),
    "HTML without doctype": (b"<html><body>", "an HTML page"),
    "XML": (b"<?xml version='1.0'?><Error>AccessDenied</Error>", "an XML document"),
    "PyTorch zip": (b"PK\x03\x04" + bytes(60), "pickle file; only safetensors are read: convert it once"),
    "pickle": (b"\x80\x02}q\x00." + bytes(60), "a Python pickle, which can run code"),
    "GGUF": (b"GGUF\x03\0\0\0" + bytes(60), "a GGUF file"),
    "old GGML": (b"tjgg\x03\0\0\0" + bytes(60), "GGJT"),
    "gzip": (b"\x1f\x8b\x08" + bytes(60), "gzip-compressed"),
    "PDF": (b"%PDF-1.4" + bytes(60), "a PDF"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(60), "HDF5"),
    "zeros": (bytes(1000), "claims a header of 0 bytes"),
    "header longer than the file": (file_bytes("{}", size=3), "header of 3 bytes in a file of 10; truncated"),
    "header 2^63": (file_bytes("{}", size=1 << 63), "claims a header of 9223372036854775808 bytes"),
    "header 2^64-1": (b"\xff" * 8 + b"{}", "claims a header of 18446744073709551615 bytes"),
    "header over the limit": (file_bytes("{}", size=100_000_001), "at most 100000000"),
    "header a list": (file_bytes("[]"), "does not start with"),
    "header starts with space": (file_bytes(' {"x":' + ONE + "}", bytes(4)), "does not start with"),
    "header not closed": (file_bytes('{"x":' + ONE, bytes(4)), "header is not valid at byte"),
    "header with more after it": (file_bytes('{"x":' + ONE + "}x", bytes(4)), "goes on after its end"),
    "header padded with zeros": (
        file_bytes(b'{"x":' + ONE.encode() + b"}\0\0", bytes(4)),
        "goes on after its end",
    ),
    "comma at the end": (file_bytes('{"x":' + ONE + ",}", bytes(4)), "header is not valid"),
    "deep nesting": (file_bytes('{"x":' + '{"a":' * 50_000 + "1" + "}" * 50_001), "header is not valid"),
    "deep list": (file_bytes('{"x":{"dtype":' + "[" * 50_000 + "]" * 50_000 + "}}"), "nested too deeply"),
    "not UTF-8": (file_bytes(b'{"\xff":' + ONE.encode() + b"}", bytes(4)), "is not valid text"),
    "name twice": (file_bytes('{"x":' + ONE + ',"x":' + ONE + "}", bytes(4)), "tensor 'x' occurs twice"),
    "name twice by escape": (file_bytes('{"x":' + ONE + ',"\\u0078":' + ONE + "}", bytes(4)), "occurs twice"),
    "metadata twice": (file_bytes('{"__metadata__":{},"__metadata__":{}}'), "'__metadata__' occurs twice"),
    "name empty": (file_bytes({"": tensor(0, 4)}, bytes(4)), "is not allowed"),
    "name with NUL": (file_bytes({"a\0b": tensor(0, 4)}, bytes(4)), "is not allowed"),
    "name half a surrogate": (file_bytes('{"\\ud800":' + ONE + "}", bytes(4)), "is not valid text"),
    "name endless": (file_bytes({"x" * 5000: tensor(0, 4)}, bytes(4)), "header is not valid"),
    "metadata a number": (file_bytes({"__metadata__": {"a": 1}}), "__metadata__ 'a' is not a string"),
    "metadata a list": (file_bytes({"__metadata__": []}), "header is not valid"),
    "tensor a number": (file_bytes({"x": 1}), "header is not valid"),
    "tensor without shape": (
        file_bytes({"x": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4)),
        "fields are",
    ),
    "tensor with more fields": (file_bytes({"x": tensor(0, 4) | {"path": "/"}}, bytes(4)), "fields are"),
    "field twice": (file_bytes('{"x":' + ONE[:-1] + ',"shape":[1]}}', bytes(4)), "'shape' occurs twice"),
    "dtype unknown": (file_bytes({"x": tensor(0, 4, [1], "Q4_0")}, bytes(4)), "unknown dtype 'Q4_0'"),
    "dtype a list": (file_bytes({"x": tensor(0, 4, [1], ["F32"])}, bytes(4)), "unknown dtype"),
    "dtype null": (file_bytes({"x": tensor(0, 4, [1], None)}, bytes(4)), "unknown dtype"),
    "shape a number": (file_bytes({"x": tensor(0, 4, 1)}, bytes(4)), "shape '?1'? is not a list"),
    "shape with a float": (file_bytes({"x": tensor(0, 4, [1.0])}, bytes(4)), "is not a list"),
    "shape 1e0": (
        file_bytes('{"x":{"dtype":"F32","shape":[1e0],"data_offsets":[0,4]}}', bytes(4)),
        "is not a list",
    ),
    "shape -0": (file_bytes('{"x":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'), "negative size"),
    "shape negative": (file_bytes({"x": tensor(0, 4, [-1, -1])}, bytes(4)), "negative size"),
    "shape true": (file_bytes({"x": tensor(0, 4, [True])}, bytes(4)), "is not a list"),
    "shape a string": (file_bytes({"x": tensor(0, 4, ["1"])}, bytes(4)), "is not a list"),
    "shape of many dimensions": (file_bytes({"x": tensor(0, 4, [1] * 9)}, bytes(4)), "at most 8 sizes"),
    "shape overflows 64 bits": (file_bytes({"x": tensor(0, 0, [1 << 32, 1 << 32])}), "data_offsets give 0"),
    "shape 2^64": (file_bytes({"x": tensor(0, 0, [1 << 64])}), "is not a list"),
    "shape larger than data": (
        file_bytes({"x": tensor(0, 4, [2])}, bytes(4)),
        "needs 8 bytes, data_offsets give 4",
    ),
    "half a byte": (file_bytes({"x": tensor(0, 1, [1], "F4")}, bytes(1)), "needs 0.5 bytes"),
    "offsets three": (
        file_bytes({"x": tensor(0, 4) | {"data_offsets": [0, 4, 8]}}, bytes(4)),
        r"are not \[start",
    ),
    "offsets backwards": (
        file_bytes({"x": tensor(0, 4) | {"data_offsets": [4, 0]}}, bytes(4)),
        r"are not \[start",
    ),
    "offsets 2^63": (
        file_bytes({"x": tensor(0, 4) | {"data_offsets": [1 << 63, (1 << 63) + 4]}}, bytes(4)),
        "are not",
    ),
    "data missing": (file_bytes({"x": tensor(0, 4)}), "truncated: tensors end at byte"),
    "data cut": (GOOD[:-1], "truncated"),
    "data left over": (GOOD + b"\0", "has bytes after the last tensor"),
    "hole at the start": (file_bytes({"x": tensor(4, 8)}, bytes(8)), "leaves a hole of 4 bytes"),
    "hole between": (
        file_bytes({"x": tensor(0, 4), "y": tensor(8, 12)}, bytes(12)),
        "'y' leaves a hole of 4",
    ),
    "overlap": (file_bytes({"x": tensor(0, 8), "y": tensor(4, 12)}, bytes(12)), "overlaps the one before"),
    "the same bytes twice": (file_bytes({"x": tensor(0, 4), "y": tensor(0, 4)}, bytes(4)), "overlaps"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_in_a_line_at_once(case: str, tmp_path: Path) -> None:
    data, message = BAD[case]
    (tmp_path / "model.safetensors").write_bytes(data)
    started = time.process_time()
    with pytest.raises(BadFile, match=message) as caught:
        st.Checkpoint(tmp_path)
    assert time.process_time() - started < 10
    assert "model.safetensors: " in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_cut_anywhere_is_refused() -> None:
    assert len(opened(GOOD)) == 2
    for n in range(len(GOOD)):
        with pytest.raises(BadFile):
            opened(GOOD[:n])


EDGES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**42 + 1, 2**48, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.mark.parametrize("dtype", ["F32", "F16", "U8", "F4", "F6_E2M3"])
def test_sizes_at_every_edge_never_wrap(dtype: str) -> None:
    """Products that are 0 or 4 modulo 2^64 must not pass for those sizes."""
    for dims in range(1, 5):
        for size in EDGES[1:]:
            for other in EDGES:
                shape = [size] * (dims - 1) + [other]
                exact = int(np.prod([int(s) for s in shape], dtype=object)) * st.DTYPE_BITS[dtype]
                for length in (0, 4):
                    if exact == 8 * length:
                        continue
                    with pytest.raises(BadFile):
                        opened(file_bytes({"x": tensor(0, length, shape, dtype)}, bytes(length)))


def test_a_special_file_is_never_opened(tmp_path: Path) -> None:
    for name, make in {
        "fifo": os.mkfifo,
        "device": lambda p: p.symlink_to("/dev/zero"),
        "terminal": lambda p: p.symlink_to("/dev/tty"),
        "directory": lambda p: p.mkdir(),
    }.items():
        make(tmp_path / name)
        started = time.process_time()
        with pytest.raises(BadFile, match="not a file"):
            st.SafeTensors(tmp_path / name)
        assert time.process_time() - started < 10
    with pytest.raises(IOFailure, match="no such file"):
        st.SafeTensors(tmp_path / "absent")
    with pytest.raises(IOFailure, match="cannot open"):
        st.SafeTensors(tmp_path / "nul\0inside")


def test_a_file_that_shrinks_while_open_is_an_error_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(GOOD)
    with st.SafeTensors(tmp_path / "f") as f:
        os.truncate(tmp_path / "f", len(GOOD) - 4)
        with pytest.raises(BadFile, match="4 bytes too early"):
            f.read_rows("b", 0, 2)


def peak_of(body: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        body()
        return tracemalloc.get_traced_memory()[1]
    except ThermoclineError:
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


MIB = 1 << 20
BOMBS: dict[str, Callable[[], bytes]] = {
    "empty lists": lambda: b'{"x":{"dtype":[' + b"[]," * (300 * 1024) + b"[]]}}",
    "empty strings": lambda: b'{"x":{"dtype":[' + b'"",' * (300 * 1024) + b'""]}}',
    "metadata keys": lambda: b'{"__metadata__":{' + b",".join(b'"%d":""' % i for i in range(90_000)) + b"}}x",
    "wide text": lambda: b'{"__metadata__":{"a":"' + "😀".encode() * (200 * 1024) + b'"}}x',
    "one endless string": lambda: b'{"' + b"a" * (8 * MIB),
    "backslashes": lambda: b'{"__metadata__":{"a":"' + b"\\\\" * (4 * MIB),
    "spaces": lambda: b"{" + b" " * (8 * MIB) + b"}x",
    "braces": lambda: b"{" * (4 * MIB),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_parsing_keeps_at_most_four_times_the_header_and_16_mib(bomb: str) -> None:
    header = BOMBS[bomb]()
    assert peak_of(lambda: st.parse_header(header, 8 + len(header), "file")) <= 4 * len(header) + 16 * MIB
    started = time.process_time()  # again: tracing makes it five times slower
    with pytest.raises(BadFile):
        st.parse_header(header, 8 + len(header), "file")
    assert time.process_time() - started < 20  # about 0.5 s where nothing else runs


def many_tensors(n: int) -> bytes:
    """The header with the most tensors a byte."""
    return (
        b"{" + b",".join(b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(n)) + b"}"
    )


def test_as_many_tensors_as_a_header_may_have_stay_within_the_bound() -> None:
    """Measured on an eighth of them: the cost is proportional, and tracing is slow."""
    header = many_tensors(st.MAX_TENSORS // 8)
    peak = peak_of(lambda: st.parse_header(header, 8 + len(header), "file"))
    assert 8 * peak <= 4 * 8 * len(header) + 16 * MIB


def test_too_many_tensors_are_refused() -> None:
    header = many_tensors(st.MAX_TENSORS + 1)
    with pytest.raises(BadFile, match="more than 65536 tensors"):
        st.parse_header(header, 8 + len(header), "file")


JSON_BOMBS: dict[str, Callable[[], bytes]] = {
    "objects": lambda: b'{"a":[' + b'{"":0},' * 50_000 + b"0]}",
    "lists": lambda: b'{"a":[' + b"[]," * 150_000 + b"0]}",
    "keys": lambda: b"{" + b",".join(b'"%x":1' % i for i in range(60_000)) + b"}",
    "numbers": lambda: b'{"a":[' + b"1234," * 100_000 + b"0]}",
    "wide": lambda: b'{"a":"' + "😀".encode() * (4 * MIB) + b'"}',
    "escapes": lambda: b'{"a":"' + b"\\u0416" * MIB + b'"}',
    "shards": lambda: (
        b'{"weight_map":{' + b",".join(b'"t%d":"m.safetensors"' % i for i in range(50_000)) + b"}}"
    ),
}


@pytest.mark.parametrize("bomb", JSON_BOMBS)
def test_json_keeps_at_most_four_times_its_size_and_16_mib(bomb: str) -> None:
    data = JSON_BOMBS[bomb]()
    assert peak_of(lambda: bounded.parse_json(data, "file")) <= 4 * len(data) + 16 * MIB


# --- directories --------------------------------------------------------------------------------------------


def sharded(path: Path, **changes: Any) -> Path:
    """Two shards and their index; `changes` replace keys of the index, or files where the value is bytes."""
    path.mkdir(parents=True)
    (path / "a.safetensors").write_bytes(file_bytes({"x": tensor(0, 4)}, bytes(4)))
    (path / "b.safetensors").write_bytes(file_bytes({"y": tensor(0, 4)}, bytes(4)))
    index = {
        "metadata": {"total_size": 8},
        "weight_map": {"x": "a.safetensors", "y": "b.safetensors"},
    } | changes
    (path / st.INDEX).write_text(json.dumps(index))
    return path


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    with st.Checkpoint(sharded(tmp_path / "m")) as c:
        assert sorted(c.tensors) == ["x", "y"] and c.where["y"].path.name == "b.safetensors"


SHARD_NAMES = ["../a.safetensors", "/etc/passwd", "sub/a.safetensors", "..", ".", "", "a\\b.safetensors"]
SHARD_NAMES += ["C:a.safetensors", "a\0.safetensors", "a\n.safetensors", "./a.safetensors", "~/a.safetensors"]
SHARD_NAMES += ["x" * 300 + ".safetensors"]


@pytest.mark.parametrize("file", SHARD_NAMES)
def test_a_shard_name_with_a_path_in_it_is_refused(file: str, tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="is not a plain file name"):
        st.Checkpoint(sharded(tmp_path / "m", weight_map={"x": file}))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"weight_map": {}}, BadFile, "no weight_map"),
        ({"weight_map": None}, BadFile, "no weight_map"),
        ({"weight_map": ["a.safetensors"]}, BadFile, "no weight_map"),
        ({"weight_map": {"x": 1}}, BadFile, "weight_map 'x' is not a file name"),
        ({"weight_map": {"x": "a.bin"}}, BadFile, "shard 'a.bin' is not a .safetensors file"),
        ({"extra": 1}, BadFile, "unknown key 'extra'"),
        (
            {"weight_map": {"x": "a.safetensors", "y": "c.safetensors"}},
            IOFailure,
            "c.safetensors: shard is missing",
        ),
        (
            {"weight_map": {"x": "a.safetensors", "y": "a.safetensors"}},
            BadFile,
            "tensor 'y' is not in a.safetensors",
        ),
        ({"weight_map": {"y": "b.safetensors", "z": "b.safetensors"}}, BadFile, "tensor 'z' is not in"),
        ({"weight_map": {"x": "b.safetensors", "y": "b.safetensors"}}, BadFile, "tensor 'x' is not in b"),
        ({"weight_map": {"other": "a.safetensors"}}, BadFile, "tensor 'x' is not what"),
    ],
)
def test_an_index_that_lies_is_refused(
    changes: Json, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        st.Checkpoint(sharded(tmp_path / "m", **changes))


def test_a_single_file_goes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    path = sharded(tmp_path / "m")
    (path / st.SINGLE).write_bytes(GOOD)
    with st.Checkpoint(path) as c:
        assert sorted(c.tensors) == ["a", "b"]


def test_a_shard_linked_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    path = sharded(tmp_path / "m")
    shutil.move(path / "b.safetensors", tmp_path / "b.safetensors")
    (path / "b.safetensors").symlink_to("../b.safetensors")
    with pytest.raises(BadFile, match="link out of the model's directory"):
        st.Checkpoint(path)


def test_the_hugging_face_caches_own_links_are_followed(tmp_path: Path) -> None:
    path = sharded(tmp_path / "models--a--b" / "snapshots" / "0123")
    (tmp_path / "models--a--b" / "blobs").mkdir()
    shutil.move(path / "b.safetensors", tmp_path / "models--a--b" / "blobs" / "cafe")
    (path / "b.safetensors").symlink_to("../../blobs/cafe")
    with st.Checkpoint(path) as c:
        assert sorted(c.tensors) == ["x", "y"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "old.ckpt"])
def test_pickles_are_refused_with_a_way_to_convert_them(name: str, tmp_path: Path) -> None:
    canary = tmp_path / "ran"
    payload = b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR."
    (tmp_path / name).write_bytes(payload)
    with pytest.raises(Unsupported, match="can run code when opened") as caught:
        st.Checkpoint(tmp_path)
    assert "save_file" in str(caught.value) and name in str(caught.value) and not canary.exists()


def test_a_header_whose_length_begins_as_a_pickle_does_is_read(tmp_path: Path) -> None:
    path, header = tmp_path / "m.safetensors", b'{"__metadata__":{"a":"b"}}'.ljust(0x380)
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    assert path.read_bytes()[:2] == b"\x80\x03"
    assert st.SafeTensors(path).metadata == {"a": "b"}


@pytest.mark.oracle
def test_the_way_to_convert_a_pickle_works(tmp_path: Path) -> None:
    import subprocess
    import sys

    import torch

    torch.save({"x": torch.arange(6.0).reshape(2, 3).T}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Unsupported) as caught:
        st.Checkpoint(tmp_path)
    command = str(caught.value).split('python -c "', 1)[1].rstrip('"')
    subprocess.run([sys.executable, "-c", command], cwd=tmp_path, check=True)
    with st.Checkpoint(tmp_path) as c:
        assert c.tensors["x"].shape == (3, 2)


def test_closing_leaves_no_descriptor_open(tmp_path: Path) -> None:
    path = sharded(tmp_path / "m")
    before = len(os.listdir("/proc/self/fd"))
    with st.Checkpoint(path):
        pass
    (path / "b.safetensors").write_bytes(b"broken")
    with pytest.raises(BadFile):
        st.Checkpoint(path)
    assert len(os.listdir("/proc/self/fd")) == before
