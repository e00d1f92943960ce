"""A GGUF runs as it is: memory holds the pack that would be made of it, and nothing is written."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_twins
import kept_twins
import numpy as np
import pytest
import tiny
from test_twins import Model

from thermocline import _native
from thermocline.convert.importer import pack
from thermocline.errors import BadFile, IOFailure
from thermocline.files.gguf import GGUF
from thermocline.llm import LLM
from thermocline.model import formats, quant
from thermocline.opening.gguf_model import GGUFModel, open_gguf
from thermocline.opening.open_model import open_model
from thermocline.ops.cpu import CpuOps
from thermocline.pack.blocks import new_arena
from thermocline.pack.pack import Pack
from thermocline.session import weights

gguf = pytest.importorskip("gguf")
Run = Callable[..., Any]
U8 = np.ndarray[Any, np.dtype[np.uint8]]

BLOCKS = [name for name, f in formats.FORMATS.items() if f.block > 1]
# Permuted rows of q and k, split files, experts in stacks, norms less one, fused gate and up, regrouped rows,
# biases, tied heads.
DENSE = {
    "llama": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3",
    "phi3": "phi3", "falcon_40b": "falcon", "minicpm": "minicpm", "qwen3_moe": "qwen3moe",
    "gemma4": "gemma4", "gemma4_moe": "gemma4", "gemma4_small": "gemma4",
    "granite_moe_shared": "granitemoe", "olmo3": "olmo2", "stablelm_12b": "stablelm",
    "cohere_plus": "command-r", "gpt_neox": "gptneox", "phi2": "phi2", "llama4": "llama4",
}  # fmt: skip


def bytes_of(arena: _native.Arena, n: int) -> U8:
    return np.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(arena.address))


def in_memory(path: Path) -> tuple[GGUFModel, U8]:
    """Return a GGUF that runs in place, and its weights.bin."""
    model = open_gguf(path)
    assert isinstance(model, GGUFModel), model
    arena = new_arena(model.weights_bytes, "a test")
    model.begin_load(arena).finish()
    return model, bytes_of(arena, model.weights_bytes).copy()


def as_packed(path: Path, directory: Path) -> tuple[Pack, U8]:
    pack(path, directory)
    made = Pack.open(directory)
    return made, np.fromfile(made.weights_path, np.uint8)


@pytest.mark.parametrize("type", [None, "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("name", DENSE)
def test_the_memory_of_a_gguf_is_the_pack_that_would_be_made_of_it(
    name: str, type: str | None, tmp_path: Path
) -> None:
    hf = kept_twins.TWINS[name](tmp_path / "hf")
    blocked = {"Q8_0": "F16"}.get(str(type), type)  # twins' FFNs are no whole number of blocks wide
    path = gguf_twins.write(
        hf, tmp_path / "m.gguf", arch=DENSE[name], types=lambda n: blocked if "down" in n else type
    )
    model, held = in_memory(path)
    made, packed = as_packed(path, tmp_path / "pack")
    assert (model.spec, model.weight_format, model.tensors) == (made.spec, made.weight_format, made.tensors)
    assert np.array_equal(held, packed)


def random_blocks(kind: str, shape: tuple[int, ...], seed: int) -> U8:
    """Random numbers in a format, as a GGUF has them."""
    format = kind.lower()
    x = np.random.default_rng(seed).standard_normal((int(np.prod(shape[:-1])), shape[-1]), np.float32)
    return quant.to_gguf(format, quant.encode(format, x / np.float32(16)))


@pytest.fixture
def of_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Write a Llama whose matrices are all of one format."""

    def write(
        format: str, blocks: Callable[[str, tuple[int, ...], int], U8] = random_blocks, **own: str
    ) -> Path:
        """`own`: formats of tensors with these words in their names."""

        def kind_of(name: str) -> str:
            return next((kind for word, kind in own.items() if word in name), format).upper()

        monkeypatch.setattr(gguf_twins, "K_SCALES", {kind.upper(): None for kind in (format, *own.values())})
        monkeypatch.setattr(gguf_twins, "k_blocks", blocks)
        sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
        hf = kept_twins.llama(tmp_path / "hf", hidden_act="silu", num_key_value_heads=2, **sizes)
        return gguf_twins.write(hf, tmp_path / "m.gguf", types=kind_of)

    return write


