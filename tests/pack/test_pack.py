"""Packs: they hold what the model says, no crash or full disk leaves half of one, no damage goes unseen."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kept_twins
import numpy as np
import pytest
import twins
from numpy.typing import NDArray

from thermocline import _native
from thermocline.convert import importer, pack_cache
from thermocline.errors import BadFile, IOFailure, ThermoclineError, Unsupported, UsageError
from thermocline.model import quant, tensors
from thermocline.model.spec import ModelSpec, RopeScaling
from thermocline.pack import manifest, pack, writer
from thermocline.pack.pack import Pack

F32 = NDArray[np.float32]

SPEC = ModelSpec(
    architecture="test",
    dim=64,
    ffn_dim=64,  # equal to dim: shapes alone cannot tell rows from columns
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    vocab_size=1031,
    max_context=32,
    norm="rms",
    norm_eps=1e-5,
    activation="relu",
    eos_ids=(2,),
)


def random_source(name: str, first: int, last: int) -> F32:
    """Rows that depend on the tensor's name and the row's number only, so any split gives the same."""
    seeds = [(hash_of(name) + r) % 2**32 for r in range(first, last)]
    if name.endswith(".order"):
        return np.arange(first, last, dtype=np.float32)
    if name.endswith((".up", ".down")) or (".weight" in name and "norm" not in name):
        return np.stack([np.random.default_rng(s).standard_normal(64, dtype=np.float32) for s in seeds])
    return np.array(seeds, np.float32)


def hash_of(name: str) -> int:
    return _native.crc32c(name.encode())


def read_tensor(p: Pack, name: str) -> F32:
    """[rows, columns per record] of a tensor, decoded, straight from weights.bin."""
    t = p.tensors[name]
    data = np.fromfile(p.weights_path, np.uint8, t.bytes, offset=t.offset).reshape(-1, t.stride)
    if name.endswith(".bundle"):
        row = quant.row_bytes(t.format, p.spec.dim)
        parts = [
            quant.decode(t.format, data[:, i * row : (i + 1) * row], p.spec.dim)
            for i in range(1 + p.spec.gated)
        ]
        return np.concatenate(parts, axis=1)
    return quant.decode(t.format, data, t.shape[-1])


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = kept_twins.write(name, tmp_path_factory.mktemp("twins") / name)
        return made[name]

    return make


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of SPEC in f32 (about 10 blocks). Tests that change it must change a copy, or change it back."""
    path = tmp_path_factory.mktemp("small") / "pack"
    files = {"tokenizer.json": b"{}"}
    writer.write_pack(path, SPEC, "f32", random_source, writer.PackExtras(files=files))
    return path


# --- what is written ----------------------------------------------------------------------------------------


def llama_tensors(hf: dict[str, F32], i: int, sparse: bool) -> dict[str, F32]:
    m, a = f"model.layers.{i}", f"layers.{i}"
    out = {
        f"{a}.qkv.weight": np.concatenate([hf[f"{m}.self_attn.{x}_proj.weight"] for x in "qkv"]),
        f"{a}.attn_out.weight": hf[f"{m}.self_attn.o_proj.weight"],
        f"{a}.gate.weight": hf[f"{m}.mlp.gate_proj.weight"],
        f"{a}.attn_norm.weight": hf[f"{m}.input_layernorm.weight"],
        f"{a}.ffn_norm.weight": hf[f"{m}.post_attention_layernorm.weight"],
        "embed.weight": hf["model.embed_tokens.weight"],
        "out_norm.weight": hf["model.norm.weight"],
    }
    up, down = hf[f"{m}.mlp.up_proj.weight"], hf[f"{m}.mlp.down_proj.weight"]
    if sparse:
        out[f"{a}.bundle"] = np.hstack([up, down.T])
    else:
        out |= {f"{a}.up.weight": up, f"{a}.down.weight": down}
    if f"{m}.self_attn.q_proj.bias" in hf:
        out[f"{a}.qkv.bias"] = np.concatenate([hf[f"{m}.self_attn.{x}_proj.bias"] for x in "qkv"])
        out[f"{a}.attn_out.bias"] = hf[f"{m}.self_attn.o_proj.bias"]
    if "lm_head.weight" in hf:
        out["head.weight"] = hf["lm_head.weight"]
    return out


def opt_tensors(hf: dict[str, F32], i: int) -> dict[str, F32]:
    m, a = f"model.decoder.layers.{i}", f"layers.{i}"
    out = {
        "embed.weight": hf["model.decoder.embed_tokens.weight"],
        "pos_embed.weight": hf["model.decoder.embed_positions.weight"][2:],
        f"{a}.bundle": hf[f"{m}.fc2.weight"].T,
        f"{a}.down.bias": hf[f"{m}.fc2.bias"],
    }
    for x in ("weight", "bias"):
        out |= {
            f"{a}.qkv.{x}": np.concatenate([hf[f"{m}.self_attn.{n}_proj.{x}"] for n in "qkv"]),
            f"{a}.attn_out.{x}": hf[f"{m}.self_attn.out_proj.{x}"],
            f"{a}.gate.{x}": hf[f"{m}.fc1.{x}"],
            f"{a}.attn_norm.{x}": hf[f"{m}.self_attn_layer_norm.{x}"],
            f"{a}.ffn_norm.{x}": hf[f"{m}.final_layer_norm.{x}"],
            f"out_norm.{x}": hf[f"model.decoder.final_layer_norm.{x}"],
        }
    return out


