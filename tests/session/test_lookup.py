"""Embeddings on disk: the bits of memory, no block read twice in a call, each checked, a bad one named."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import bad_reads
import numpy as np
import pytest
from test_disk_tier import least, opened, small_buffers  # noqa: F401
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from thermocline import SamplingParams, _native
from thermocline.errors import BadFile, IOFailure
from thermocline.model import quant
from thermocline.model.sizes import aligned
from thermocline.model.spec import ModelSpec
from thermocline.ops.cpu import CpuOps
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import LayerPredictor, write_predictors
from thermocline.pack.writer import PackExtras, write_pack
from thermocline.plan.disk.disk_split import looked_up
from thermocline.session import weights
from thermocline.session.embedding_rows import Lookup

VOCAB, DIM, FFN, BLOCK = 1031, 64, 8192, 65536
SPEC = ModelSpec(
    architecture="test", dim=DIM, ffn_dim=FFN, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=16,
    vocab_size=VOCAB, max_context=1024, norm="rms", norm_eps=1e-5, activation="relu",
)  # fmt: skip
SPECS = {
    "rope": SPEC,
    "learned": dataclasses.replace(SPEC, position="learned"),
    "learned, tied": dataclasses.replace(SPEC, position="learned", tied_head=True),
    "tied": dataclasses.replace(SPEC, tied_head=True),
}
TABLES = {"rope": ["embed"], "learned": ["embed", "pos_embed"], "learned, tied": ["pos_embed"], "tied": []}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
# More than a prefill chunk, of all parts of the table; and one that ends in its last row.
PROMPTS = [" ".join(str(i * i % VOCAB) for i in range(520)), f"5 5 6 {VOCAB - 1}"]


def source(name: str, first: int, last: int) -> Any:
    shape = (last - first,) if "norm" in name else (last - first, DIM)
    return np.random.default_rng([*name.encode(), first]).standard_normal(shape, dtype=np.float32) / 4


def tokenizer() -> bytes:
    """Token i is the number i."""
    made = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.Fuse()
    return made.to_str().encode()


def packed(path: Path, spec: ModelSpec = SPEC, format: str = "q8_0") -> Pack:
    write_pack(path, spec, format, source, PackExtras(files={"tokenizer.json": tokenizer()}))
    return Pack.open(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pack]:
    """Of `SPECS`."""
    return cache(
        lambda name: guessing(packed(tmp_path_factory.mktemp("lookup") / "pack", SPECS[name], "f32"))
    )


def guessing(pack: Pack) -> Pack:
    """With predictors that miss some neurons."""
    rng = np.random.default_rng(1)
    first = rng.standard_normal((32, DIM), dtype=np.float32)
    second = rng.standard_normal((FFN, 32), dtype=np.float32)
    made = LayerPredictor("svd", first, second, None, np.zeros(FFN, np.float32), hot=0)
    write_predictors(pack, [made] * pack.spec.n_layers, {})
    return pack


@pytest.mark.parametrize(
    ("name", "sparsity"),
    [("rope", "exact"), ("rope", "off"), ("learned", "predict"), ("learned, tied", "exact"), ("tied", "off")],
)
def test_rows_from_disk_are_those_of_memory(model: Callable[[str], Pack], name: str, sparsity: str) -> None:
    pack = model(name)
    asked: dict[str, Any] = {"context": 1024, "sparsity": sparsity}
    answers, left = [], []
    for ram in (None, least(pack.path, **asked)):
        with opened(pack.path, ram, **asked) as llm:
            done = llm.generate(PROMPTS, GREEDY)
            held = llm._open().model.weights
        answers.append([(a.token_ids, a.figures.logits_hash) for a in done])
        left.append([x for x in ("embed", "pos_embed") if isinstance(getattr(held, x), Lookup)])
    assert answers[0] == answers[1] and left == [[], TABLES[name]]


# ---- one table


class Counted:
    """A reader, and the blocks it was asked for."""

    def __init__(self, real: _native.Reader) -> None:
        self.real, self.take, self.blocks = real, real.take, list[int]()

    def submit(self, reads: list[tuple[int, int, int, int]]) -> bool:
        self.blocks += [at // BLOCK for at, *_ in reads]
        return self.real.submit(reads)


def lookup(pack: Pack, name: str = "embed.weight") -> Lookup:
    t = pack.tensors[name]
    return Lookup(pack.rows_of(name), t, _native.Arena(t.stride), 0)


@pytest.mark.parametrize("format", [f.name for f in quant.FORMATS.values() if f.block <= 32])
def test_every_row_of_every_format_is_found(format: str, tmp_path: Path) -> None:
    """Those that lie in two blocks too, in any order, any number of times, and the last of the file."""
    pack = packed(tmp_path / "pack", SPECS["learned"], format)
    loaded, ops = weights.load(pack, threads=1), CpuOps(1)
    crossing = BLOCK // pack.tensors["embed.weight"].stride
    for name, table in (
        ("embed.weight", loaded.weights.embed),
        ("pos_embed.weight", loaded.weights.pos_embed),
    ):
        assert table is not None
        found, rng = lookup(pack, name), np.random.default_rng(0)
        assert found.shape == table.shape
        some = rng.integers(0, table.shape[0], 700)
        ends = [table.shape[0] - 1, 0, *range(crossing - 2, min(crossing + 2, table.shape[0]))]
        for ids in (some, ends, [3], [3, 3], []):
            rows = np.array(ids, np.int32)
            assert np.array_equal(ops.embed(found, rows), ops.embed(table, rows))


def test_a_call_reads_no_block_twice(tmp_path: Path) -> None:
    ops, found, rng = CpuOps(1), lookup(packed(tmp_path / "pack", format="f32")), np.random.default_rng(0)
    rows: Any = found._rows
    reader: Any = Counted(rows._reader)
    rows._reader = reader
    for _ in range(2):
        reader.blocks.clear()
        ops.embed(found, rng.permutation(VOCAB).astype(np.int32))
        assert reader.blocks == list(range(-(-VOCAB * 4 * DIM // BLOCK)))
    reader.blocks.clear()
    for i in (0, 1, 255, 1):
        ops.embed(found, np.array([i], np.int32))
    assert reader.blocks == [0], "nor where the next token's row lies in the same"


def test_a_row_that_is_not_there_is_not_looked_for(tmp_path: Path) -> None:
    found = lookup(packed(tmp_path / "pack"))
    for i in (-1, VOCAB):
        with pytest.raises(AssertionError):
            found.row(i)


# ---- faults


def test_a_damaged_block_is_named_and_the_others_live_on(tmp_path: Path) -> None:
    pack, ops = packed(tmp_path / "pack", format="f32"), CpuOps(1)
    found, row, hurt = lookup(pack), np.array([0], np.int32), np.array([BLOCK // (4 * DIM)], np.int32)
    wanted = ops.embed(found, np.concatenate([row, hurt]))
    content = bytearray(pack.weights_path.read_bytes())
    content[2 * BLOCK - 1] ^= 1
    pack.weights_path.write_bytes(content)
    assert np.array_equal(ops.embed(found, row), wanted[:1])
    for _ in range(2):
        with pytest.raises(BadFile, match=rf"checksum mismatch at byte {BLOCK} \(embed.weight\)"):
            ops.embed(found, hurt)
        assert np.array_equal(ops.embed(found, row), wanted[:1])
    content[2 * BLOCK - 1] ^= 1
    pack.weights_path.write_bytes(content)
    assert np.array_equal(ops.embed(found, hurt), wanted[1:])


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    pack = packed(tmp_path / "pack")
    found = lookup(pack)
    os.truncate(pack.weights_path, BLOCK)
    found.row(3)
    with pytest.raises(IOFailure, match=rf"weights.bin: ends early at byte {BLOCK} \(embed.weight\)"):
        found.row(VOCAB - 1)


FAULTS = """
import ctypes, os, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
from test_lookup import *
bad = ctypes.CDLL(None).bad_reads
pack, ops = Pack.open(sys.argv[2]), CpuOps(1)
found, ids = lookup(pack), np.array([3, VOCAB - 1], np.int32)
wanted = ops.embed(found, ids)
for how in (b"short", b"interrupted", b"busy"):
    bad(how)
    assert np.array_equal(ops.embed(found, ids), wanted), how