@pytest.mark.parametrize("format", BLOCKS)
def test_every_formats_blocks_reach_memory_bit_for_bit(
    format: str, of_blocks: Callable[..., Path], tmp_path: Path
) -> None:
    path = of_blocks(format)
    model, held = in_memory(path)
    assert model.weight_format == format
    assert np.array_equal(held, as_packed(path, tmp_path / "pack")[1])


def test_each_tensor_of_a_mix_keeps_its_own_blocks(of_blocks: Callable[..., Path], tmp_path: Path) -> None:
    """As Q4_K_M has them: v and down in Q6_K; here up, k and the embeddings too have types of their own."""
    path = of_blocks("q4_k", attn_v="q6_k", ffn_down="q6_k", ffn_up="q5_k", attn_k="q8_0", token_embd="q3_k")
    model, held = in_memory(path)
    found = {n.removeprefix("layers.1."): t.format for n, t in model.tensors.items()}
    assert [found[f"{n}.weight"] for n in ("q", "k", "v", "up", "gate", "embed")] == [
        "q4_k", "q8_0", "q6_k", "q5_k", "q4_k", "q3_k"
    ]  # fmt: skip
    assert np.array_equal(held, as_packed(path, tmp_path / "pack")[1])


@pytest.mark.parametrize("format", BLOCKS)
@pytest.mark.parametrize("blocks", [1, 2, 3, 17])
def test_native_code_arranges_rows_as_numpy_does(format: str, blocks: int) -> None:
    rng = np.random.default_rng(blocks)
    rows = rng.integers(0, 256, (7, blocks * formats.FORMATS[format].block_bytes), dtype=np.uint8)
    made = np.zeros_like(rows)
    _native.arranged(format, rows, made)
    first = made.copy()
    for r in range(len(rows)):  # row by row: a scale that is no number ends a call
        _native.arranged(format, rows[r : r + 1], first[r : r + 1])
    assert np.array_equal(first, quant.from_gguf(format, rows))