# written out here; the other families' order shows in their logits (test_twins)
LLAMAS = ("llama", "mistral", "bamboo")
BY_HAND = [
    n
    for n in kept_twins.TWINS
    if n == "opt" or (n.startswith(LLAMAS) and not any(x in n for x in ("llama4", "embedding")))
]


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("format", ["f32", "q4_0"])
def test_a_pack_holds_the_twins_weights_in_our_order(
    name: str, format: str, twin: Callable[[str], Path], tmp_path: Path
) -> None:
    from safetensors.numpy import load_file

    importer.pack(twin(name), tmp_path / "p", format)
    p = Pack.open(tmp_path / "p")
    hf: dict[str, F32] = {}
    for file in twin(name).glob("*.safetensors"):
        hf |= load_file(file)
    wanted: dict[str, F32] = {}
    for i in range(p.spec.n_layers):
        wanted |= opt_tensors(hf, i) if name == "opt" else llama_tensors(hf, i, p.spec.sparse)
    assert wanted.keys() == p.tensors.keys()
    for tensor, x in wanted.items():
        got, t = read_tensor(p, tensor), p.tensors[tensor]
        x = x.reshape(got.shape)
        if t.format != "f32":
            x = quant.decode(t.format, quant.encode(t.format, np.ascontiguousarray(x)), x.shape[1])
        assert np.array_equal(got, x), tensor
    assert pack.verify(p) == []


@pytest.mark.parametrize("format", [f.name for f in quant.FORMATS.values() if f.block <= 32])
def test_a_pack_can_be_made_from_any_source_of_rows(format: str, tmp_path: Path) -> None:
    spec = dataclasses.replace(SPEC, n_experts=3, norm="layer", position="learned")
    extra = [
        f"layers.{i}.{x}" for i in range(2) for x in ("gate.bias", "qkv.bias", "attn_norm.bias", "order")
    ]
    writer.write_pack(tmp_path / "p", spec, format, random_source, writer.PackExtras(optional=extra))
    p = Pack.open(tmp_path / "p")
    assert p.tensors["layers.1.bundle"].shape == (3, 64)
    x = np.concatenate([random_source(f"layers.1.{part}", 0, 192) for part in ("up", "down")], axis=1)
    assert np.array_equal(
        read_tensor(p, "layers.1.bundle"), quant.decode(format, quant.encode(format, x), 128)
    )
    bias = np.fromfile(p.weights_path, np.float32, 192, offset=p.tensors["layers.1.gate.bias"].offset)
    assert np.array_equal(bias, random_source("layers.1.gate.bias", 0, 192))
    order = np.fromfile(p.weights_path, np.int32, 192, offset=p.tensors["layers.0.order"].offset)
    assert np.array_equal(order, np.arange(192)) and p.tensors["layers.0.order"].format == "i32"


def test_packing_is_deterministic(small: Path, tmp_path: Path) -> None:
    writer.write_pack(
        tmp_path / "again", SPEC, "f32", random_source, writer.PackExtras(files={"tokenizer.json": b"{}"})
    )
    for file in small.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_tensors_start_on_pages_and_checksums_are_per_64_kib(small: Path) -> None:
    p, data = Pack.open(small), (small / "weights.bin").read_bytes()
    assert all(t.offset % 4096 == 0 for t in p.tensors.values()) and len(data) % 4096 == 0
    blocks = [data[i : i + 65536] for i in range(0, len(data), 65536)]
    assert [int(c) for c in p.checksums] == [_native.crc32c(b) for b in blocks]
    assert p.checksums.dtype == np.uint32 and len(blocks) > 4


def test_bundle_strides_are_512_where_cheap_and_64_else() -> None:
    assert tensors.bundle_stride(512) == 512
    assert tensors.bundle_stride(2 * quant.row_bytes("q8_0", 4096)) == 8704  # exactly 17 x 512
    assert tensors.bundle_stride(2 * quant.row_bytes("q4_0", 4096)) == 4608
    assert tensors.bundle_stride(460) == 512 and tensors.bundle_stride(440) == 448
    assert tensors.bundle_stride(36) == 64


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    writer.write_pack(tmp_path / "p", SPEC, "q8_0", random_source, progress=lambda *s: seen.append(s))
    assert [d for d, _ in seen] == sorted(d for d, _ in seen) and seen[-1][0] == seen[-1][1]