for n, at in ((1, 0), (2, BLOCK)):
    bad(b"eio %d" % n)
    try:
        ops.embed(found, ids)
        raise AssertionError("read")
    except IOFailure as e:
        print(e)
bad(b"none")
assert np.array_equal(ops.embed(found, ids), wanted)
"""


def test_a_block_that_the_disk_cannot_read_is_named_and_it_may_be_read_later(tmp_path: Path) -> None:
    pack = packed(tmp_path / "pack")
    ran = subprocess.run(
        [sys.executable, "-P", "-c", FAULTS, os.pathsep.join(sys.path), str(pack.path)],
        env={**os.environ, **bad_reads.environment(bad_reads.library(tmp_path), "none")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    why = f"{pack.weights_path}: {os.strerror(errno.EIO)} at byte"
    assert ran.stdout.splitlines() == [f"{why} {at} (embed.weight)" for at in (0, BLOCK)]


def test_a_read_that_ctrl_c_left_on_its_way_spoils_nothing(tmp_path: Path) -> None:
    pack, ops = packed(tmp_path / "pack"), CpuOps(1)
    found, left, ids = lookup(pack), lookup(pack), np.array([VOCAB - 1], np.int32)
    rows: Any = left._rows
    rows._reader.submit([(0, BLOCK, 0, 0)])
    assert np.array_equal(ops.embed(left, ids), ops.embed(found, ids))


# ---- bytes


@pytest.mark.parametrize("name", SPECS)
def test_a_table_takes_a_row_and_a_block_of_the_budget(model: Callable[[str], Pack], name: str) -> None:
    pack = model(name)
    assert looked_up(pack.spec, pack.tensors) == [f"{table}.weight" for table in TABLES[name]]
    with opened(pack.path, least(pack.path), lazy=True) as llm:
        assert llm.session.arrangement is not None
        part = llm.session.arrangement.parts["embedding"]
    whole = aligned(pack.tensors["embed.weight"].bytes) if pack.spec.tied_head else 0
    assert part == whole + len(TABLES[name]) * (4096 + BLOCK)