@pytest.mark.parametrize("format", ["q4_0", "mxfp4", "q6_k", "f16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_speed_of_arranging_is_measured(format: str, threads: int) -> None:
    assert 0.001 < _native.arranging_gbs(format, 512, 1 << 20, threads, 0.0) < 1000


def test_the_speed_of_arranging_is_refused_for_what_are_no_rows() -> None:
    for format, columns, nbytes, threads in (
        ("q4", 512, 1 << 20, 1),
        ("q4_0", 500, 1 << 20, 1),
        ("q4_0", 512, 1 << 10, 1),
        ("q4_0", 512, 1 << 20, 0),
    ):
        with pytest.raises(ValueError):
            _native.arranging_gbs(format, columns, nbytes, threads, 0.0)


SCALES = [
    (name, field.name)
    for name in BLOCKS
    for field in formats.FORMATS[name].fields
    if field.name in ("scale", "minimum", "super", "super_minimum", "exponent")
]


@pytest.mark.parametrize(("format", "field"), SCALES)
@pytest.mark.parametrize("bad", [0x7C00, 0xFE01], ids=["infinite", "not a number"])
def test_every_scale_that_is_no_number_is_seen(format: str, field: str, bad: int) -> None:
    f = formats.FORMATS[format]
    rows = random_blocks(format.upper(), (5, 3 * f.block), 1)
    out = np.zeros_like(rows)
    assert _native.arranged(format, rows, out) is None
    at = sum(x.nbytes for x in f.fields[: [x.name for x in f.fields].index(field)])
    for block in range(3):
        damaged = rows.copy()
        byte = block * f.block_bytes + at
        damaged[4, byte : byte + 2] = 0xFF if field == "exponent" else np.array([bad], "<u2").view(np.uint8)
        assert _native.arranged(format, damaged, out) == 4


# ---- parts of weights.bin, as a GPU's rows are read


def test_rows_between_any_two_borders_are_those_of_the_whole(tmp_path: Path) -> None:
    hf = kept_twins.TWINS["llama"](tmp_path / "hf")
    model, held = in_memory(gguf_twins.write(hf, tmp_path / "m.gguf"))
    t = model.tensors["layers.1.qkv.weight"]
    first, last = t.offset + 3 * t.stride, t.offset + (t.shape[0] - 5) * t.stride
    norm = model.tensors["layers.1.attn_norm.weight"]
    runs = [(first, last, 4096), (norm.offset, norm.offset + norm.bytes, 0)]
    arena = new_arena(4096 + last - first + 64, "a test")
    model.read_runs(arena, runs)
    found = bytes_of(arena, arena.nbytes)
    assert np.array_equal(found[4096 : 4096 + last - first], held[first:last])
    assert np.array_equal(found[: norm.bytes], held[norm.offset : norm.offset + norm.bytes])
    assert not found[4096 + last - first :].any() and not found[norm.bytes : 4096].any()


# ---- files, and what happens to them


def plain(tmp_path: Path, name: str = "m.gguf") -> Path:
    return gguf_twins.write(kept_twins.TWINS["llama"](tmp_path / "hf"), tmp_path / name)


def test_a_damaged_block_is_named_by_tensor_and_row(of_blocks: Callable[..., Path]) -> None:
    path = of_blocks("q4_k")
    with GGUF(path) as opened:
        down = opened.tensors["blk.1.ffn_down.weight"]
    with open(path, "r+b") as f:
        f.seek(down.start + 19 * 2 * 144 + 144)  # the second block of row 19 begins with its scale
        f.write(b"\x00\x7c")
    named = r"m\.gguf: tensor 'blk\.1\.ffn_down\.weight', row 19: a scale is not a finite number"
    with pytest.raises(BadFile, match=named):
        in_memory(path)
    with pytest.raises(BadFile, match=named):
        pack(path, path.with_name("pack"))


@pytest.mark.parametrize("when", ["before", "while"])
@pytest.mark.parametrize("how", ["replaced", "written", "cut"])
def test_a_file_that_changes_after_it_was_opened_is_refused(when: str, how: str, tmp_path: Path) -> None:
    path = plain(tmp_path)
    model = open_gguf(path)
    assert isinstance(model, GGUFModel)

    def change(*_: int) -> None:
        before = path.stat()
        if how == "replaced":
            other = path.with_name("other")
            other.write_bytes(path.read_bytes())
            os.replace(other, path)
        elif how == "cut":
            os.truncate(path, before.st_size - 5)
        else:
            with open(path, "r+b") as f:
                f.seek(-1, os.SEEK_END)
                f.write(b"x")
        os.utime(path, ns=(0, before.st_mtime_ns + (how == "written")))

    arena = new_arena(model.weights_bytes, "a test")
    if when == "before":
        change()
    reading = model.begin_load(arena)
    if (when, how) == ("while", "replaced"):  # its bytes are still read from the file that was opened
        reading.finish(change)
        return
    with pytest.raises(BadFile, match=r"m\.gguf: was changed or replaced since it was opened"):
        reading.finish(None if when == "before" else change)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    path = plain(tmp_path)
    model = open_gguf(path)
    path.unlink()
    assert isinstance(model, GGUFModel)
    with pytest.raises(IOFailure, match=r"m\.gguf: No such file or directory"):
        model.begin_load(new_arena(model.weights_bytes, "a test")).finish()


def test_a_load_that_nobody_waits_for_ends(tmp_path: Path) -> None:
    model = open_gguf(plain(tmp_path))
    assert isinstance(model, GGUFModel)
    arena = new_arena(model.weights_bytes, "a test")
    del arena, model  # the reading keeps what it writes to
    reading = open_gguf(tmp_path / "m.gguf")
    assert isinstance(reading, GGUFModel)
    reading.begin_load(new_arena(reading.weights_bytes, "a test"))


def test_ctrl_c_ends_a_load(tmp_path: Path) -> None:
    model = open_gguf(plain(tmp_path))
    assert isinstance(model, GGUFModel)

    def interrupt(done: int, size: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.begin_load(new_arena(model.weights_bytes, "a test")).finish(interrupt)


def test_progress_ends_with_all_bytes(tmp_path: Path) -> None:
    model = open_gguf(plain(tmp_path))
    assert isinstance(model, GGUFModel)
    told: list[tuple[int, int]] = []
    model.begin_load(new_arena(model.weights_bytes, "a test")).finish(lambda *at: told.append(at))
    assert told == sorted(told) and told[-1][0] == told[-1][1] == sum(r.nbytes for r in model.rows)


# ---- large files: direct reads


def rows_file(path: Path, lead: int, rows: int, row_bytes: int) -> U8:
    """Write rows behind `lead` bytes, with some bytes behind them."""
    data = np.random.default_rng(lead).integers(0, 60, (rows, row_bytes), dtype=np.uint8)
    path.write_bytes(bytes(lead) + data.tobytes() + b"the end")
    with open(path, "rb") as f:
        os.fsync(f.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return data


LARGE = 64 << 20  # an arena from here on is filled by direct reads (csrc/storage/store.cpp)


@pytest.mark.parametrize("directory", ["disk", "tmpfs"])
@pytest.mark.parametrize("lead", [0, 32, 4096 + 96])
@pytest.mark.parametrize("format", ["q4_k", "f16"])
def test_rows_at_any_place_of_a_file_are_read_past_the_page_cache_or_through_it(
    format: str, lead: int, directory: str, tmp_path: Path
) -> None:
    """tmpfs has no direct reads. Rows lie across every border: sectors, buffers, parts, the file's end."""
    path = tmp_path / "f"
    if directory == "tmpfs":
        if not Path("/dev/shm").is_dir():
            pytest.skip("no tmpfs here")
        path = Path(f"/dev/shm/thermocline-test-{os.getpid()}")
    columns = 1280
    row_bytes = quant.row_bytes(format, columns)
    try:
        data = rows_file(path, lead, 9000, row_bytes)
        s = path.stat()
        state = (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns)
        arena = _native.Arena(LARGE)
        order = np.random.default_rng(1).permutation(9000).astype(np.int32)
        order[::7] = -1
        second = 9000 * row_bytes + 4096
        runs: list[Any] = [
            (format, columns, 0, lead, 9000, 64, row_bytes, None, 1, 0),
            (format, columns, 0, lead, 9000, second, row_bytes, order, 1, 0),
        ]
        assert _native.begin_rows(arena, [(str(path), state)], runs).wait() == (0, -1)
    finally:
        path.unlink()
    truth, found = quant.from_gguf(format, data), bytes_of(arena, LARGE)
    assert np.array_equal(found[64 : 64 + truth.size].reshape(truth.shape), truth)
    there = found[second : second + truth.size].reshape(truth.shape)
    assert np.array_equal(there[order[order >= 0]], truth[order >= 0])
    left = np.setdiff1d(np.arange(9000), order[order >= 0])
    assert not there[left].any() and not found[second + truth.size :].any()


WRONG: dict[str, Callable[[_native.Arena], Any]] = {
    "an unknown format": lambda a: [("q9", 32, 0, 0, 1, 0, 34, None, 1, 0)],
    "half a block": lambda a: [("q8_0", 48, 0, 0, 1, 0, 34, None, 1, 0)],
    "no such file": lambda a: [("q8_0", 32, 1, 0, 1, 0, 34, None, 1, 0)],
    "a short stride": lambda a: [("q8_0", 32, 0, 0, 1, 0, 33, None, 1, 0)],
    "rows past the arena": lambda a: [("q8_0", 32, 0, 0, 200, 0, 34, None, 1, 0)],
    "a row past the arena": lambda a: [("q8_0", 32, 0, 0, 1, 4090, 34, None, 1, 0)],
    "an order past the arena": lambda a: [("q8_0", 32, 0, 0, 1, 0, 34, np.array([120], np.int32), 1, 0)],
    "an order of another length": lambda a: [("q8_0", 32, 0, 0, 2, 0, 34, np.zeros(1, np.int32), 1, 0)],
    "no rows": lambda a: [("q8_0", 32, 0, 0, 0, 0, 34, None, 1, 0)],
    "no group": lambda a: [("q8_0", 32, 0, 0, 1, 0, 34, None, 0, 0)],
    "floats in groups": lambda a: [("f16", 32, 0, 0, 16, 0, 64, None, 16, 0)],
    "a group with gaps": lambda a: [("q8_0", 32, 0, 0, 16, 0, 64, None, 16, 0)],
    "a lane beyond its group": lambda a: [("q8_0", 32, 0, 0, 16, 34 * 16, 34, None, 16, 16)],
    "a group that begins before the arena": lambda a: [("q8_0", 32, 0, 0, 16, 34, 34, None, 16, 2)],
    "a group that ends behind the arena": lambda a: [("q8_0", 32, 0, 0, 113, 0, 34, None, 16, 0)],
}


@pytest.mark.parametrize("what", WRONG)
def test_native_code_refuses_runs_that_would_leave_the_arena(what: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(8192))
    arena = _native.Arena(4096)
    with pytest.raises(ValueError):
        _native.begin_rows(arena, [(str(tmp_path / "f"), (0, 0, 0, 0))], WRONG[what](arena))


@pytest.mark.parametrize("format", BLOCKS)
@pytest.mark.parametrize("ordered", [False, True])
def test_rows_come_in_groups_as_if_they_were_interleaved_later(
    format: str, ordered: bool, tmp_path: Path
) -> None:
    """Three runs fill a matrix; none begins at a group. An order scatters rows, as RoPE's pairs do."""
    native = CpuOps(1).native
    rows, columns, row_bytes = 8 * native.group, 768, quant.row_bytes(format, 768)
    data = rows_file(tmp_path / "f", 0, rows, row_bytes)
    s = (tmp_path / "f").stat()
    order = np.random.default_rng(2).permutation(rows).astype(np.int32)
    arena, begin = _native.Arena(2 * rows * row_bytes + 8192), 64
    runs: list[Any] = []
    for first, last in ((0, 5), (5, 3 * native.group + 1), (3 * native.group + 1, rows)):
        own = order[first:last] - order[first:last].min() if ordered else None
        least = int(order[first:last].min()) if ordered else first
        at, lane = begin + least * row_bytes, least % native.group
        runs.append(
            (format, columns, 0, first * row_bytes, last - first, at, row_bytes, own, native.group, lane)
        )
    files = [(str(tmp_path / "f"), (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns))]
    assert _native.begin_rows(arena, files, runs).wait() == (0, -1)

    planar, second = quant.from_gguf(format, data), begin + rows * row_bytes
    in_order = np.empty_like(planar)
    in_order[order if ordered else np.arange(rows)] = planar
    arena.write(second, in_order.ravel())
    native.interleaved(
        arena, _native.Matrix(arena, second, quant.FORMATS[format].id, rows, columns, row_bytes)
    )
    found = bytes_of(arena, second + rows * row_bytes)
    assert np.array_equal(found[begin:second], found[second:])


def test_a_file_in_place_computes_what_its_pack_does(of_blocks: Callable[..., Path], tmp_path: Path) -> None:
    """Its rows come in groups, where the CPU wants them so, and the pack's are put there afterwards."""
    path = of_blocks("q4_k", attn_v="q6_k", ffn_down="q6_k", ffn_up="q5_k")
    pack(path, tmp_path / "p")
    model, made, ops = open_gguf(path), Pack.open(tmp_path / "p"), CpuOps(2)
    assert isinstance(model, GGUFModel)
    begun, later = weights.BegunLoad.of(model, ops), weights.BegunLoad.of(made, ops)
    grows = ops.native.isa not in ("scalar", "neon")
    assert ("layers.1.q.weight" in begun.grouped) == ("layers.1.gate.weight" in begun.grouped) == grows
    assert "head.weight" not in begun.grouped  # 131 rows
    assert begun.grouped == begun.reading.grouped == later.grouped and not later.reading.grouped
    ids = list(range(3, 40))
    one, other = (
        Model(m.spec, m_.weights, ops) for m, m_ in ((model, begun.finish()), (made, later.finish()))
    )
    assert np.array_equal(one.logits(ids, 1), other.logits(ids, len(ids)))


# ---- the commands


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense GGUF with a tokenizer."""
    base = tmp_path_factory.mktemp("talking")
    from thermocline.convert.to_gguf import write_gguf

    pack(tiny.hf_directory(base / "hf", hidden_act="silu"), base / "pack", "q8_0")
    write_gguf(Pack.open(base / "pack"), base / "tiny.gguf")
    return base / "tiny.gguf"


def test_a_gguf_answers_as_its_pack_does_and_nothing_is_written(
    talking: Path, tmp_path: Path, thermocline: Run
) -> None:
    argv = ["-n", "8", "--temp", "0", "--json", "--cache-dir", tmp_path / "cache", "Once"]
    ran = thermocline("run", "-m", talking, *argv)
    assert ran.code == 0 and "pack" not in ran.err, ran.err
    mine = json.loads(ran.out)
    theirs = json.loads(thermocline("run", "-m", talking.parent / "pack", *argv).out)
    same = ("text", "token_ids", "logits_hash", "format", "bytes_per_token", "memory_bytes", "placement")
    assert {k: mine[k] for k in same} == {k: theirs[k] for k in same}
    assert not (tmp_path / "cache").exists()
    assert {p.name for p in talking.parent.iterdir()} == {"hf", "pack", "tiny.gguf"}


def test_every_command_that_reads_a_model_reads_a_gguf_in_place(
    talking: Path, tmp_path: Path, thermocline: Run
) -> None:
    cache = ["--cache-dir", tmp_path / "cache"]
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a file that nobody had to convert. " * 8)
    assert thermocline("bench", "-m", talking, "-p", "4", "-n", "2", "-r", "1", *cache).code == 0
    told = thermocline(
        "eval", talking, "--text", text, "--ctx", "32", "--against", talking.parent / "pack", "--json"
    )
    assert told.code == 0 and json.loads(told.out)["against"]["kld"]["value"] == 0, told.err
    planned = json.loads(thermocline("plan", talking, "--hardware", "rtx4090-i9-13900k", "--json").out)
    assert set(planned["made_from"]) == {"gguf", "hardware"}
    about = json.loads(thermocline("inspect", talking, "--json").out)
    assert about["in_place"] is True and about["why_packed"] is None
    assert not (tmp_path / "cache").exists()


def test_a_format_that_is_asked_for_means_a_pack(talking: Path, tmp_path: Path) -> None:
    made = open_model(talking, tmp_path / "cache", "q4_0")
    assert isinstance(made, Pack) and made.weight_format == "q4_0" and made.path.parent == tmp_path / "cache"


def test_a_model_whose_neurons_can_be_skipped_is_packed_and_a_line_says_why(
    tmp_path: Path, thermocline: Run
) -> None:
    path = gguf_twins.write(
        kept_twins.TWINS["llama_relu_tied"](tmp_path / "hf"), tmp_path / "m.gguf", powerinfer=True
    )
    given = ["-m", path, "-p", "4", "-n", "0", "-r", "1", "--cache-dir", tmp_path / "cache"]
    ran = thermocline("bench", *given)
    assert ran.code == 0 and f"{path}: is packed first, because its neurons can be skipped" in ran.err
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert thermocline("bench", *given).err == "", "its pack is there now"


def test_a_type_without_a_format_here_is_named(of_blocks: Callable[..., Path]) -> None:
    path = of_blocks(
        "iq2_xs", blocks=lambda kind, shape, seed: np.zeros((shape[0], shape[1] // 256 * 74), np.uint8)
    )
    assert open_gguf(path) == "its iq2_xs has to be converted to q4_k"


def test_split_files_run_in_place(tmp_path: Path) -> None:
    whole = plain(tmp_path, "whole.gguf")
    with GGUF(whole) as opened:
        names = list(opened.tensors)
    parts = split(whole, tmp_path / "split", [names[:7], names[7:]])
    model, held = in_memory(parts[0])
    assert [p for p, _ in model.parts] == parts and {r.part for r in model.rows} == {0, 1}
    assert np.array_equal(held, in_memory(whole)[1])


def split(whole: Path, to: Path, names: list[list[str]]) -> list[Path]:
    """Cut a GGUF into parts with these tensors, as llama-gguf-split does."""
    read = gguf.GGUFReader(whole)
    to.mkdir()
    paths = [to / f"m-{i + 1:05d}-of-{len(names):05d}.gguf" for i in range(len(names))]
    for i, path in enumerate(paths):
        w = gguf.GGUFWriter(path, "llama")
        if i == 0:
            for field in read.fields.values():
                if not field.name.startswith(("GGUF.", "general.architecture")):
                    w.add_key_value(field.name, field.contents(), field.types[0], *field.types[1:2])
        w.add_uint16("split.no", i)
        w.add_uint16("split.count", len(names))
        w.add_int32("split.tensors.count", len(read.tensors))
        for t in read.tensors:
            if t.name in names[i]:
                w.add_tensor(t.name, np.array(t.data))
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
    return paths


def test_a_loaded_gguf_can_be_served(talking: Path) -> None:
    """The process that speaks HTTP gets the tokenizer, which is in no file."""
    import pickle

    from scripted import ScriptedEngine

    from thermocline import SamplingParams
    from thermocline.server.api.models.served import ServedModel
    from thermocline.server.process.messages import ModelOpened

    with LLM(talking, context=64, lazy=True) as llm:
        said = ModelOpened(llm.spec, llm.small_files, llm.context, 4, None, llm.recommended)
        found = ServedModel.of(pickle.loads(pickle.dumps(said)), None, ScriptedEngine(), SamplingParams())
        try:
            assert found.name == "tiny.gguf"
            assert found.tokenizer.encode("Once") == llm.tokenizer.encode("Once")
        finally:
            found.close()


def test_experts_with_gate_and_up_in_one_stack_are_those_of_two(tmp_path: Path) -> None:
    hf = kept_twins.TWINS["qwen3_moe"](tmp_path / "hf")
    (model, held), (one, merged) = (
        in_memory(gguf_twins.write(hf, tmp_path / f"{merge}.gguf", arch="qwen3moe", merge=merge))
        for merge in (False, True)
    )
    assert model.tensors == one.tensors and np.array_equal(held, merged)