def test_a_weight_beyond_the_formats_range_is_refused(tmp_path: Path) -> None:
    def huge(name: str, first: int, last: int) -> F32:
        return random_source(name, first, last) * np.float32(1e9)

    with pytest.raises(Unsupported, match=r"embed.weight: a weight of .* too large for f16; use bf16"):
        writer.write_pack(tmp_path / "p", SPEC, "f16", huge)
    writer.write_pack(tmp_path / "p", SPEC, "bf16", huge)


def test_columns_that_do_not_fill_blocks_are_refused_before_writing(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"embed.weight: q4_0 .* 48 columns"):
        writer.write_pack(tmp_path / "p", dataclasses.replace(SPEC, dim=48), "q4_0", random_source)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.oracle
def test_inspect_counts_every_byte_and_parameter(twin: Callable[[str], Path], tmp_path: Path) -> None:
    for name in ("llama", "opt"):
        importer.pack(twin(name), tmp_path / name, "q8_0")
        told = pack.inspect(Pack.open(tmp_path / name))
        json.dumps(told)
        wanted = sum(p.numel() for p in twins.hf_model(twin(name)).parameters())
        unused = 2 * 64 if name == "opt" else 0  # OPT's two unused position rows
        assert told["parameters"] == wanted - unused
        assert told["files"]["weights.bin"] == (tmp_path / name / "weights.bin").stat().st_size


def test_bytes_per_token_are_the_dense_reads(tmp_path: Path) -> None:
    writer.write_pack(tmp_path / "p", SPEC, "q8_0", random_source)
    row = 68
    layer = row * (SPEC.qkv_rows + 64 + 3 * 64) + 2 * 256
    dense = pack.inspect(Pack.open(tmp_path / "p"))["bytes_per_token_dense"]
    assert dense == 2 * layer + 256 + row * SPEC.vocab_size + row
    writer.write_pack(tmp_path / "tied", dataclasses.replace(SPEC, tied_head=True), "q8_0", random_source)
    assert pack.inspect(Pack.open(tmp_path / "tied"))["bytes_per_token_dense"] == dense


# --- crashes and full disks ---------------------------------------------------------------------------------


def operations(monkeypatch: pytest.MonkeyPatch, at: int, act: Callable[[], Any]) -> list[str]:
    """Call `act` instead of the `at`-th write, fsync, mkdir or rename; returns the log of them."""
    log: list[str] = []

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            log.append(name)
            return act() if len(log) == at + 1 else real(*args, **kwargs)

        monkeypatch.setattr(os, name, counted)

    for name in ("write", "fsync", "mkdir", "rename"):
        wrap(name)
    return log


def contents(path: Path) -> dict[str, bytes] | None:
    return {f.name: f.read_bytes() for f in path.iterdir()} if path.exists() else None


@pytest.fixture(params=["exchanged", "renamed"])
def old_and_new(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, Callable[[], None], list[Any]]]:
    """(dst, a pack of it, [old contents, new contents]): dst is a pack, and packing replaces it."""
    if request.param == "renamed":  # systems that cannot exchange directories
        monkeypatch.setattr(writer, "_exchange", lambda a, b: False)
    dst = tmp_path / "model"

    def write(format: str = "q4_0") -> None:
        writer.write_pack(dst, SPEC, format, cheap_source, overwrite=True)

    write()
    new = contents(dst)
    write("q8_0")
    yield dst, write, [contents(dst), new]


def cheap_source(name: str, first: int, last: int) -> F32:
    vector = "norm" in name
    return np.full(last - first if vector else (last - first, 64), 0.5, np.float32)


def test_a_failure_at_any_write_sync_or_rename_leaves_the_old_pack_and_no_litter(
    old_and_new: tuple[Path, Callable[[], None], list[Any]],
) -> None:
    dst, write, (old, new) = old_and_new

    def full() -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    at, log = -1, ["start"]
    while len(log) > at:
        at += 1
        with pytest.MonkeyPatch.context() as patch:
            log = operations(patch, at, full)
            try:
                write()
            except IOFailure as e:
                assert "No space left" in str(e) and "GiB" in str(e)
        found = contents(dst)
        done = at == 0 or len(log) <= at  # 0 is making the parent directory, which exists
        assert found == (new if done else old), f"operation {at}: {log[-1]}"
        assert sorted(p.name for p in dst.parent.iterdir()) == ["model"], f"operation {at}: {log[-1]}"
        if found == new:
            writer.write_pack(dst, SPEC, "q8_0", cheap_source, overwrite=True)
    assert at > 30


def test_short_writes_are_continued(old_and_new: tuple[Path, Callable[[], None], list[Any]]) -> None:
    dst, write, (_, new) = old_and_new
    real = os.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[: max(1, len(data) // 3)]))
        write()
    assert contents(dst) == new


def killed_child(body: Callable[[], None]) -> int:
    """Run `body` in a forked child; the signal that ended it, or 0."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
            os._exit(0)
        finally:
            os._exit(1)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


def test_a_kill_at_any_write_sync_or_rename_leaves_a_whole_pack_or_none(
    old_and_new: tuple[Path, Callable[[], None], list[Any]], request: pytest.FixtureRequest
) -> None:
    dst, write, (old, new) = old_and_new
    renamed = "renamed" in request.node.name
    at, seen = 0, []
    while True:

        def body(at: int = at) -> None:
            patch = pytest.MonkeyPatch()
            operations(patch, at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            write()

        if killed_child(body) == 0:
            break
        found = contents(dst)
        assert found in (old, new, None), f"operation {at}"
        seen.append("none" if found is None else "old" if found == old else "new")
        if found != old:
            writer.write_pack(dst, SPEC, "q8_0", cheap_source, overwrite=True)
        at += 1
    # none only where it was killed exactly between the two renames
    assert at > 30 and seen.count("none") == renamed and seen.count("new") <= 1
    write()
    assert sorted(p.name for p in dst.parent.iterdir()) == ["model"]  # and the litter is cleared next time


def test_a_pack_that_was_being_replaced_when_its_writer_died_comes_back(tmp_path: Path) -> None:
    """Between two renames it is called -old; the next writer once removed that, and failed after it."""

    def broken(name: str, first: int, last: int) -> F32:
        raise ValueError("no such weights")

    dst = tmp_path / "model"
    writer.write_pack(dst, SPEC, "q4_0", cheap_source)
    whole = contents(dst)
    dst.rename(tmp_path / "model.tmp-4194400-old")
    with pytest.raises(ValueError, match="no such weights"):
        writer.write_pack(dst, SPEC, "q8_0", broken, overwrite=True)
    assert contents(dst) == whole and sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_kill_9_at_random_moments_leaves_a_whole_pack_or_none(
    old_and_new: tuple[Path, Callable[[], None], list[Any]],
) -> None:
    dst, write, (old, new) = old_and_new
    rng = random.Random(3)
    for _ in range(24):
        pid = os.fork()
        if pid == 0:
            while True:
                write()
        time.sleep(rng.uniform(0.0, 0.02))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert contents(dst) in (old, new, None)


def test_a_living_writers_directory_is_not_taken_for_litter(tmp_path: Path) -> None:
    other = tmp_path / f"model.tmp-{os.getppid()}"
    other.mkdir()
    writer.write_pack(tmp_path / "model", SPEC, "q4_0", cheap_source)
    assert other.exists()


def test_litter_of_a_dead_process_is_removed_even_with_its_pid_reused_by_us(tmp_path: Path) -> None:
    litter = [tmp_path / f"model.tmp-{os.getpid()}", tmp_path / "model.tmp-4194400-old"]
    for path in litter:
        path.mkdir()
        (path / "weights.bin").write_bytes(b"half")
    writer.write_pack(tmp_path / "model", SPEC, "q4_0", cheap_source)
    assert not any(p.exists() for p in litter)


def test_a_pack_begun_while_the_same_is_being_written_does_not_disturb_it(tmp_path: Path) -> None:
    def meddling(name: str, first: int, last: int) -> F32:
        if name == "layers.1.down":
            with pytest.raises(IOFailure, match="writing it already"):
                writer.write_pack(tmp_path / "p", SPEC, "f32", cheap_source)
        return cheap_source(name, first, last)

    writer.write_pack(tmp_path / "p", SPEC, "f32", meddling)
    assert pack.verify(Pack.open(tmp_path / "p")) == []


def test_a_place_that_cannot_be_written_is_an_io_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for dst in (tmp_path / "file" / "p", tmp_path / ("x" * 300), Path("/dev/null/p")):
        with pytest.raises(IOFailure, match="cannot write the pack"):
            writer.write_pack(dst, SPEC, "q4_0", cheap_source)


def test_an_interrupt_removes_what_was_begun(tmp_path: Path) -> None:
    def interrupted(name: str, first: int, last: int) -> F32:
        if name == "layers.1.down":
            raise KeyboardInterrupt
        return cheap_source(name, first, last)

    with pytest.raises(KeyboardInterrupt):
        writer.write_pack(tmp_path / "p", SPEC, "f32", interrupted)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_too_full_is_said_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(IOFailure, match=r"needs .* GiB, and 9\.54e-07 GiB are free"):
        writer.write_pack(tmp_path / "p", SPEC, "f32", cheap_source)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_pack_is_replaced_only_on_request(small: Path) -> None:
    before = contents(small)
    with pytest.raises(UsageError, match="exists already"):
        writer.write_pack(small, SPEC, "f32", cheap_source)
    assert contents(small) == before


def test_a_directory_that_is_not_a_pack_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_bytes(b"x")
    with pytest.raises(UsageError, match="is not a pack, so it is not replaced"):
        writer.write_pack(tmp_path / "photos", SPEC, "f32", cheap_source, overwrite=True)
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(UsageError, match="not a directory"):
        writer.write_pack(tmp_path / "file", SPEC, "f32", cheap_source, overwrite=True)


def test_an_empty_directory_is_filled_and_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    writer.write_pack(tmp_path / "link", SPEC, "q4_0", cheap_source)
    assert (tmp_path / "link").is_symlink() and Pack.open(tmp_path / "real").spec == SPEC


# --- damage -------------------------------------------------------------------------------------------------


def test_every_bit_flip_in_the_weights_is_found(small: Path) -> None:
    p, rng = Pack.open(small), random.Random(0)
    fd = os.open(p.weights_path, os.O_RDWR)
    try:
        for _ in range(2000):
            at, bit = rng.randrange(p.weights_bytes), 1 << rng.randrange(8)
            byte = os.pread(fd, 1, at)
            os.pwrite(fd, bytes([byte[0] ^ bit]), at)
            problems = pack.verify(p)
            os.pwrite(fd, byte, at)
            assert len(problems) == 1 and f"block {at // 65536} " in problems[0]
    finally:
        os.close(fd)
    assert pack.verify(p) == []


def test_every_swapped_pair_of_blocks_is_found(small: Path) -> None:
    p, rng = Pack.open(small), random.Random(1)
    n = p.weights_bytes // 65536
    fd = os.open(p.weights_path, os.O_RDWR)
    try:
        for _ in range(200):
            a, b = (i * 65536 for i in rng.sample(range(n), 2))
            x, y = os.pread(fd, 65536, a), os.pread(fd, 65536, b)
            os.pwrite(fd, y, a), os.pwrite(fd, x, b)
            problems = pack.verify(p)
            os.pwrite(fd, x, a), os.pwrite(fd, y, b)
            assert len(problems) == 2
    finally:
        os.close(fd)
    assert pack.verify(p) == []


def test_a_damaged_block_is_named_with_its_tensors(small: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(small, tmp_path / "copy")
    p = Pack.open(copy)
    at = p.tensors["layers.1.bundle"].offset
    with open(p.weights_path, "r+b") as f:
        f.seek(at)
        f.write(b"\xff\xff\xff\xff")
    assert "layers.1.bundle" in pack.verify(p)[0]


def test_every_changed_byte_of_the_manifest_is_refused(small: Path) -> None:
    data, rng = (small / "pack.json").read_bytes(), random.Random(2)
    assert manifest.parse_manifest(data, "pack.json").spec == SPEC
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << rng.randrange(8)
        with pytest.raises(ThermoclineError):
            manifest.parse_manifest(bytes(damaged), "pack.json")


@pytest.mark.parametrize("file", ["pack.json", "checksums.bin", "weights.bin", "tokenizer.json"])
def test_a_file_cut_short_extended_or_missing_is_refused(file: str, small: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(small, tmp_path / "copy")
    data = (copy / file).read_bytes()
    for changed in (data[:-1], data[: len(data) // 2], b"", data + b"\0"):
        (copy / file).write_bytes(changed)
        with pytest.raises(BadFile, match=file):
            Pack.open(copy)
    (copy / file).unlink()
    with pytest.raises(IOFailure, match=file):
        Pack.open(copy)
    os.mkfifo(copy / file)
    with pytest.raises(BadFile, match="pipe"):
        Pack.open(copy)


@pytest.mark.parametrize("file", ["checksums.bin", "tokenizer.json"])
def test_every_changed_byte_of_the_small_files_is_refused(file: str, small: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(small, tmp_path / "copy")
    data = (copy / file).read_bytes()
    for at in range(len(data)):
        for bit in range(8):
            (copy / file).write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            with pytest.raises(BadFile, match=file):
                Pack.open(copy)


Change = Callable[[dict[str, Any]], Any]
LIES: dict[str, Change] = {
    "offset past the end": lambda m: m["tensors"]["head.weight"].update(offset=1 << 40),
    "offset negative": lambda m: m["tensors"]["head.weight"].update(offset=-4096),
    "offset misaligned": lambda m: m["tensors"]["embed.weight"].update(offset=64),
    "offset of another": lambda m: m["tensors"]["head.weight"].update(offset=0),
    "offset a float": lambda m: m["tensors"]["embed.weight"].update(offset=0.0),
    "offset true": lambda m: m["tensors"]["embed.weight"].update(offset=False),
    "offset 2^64": lambda m: m["tensors"]["embed.weight"].update(offset=1 << 64),
    "bytes too many": lambda m: m["tensors"]["head.weight"].update(bytes=1 << 30),
    "bytes too few": lambda m: m["tensors"]["embed.weight"].update(bytes=4),
    "stride zero": lambda m: m["tensors"]["embed.weight"].update(stride=0),
    "stride huge": lambda m: m["tensors"]["layers.0.bundle"].update(stride=1 << 32),
    "shape larger": lambda m: m["tensors"]["embed.weight"].update(shape=[1 << 20, 64]),
    "shape nested": lambda m: m["tensors"]["embed.weight"].update(shape=[[1031], 64]),
    "format of a tensor": lambda m: m["tensors"]["embed.weight"].update(format="q4_0"),
    "format unknown": lambda m: m.update(weight_format="q3_k"),
    "format of all": lambda m: m.update(weight_format="f16"),
    "tensor missing": lambda m: m["tensors"].pop("layers.1.gate.weight"),
    "tensor unknown": lambda m: m["tensors"].update(extra=m["tensors"]["embed.weight"]),
    "tensor a list": lambda m: m["tensors"].update({"embed.weight": []}),
    "tensor with more keys": lambda m: m["tensors"]["embed.weight"].update(path="/etc/passwd"),
    "tied with a head": lambda m: m["spec"].update(tied_head=True),
    "vocab larger": lambda m: m["spec"].update(vocab_size=1 << 20),
    "heads zero": lambda m: m["spec"].update(n_heads=0),
    "heads not grouped": lambda m: m["spec"].update(n_kv_heads=3),
    "layers too many": lambda m: m["spec"].update(n_layers=1 << 30),
    "dim a string": lambda m: m["spec"].update(dim="64"),
    "dim true": lambda m: m["spec"].update(dim=True),
    "experts more": lambda m: m["spec"].update(n_experts=8),
    "experts active": lambda m: m["spec"].update(n_experts_active=2),
    "eps as integer": lambda m: m["spec"].update(norm_eps=0),
    "eps negative": lambda m: m["spec"].update(norm_eps=-1.0),
    "activation unknown": lambda m: m["spec"].update(activation="swiglu"),
    "norm unknown": lambda m: m["spec"].update(norm="none"),
    "up activation unknown": lambda m: m["spec"].update(up_activation="silu"),
    "position unknown": lambda m: m["spec"].update(position="alibi"),
    "eos beyond the vocabulary": lambda m: m["spec"].update(eos_ids=[1031]),
    "eos not a list": lambda m: m["spec"].update(eos_ids=2),
    "bos negative": lambda m: m["spec"].update(bos_id=-1),
    "window zero": lambda m: m["spec"].update(sliding_window=0),
    "theta huge": lambda m: m["spec"].update(rope_theta=1e300),
    "scaling divides by zero": lambda m: m["spec"].update(
        rope_scaling={"factor": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0, "original_context": 8}
    ),
    "scaling half": lambda m: m["spec"].update(rope_scaling={"factor": 1.0}),
    "spec key unknown": lambda m: m["spec"].update(alibi=True),
    "spec key missing": lambda m: m["spec"].pop("head_dim"),
    "architecture a line": lambda m: m["spec"].update(architecture="a\nb"),
    "key unknown": lambda m: m.update(comment="hello"),
    "key missing": lambda m: m.pop("source"),
    "block size": lambda m: m.update(block_bytes=4096),
    "version zero": lambda m: m.update(version=0),
    "version before": lambda m: m.update(version=1),
    "weights size": lambda m: m.update(weights_bytes=m["weights_bytes"] + 4096),
    "weights size huge": lambda m: m.update(weights_bytes=1 << 62),
    "checksum negative": lambda m: m.update(checksums_crc32c=-1),
    "file with a path": lambda m: m["files"].update({"../../etc/passwd": 0}),
    "file not ours": lambda m: m["files"].update({"evil.py": 0}),
    "file crc a string": lambda m: m["files"].update({"tokenizer.json": "0"}),
    "source a list": lambda m: m.update(source=[]),
    "kind": lambda m: m.update(format="gguf"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused_though_its_checksum_is_right(lie: str, small: Path) -> None:
    value = json.loads((small / "pack.json").read_bytes())
    del value["crc32c"]
    LIES[lie](value)
    with pytest.raises((BadFile, Unsupported), match=r"^pack\.json: |columns|^embed"):
        manifest.parse_manifest(manifest._render(value), "pack.json")


def test_a_pack_from_before_the_later_fields_opens_and_means_their_defaults(small: Path) -> None:
    value = json.loads((small / "pack.json").read_bytes())
    old = RopeScaling(factor=4.0, original_context=32)
    value["spec"]["rope_scaling"] = dataclasses.asdict(old)
    for cls, part in ((ModelSpec, value["spec"]), (RopeScaling, value["spec"]["rope_scaling"])):
        dropped = [f.name for f in dataclasses.fields(cls) if "later" in f.metadata]
        assert len(dropped) >= 7
        for name in dropped:
            del part[name]
    del value["crc32c"]
    (small / "pack.json").write_bytes(manifest._render(value))
    assert Pack.open(small).spec == dataclasses.replace(SPEC, rope_scaling=old)
    assert pack.verify(Pack.open(small)) == []


# --- finding the model --------------------------------------------------------------------------------------


def test_a_pack_resolves_to_itself(small: Path, tmp_path: Path) -> None:
    assert pack_cache.resolve(str(small), tmp_path / "cache", "q8_0") == small
    assert not (tmp_path / "cache").exists()


def test_a_hugging_face_directory_is_packed_once_and_found_again(
    twin: Callable[[str], Path], tmp_path: Path
) -> None:
    cache, src = tmp_path / "cache", shutil.copytree(twin("llama"), tmp_path / "src")
    first = pack_cache.resolve(src, cache, "q8_0")
    stamp = (first / "weights.bin").stat().st_mtime_ns
    shutil.copytree(src, tmp_path / "elsewhere" / "src")  # same content and name, another place and time
    assert pack_cache.resolve(tmp_path / "elsewhere" / "src", cache, "q8_0") == first
    assert (first / "weights.bin").stat().st_mtime_ns == stamp
    assert pack_cache.resolve(src, cache, "q4_0") != first


def test_one_changed_weight_is_another_model(twin: Callable[[str], Path], tmp_path: Path) -> None:
    src = shutil.copytree(twin("llama"), tmp_path / "src")
    before = pack_cache.source_hash(src)
    with open(src / "model.safetensors", "r+b") as f:
        f.seek(-100, os.SEEK_END)
        f.write(b"\x00\x00\x80\x3f")
    assert pack_cache.source_hash(src) != before


def test_a_damaged_cache_is_packed_again(twin: Callable[[str], Path], tmp_path: Path) -> None:
    packed = pack_cache.resolve(twin("opt"), tmp_path, "q8_0")
    (packed / "checksums.bin").write_bytes(b"")
    assert pack_cache.resolve(twin("opt"), tmp_path, "q8_0") == packed
    assert pack.verify(Pack.open(packed)) == []


def test_the_hash_of_a_large_model_reads_little(tmp_path: Path) -> None:
    write_sparse_model(tmp_path / "big", vocab=32000, dim=4096, ffn=11008, layers=40)
    assert sum(f.stat().st_size for f in (tmp_path / "big").iterdir()) > 15 << 30  # sparse: no blocks on disk
    started = time.process_time()
    pack_cache.source_hash(tmp_path / "big")
    assert time.process_time() - started < 1.0


def write_sparse_model(path: Path, *, vocab: int, dim: int, ffn: int, layers: int) -> None:
    """A Llama directory of zeros that takes no space on disk."""
    shapes = {
        "model.embed_tokens.weight": (vocab, dim),
        "lm_head.weight": (vocab, dim),
        "model.norm.weight": (dim,),
    }
    for i in range(layers):
        m = f"model.layers.{i}"
        shapes |= {f"{m}.self_attn.{n}_proj.weight": (dim, dim) for n in "qkvo"}
        shapes |= {f"{m}.mlp.{n}_proj.weight": (ffn, dim) for n in ("gate", "up")}
        shapes |= {f"{m}.mlp.down_proj.weight": (dim, ffn)}
        shapes |= {f"{m}.{n}_layernorm.weight": (dim,) for n in ("input", "post_attention")}
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.mkdir()
    with open(path / "model.safetensors", "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(8 + len(text) + at)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": dim,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": dim // 64,
        "vocab_size": vocab,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "relu",
    }
    (path / "config.json").write_text(json.dumps(config))


_MEASURE = """
import sys
from thermocline.convert import importer
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) << 10
before = peak()
importer.pack(sys.argv[1], sys.argv[2], "q4_0")
print(peak() - before)
"""


@pytest.mark.slow
def test_packing_keeps_one_tensor_and_little_more(tmp_path: Path) -> None:
    """A model of 430 MB whose down projection is 32 MB: the whole pack takes that and 32 MiB more at most."""
    write_sparse_model(tmp_path / "src", vocab=80000, dim=1024, ffn=16384, layers=1)
    command = [sys.executable, "-c", _MEASURE, str(tmp_path / "src"), str(tmp_path / "dst")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert int(done.stdout) < 2 * 1024 * 16384 + (32 << 20)


def lfs_pointer(path: Path) -> None:
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")


NOT_A_MODEL: dict[str, tuple[Callable[[Path], Any], type[ThermoclineError], str]] = {
    "absent": (lambda p: None, IOFailure, "no such directory"),
    "git-lfs pointer": (lfs_pointer, BadFile, "git lfs pull"),
    "HTML page": (lambda p: p.write_bytes(b"<!DOCTYPE html><html>404</html>"), BadFile, "HTML page"),
    "zip": (lambda p: p.write_bytes(b"PK\x03\x04" + bytes(100)), BadFile, "zip archive or a PyTorch pickle"),
    "pickle": (lambda p: p.write_bytes(b"\x80\x04\x95" + bytes(100)), BadFile, "can run code when opened"),
    "gguf": (
        lambda p: p.write_bytes(b"GGUF\x03" + bytes(100)),
        BadFile,
        "general.architecture must be a text",
    ),
    "gguf cut short": (lambda p: p.write_bytes(b"GGUF\x03" + bytes(9)), BadFile, "truncated"),
    "empty file": (lambda p: p.write_bytes(b""), BadFile, "an empty file"),
    "text file": (lambda p: p.write_bytes(b"hello"), BadFile, "give the directory"),
    "empty directory": (lambda p: p.mkdir(), BadFile, r"no model\.safetensors"),
    "FIFO": (os.mkfifo, BadFile, "device, pipe or socket"),
    "endless device": (lambda p: p.symlink_to("/dev/zero"), BadFile, "device, pipe or socket"),
    "dangling link": (lambda p: p.symlink_to("/nonexistent/x"), IOFailure, "no such file"),
    "link to itself": (lambda p: p.symlink_to(p), IOFailure, "symbolic links"),
    "name too long": (lambda p: None, IOFailure, "no such directory"),
    "directory of GGUF": (
        lambda p: p.mkdir() or (p / "m.gguf").write_bytes(b"GGUF"),
        BadFile,
        "holds GGUF files: give the path of one",
    ),
    "directory of pickles": (
        lambda p: p.mkdir() or (p / "pytorch_model.bin").touch(),
        Unsupported,
        "save_file",
    ),
    "weights without config": (
        lambda p: p.mkdir() or (p / "model.safetensors").touch(),
        BadFile,
        "config.json is miss",
    ),
    "config without weights": (
        lambda p: p.mkdir() or (p / "config.json").write_text("{}"),
        BadFile,
        "architec|no model",
    ),
    "sparse 2^62": (lambda p: sparse(p, 1 << 62), BadFile, "give the directory|zero"),
}


def sparse(path: Path, size: int) -> None:
    with open(path, "wb") as f:
        for exponent in (size, 1 << 43, 1 << 40):  # as far as the file system goes
            try:
                f.truncate(exponent)
                return
            except OSError:
                continue


@pytest.mark.parametrize("kind", NOT_A_MODEL)
def test_what_is_not_a_model_is_said_in_a_line_at_once(kind: str, tmp_path: Path) -> None:
    make, error, message = NOT_A_MODEL[kind]
    model = tmp_path / ("model" if kind != "name too long" else "m" * 5000)
    make(model)
    started = time.process_time()
    with pytest.raises(error, match=message) as caught:
        pack_cache.resolve(model, tmp_path / "cache", "q8_0")
    assert time.process_time() - started < 1 and "\n" not in str(caught.value)
    with pytest.raises(error, match=message):
        importer.pack(model, tmp_path / "out", "q8_0")
    assert not (tmp_path / "out").exists() and not (tmp_path / "cache").exists()


def test_a_hub_name_is_told_to_be_downloaded_first(tmp_path: Path) -> None:
    with pytest.raises(IOFailure, match="thermocline pull someone/some-model-7b"):
        pack_cache.resolve("someone/some-model-7b", tmp_path, "q8_0")


def test_an_unknown_format_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="unknown weight format 'q5_9'"):
        importer.pack(tmp_path, tmp_path / "out", "q5_9")


def test_a_missing_extra_or_misshapen_tensor_is_named(twin: Callable[[str], Path], tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    src = shutil.copytree(twin("llama"), tmp_path / "src")
    file = src / "model.safetensors"
    whole, key = load_file(file), "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in whole.items() if k != key}, file)
    with pytest.raises(BadFile, match=f"tensor {key} is missing"):
        importer.pack(src, tmp_path / "out", "f32")
    save_file(whole | {"model.layers.0.lora_A": np.zeros(3, np.float32)}, file)
    with pytest.raises(Unsupported, match=r"'model\.layers\.0\.lora_A' does not belong"):
        importer.pack(src, tmp_path / "out", "f32")
    save_file(whole | {key: whole[key].T.copy()}, file)
    with pytest.raises(BadFile, match=rf"{key} is '?\(64, 112\)'?, config.json implies \(112, 64\)"):
        importer.pack(src, tmp_path / "out", "f32")
    save_file(whole | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}, file)
    importer.pack(src, tmp_path / "out", "f32")
    assert Pack.open(tmp_path / "out").source["kind"] == "huggingface"


def test_names_without_the_model_prefix_are_found(twin: Callable[[str], Path], tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    src = shutil.copytree(twin("opt"), tmp_path / "src")
    file = src / "model.safetensors"
    save_file({k.removeprefix("model."): v for k, v in load_file(file).items()}, file)
    importer.pack(src, tmp_path / "a", "f32")
    importer.pack(twin("opt"), tmp_path / "b", "f32")
    assert (tmp_path / "a/weights.bin").read_bytes() == (tmp_path / "b/weights.bin").read_bytes()


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_sources_are_read_exactly(
    dtype: str, twin: Callable[[str], Path], tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    src = shutil.copytree(twin("llama"), tmp_path / "src")
    file = src / "model.safetensors"
    halves = {k: v.to(getattr(torch, dtype)) for k, v in load_file(file).items()}
    save_file(halves, file)
    importer.pack(src, tmp_path / "out", "f32")
    p = Pack.open(tmp_path / "out")
    down = halves["model.layers.2.mlp.down_proj.weight"].float().numpy()
    assert np.array_equal(read_tensor(p, "layers.2.down.weight"), down)
    norm = halves["model.norm.weight"].float().numpy()
    assert np.array_equal(read_tensor(p, "out_norm.weight")[0], norm)
