"""Keys and values of layers with a window take room for the window, and no token changes by that."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from test_engine import Lab, native_lab, prompt
from toy import GREEDY, SPEC

from thermocline.engine.decoder import bind, forward
from thermocline.engine.kv_cache import (
    BLOCK,
    BlockTable,
    KVCache,
    blocks_at_once,
    blocks_for,
    bytes_for,
    reserved_bytes,
)
from thermocline.errors import OutOfBudget
from thermocline.model.spec import ModelSpec, RopeScaling
from thermocline.ops.interface import Batch, FFNStats
from thermocline.plan.memory import Needs, fit

ALL = dataclasses.replace(SPEC, sliding_window=40)
SOME = dataclasses.replace(ALL, window_layers=(0,), local_rope_theta=100.0)
WINDOWED = pytest.mark.parametrize("spec", [ALL, SOME], ids=["all", "some"])
LONG = prompt(5, 150)


@pytest.fixture(scope="module")
def lab() -> Lab:
    return native_lab()


def whole_logits(lab: Lab, spec: ModelSpec, ids: list[int]) -> Any:
    """Of every position, in a cache that forgets nothing."""
    rows, table = np.arange(len(ids), dtype=np.int32), np.arange(blocks_for(len(ids)), dtype=np.int32)[None]
    batch = Batch(np.array(ids, np.int32), rows, np.zeros_like(rows), table, rows)
    kv = KVCache(spec, blocks_for(len(ids)))
    return forward(bind(spec, lab.weights, lab.ops), kv, batch, lab.ops, sparsity="exact", stats=FFNStats())


def bounded_logits(lab: Lab, spec: ModelSpec, ids: list[int], chunk: int) -> Any:
    """The same in exactly the room that a sequence may take, given `chunk` tokens at a time."""
    one = blocks_at_once(len(ids), spec.sliding_window, chunk)
    kv = KVCache(spec, blocks_for(len(ids)), one, chunk=chunk)
    for pool in kv.pools:  # what is not written is not a number: touching it would show
        assert pool.n_blocks == (one if pool.window else blocks_for(len(ids)))
    for i in range(spec.n_layers):
        kv.layer(i).k[:], kv.layer(i).v[:] = np.nan, np.nan
    table, model, out = BlockTable(), bind(spec, lab.weights, lab.ops), []
    assert kv.grow(table, len(ids))
    for start in range(0, len(ids), chunk):
        at = np.arange(start, min(start + chunk, len(ids)), dtype=np.int32)
        rows = np.arange(len(at), dtype=np.int32)
        tables = kv.tables([table], [start + len(at)])
        batch = Batch(np.array(ids, np.int32)[at], at, np.zeros_like(rows), tables[0], rows, tables[-1])
        out.append(forward(model, kv, batch, lab.ops, sparsity="exact", stats=FFNStats()))
        kv.seal(table, ids, start + len(at))
        kv.check_integrity()
    return np.concatenate(out)


@WINDOWED
@pytest.mark.parametrize("chunk", [1, 7, 32, 64, 150])
def test_logits_are_bit_for_bit_those_of_a_cache_that_forgets_nothing(
    lab: Lab, spec: ModelSpec, chunk: int
) -> None:
    expected = whole_logits(lab, spec, LONG)
    assert bounded_logits(lab, spec, LONG, chunk).tobytes() == expected.tobytes()


@WINDOWED
def test_requests_in_turn_and_together_answer_as_alone(lab: Lab, spec: ModelSpec) -> None:
    """In a cache of one context: each waits for room, and takes over what others have left."""
    prompts = [LONG, LONG[:90], prompt(6, 33), LONG, [*LONG[:70], 3, 4], prompt(7, 120)]
    expected = [lab.alone(p, spec=spec, prefill_chunk=256) for p in prompts]
    for options in ({"kv_tokens": 256}, {}):
        e = lab.engine(spec, prefill_chunk=16, **options)
        together = lab.answers(e, *(e.submit(p, GREEDY) for p in prompts))
        assert together == expected


# ---- what is used again


@WINDOWED
def test_an_answer_is_continued_from_what_its_window_left(lab: Lab, spec: ModelSpec) -> None:
    e = lab.engine(spec, kv_tokens=256, prefill_chunk=16)
    first = e.submit(LONG, GREEDY)
    lab.answers(e, first)
    second = e.submit([*first.ids, 5], GREEDY)
    assert lab.answers(e, second) == [lab.alone([*first.ids, 5], spec=spec)]
    assert second.cached == (len(first.ids) - 1) // BLOCK * BLOCK


@WINDOWED
def test_a_prefix_whose_window_is_gone_is_computed_again(lab: Lab, spec: ModelSpec) -> None:
    """The room is one request's: at the end of 150 tokens nothing is left from before the window."""
    e = lab.engine(spec, kv_tokens=256, prefill_chunk=16)
    lab.answers(e, e.submit(LONG, GREEDY))
    short = e.submit(LONG[:70], GREEDY)
    assert lab.answers(e, short) == [lab.alone(LONG[:70], spec=spec)]
    assert short.cached == 0


def test_without_a_window_that_prefix_is_there(lab: Lab) -> None:
    e = lab.engine(kv_tokens=256, prefill_chunk=16)
    lab.answers(e, e.submit(LONG, GREEDY))
    short = e.submit(LONG[:70], GREEDY)
    lab.answers(e, short)
    assert short.cached == 64


@WINDOWED
def test_no_history_finds_a_prefix_that_cannot_be_continued(spec: ModelSpec) -> None:
    """Every block remembers the tokens written to it; what a table holds must be what its window reaches."""
    rng = random.Random(1)
    spec = dataclasses.replace(spec, sliding_window=5)
    kv = KVCache(spec, 40, 12, block=2, chunk=3)
    written: list[dict[int, tuple[int, ...]]] = [{} for _ in kv.pools]
    running: list[tuple[BlockTable, list[int], int]] = []
    reused = 0
    for _ in range(3000):
        if rng.random() < 0.3 or not running:
            ids = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
            table = kv.open(ids)
            if not kv.grow(table, len(ids)):
                kv.close(table)
            else:
                running.append((table, ids, table.sealed * 2))
                reused += table.sealed
        if running:
            table, ids, computed = running.pop(rng.randrange(len(running)))
            stop = min(len(ids), computed + rng.randrange(1, 4))
            for pool, blocks, seen in zip(kv.pools, kv.tables([table], [stop]), written, strict=True):
                first = 0 if pool.window is None else max(0, computed + 1 - pool.window)
                for i in range(first // 2, blocks_for(stop, 2)):
                    if i * 2 >= computed:
                        seen[int(blocks[0, i])] = ()
                    else:
                        assert seen[int(blocks[0, i])] == tuple(ids[: min(2 * i + 2, computed)])
                    seen[int(blocks[0, i])] = tuple(ids[: min(2 * i + 2, stop)])
            kv.seal(table, ids, stop)
            if stop < len(ids) and rng.random() < 0.95:
                running.append((table, ids, stop))
            else:
                kv.close(table)
        kv.check_integrity()
    for table, _, _ in running:
        kv.close(table)
    assert kv.used == 0 and all(pool.reserved == 0 for pool in kv.pools) and reused > 100


# ---- memory

MISTRAL = ModelSpec("mistral", 4096, 14336, 32, 32, 8, 128, 32000, 131072, "rms", 1e-5, "silu")
MISTRAL = dataclasses.replace(MISTRAL, sliding_window=4096)


def test_memory_does_not_grow_with_the_context_where_all_layers_have_a_window() -> None:
    """4096 + 256 positions, rounded to blocks: 136 + 1 of 32. 128 KiB a position: 548 MiB, not 16 GiB."""
    at = {c: reserved_bytes(MISTRAL, c, c, 256) for c in (4096, 8192, 32768, 131072)}
    assert at[4096] == bytes_for(MISTRAL, 4096) == 512 << 20
    assert at[8192] == at[32768] == at[131072] == 137 * BLOCK * bytes_for(MISTRAL, 1) == 548 << 20


def test_layers_without_a_window_grow_alone() -> None:
    spec = dataclasses.replace(MISTRAL, window_layers=tuple(range(24)))
    short, long = (reserved_bytes(spec, c, c, 256) for c in (8192, 32768))
    assert long - short == bytes_for(spec, 32768 - 8192) // 4


@WINDOWED
def test_the_plan_s_bytes_are_the_cache_s(lab: Lab, spec: ModelSpec) -> None:
    e = lab.engine(spec, prefill_chunk=16, kv_tokens=300)
    assert e.kv.nbytes == reserved_bytes(spec, 300, 256, 16)


def plan(context: int, available: int, spec: ModelSpec = MISTRAL, **changes: Any) -> int:
    needs = Needs("exact", context, max_batch=8, threads=2, budget=available, **changes)
    return fit(spec, needs, weights_bytes=4 << 30, context=context)


def test_a_long_context_fits_where_its_window_does() -> None:
    assert plan(32768, 6 << 30) == 32768
    with pytest.raises(OutOfBudget, match=r"4\.00 GiB keys and values|4\.00 keys and values"):
        plan(32768, 6 << 30, dataclasses.replace(MISTRAL, sliding_window=None))


@pytest.mark.parametrize("window", [None, 4096])
def test_the_context_recommended_is_the_longest_that_fits(window: int | None) -> None:
    spec = dataclasses.replace(MISTRAL, sliding_window=window)
    available = (4 << 30) + (600 << 20)
    with pytest.raises(OutOfBudget) as refused:
        plan(32768, available, spec)
    tokens = int(str(refused.value).rsplit(maxsplit=1)[1])
    assert plan(tokens, available, spec) >= tokens
    with pytest.raises(OutOfBudget):
        plan(tokens + 1, available, spec)


# ---- long contexts

SCALED = RopeScaling(kind="yarn", factor=16.0, original_context=2048, attention_factor=1.2)
DEPTHS = (8192, 16384, 32768)
SCRIPT = """
import dataclasses
import numpy as np
from test_engine import native_lab
from test_windows import DEPTHS, SCALED
from thermocline.machine import hardware
from thermocline.engine.sampler import SamplingParams
from toy import SPEC, random_weights
spec = dataclasses.replace(SPEC, max_context=32768, n_heads=1, n_kv_heads=1, n_layers=1, rope_scaling=SCALED)
lab = native_lab(spec=spec, w=random_weights(spec), threads=1)
e = lab.engine(context=32768, kv_tokens=32768, tokenizer=None)
prompt = np.random.default_rng(0).integers(1, 90, 32767).tolist()
request = e.submit(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
for depth in (512, *DEPTHS):
    while request.computed < min(depth, 32767):
        e.step()
    print(hardware.peak_rss_bytes())
e.step()
assert request.finish_reason == "length" and request.error is None
"""


def test_a_prompt_of_32k_tokens_with_scaled_rope_takes_memory_in_proportion() -> None:
    code = f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}\n{SCRIPT}"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert not run.returncode, run.stderr
    start, *peaks = map(int, run.stdout.split())
    cache = bytes_for(dataclasses.replace(SPEC, n_heads=1, n_kv_heads=1, n_layers=1), 1)
    for depth, peak in zip(DEPTHS, peaks, strict=True):  # scores of a chunk, kept: 32 MiB at the end
        assert peak - start <= 2 * cache * depth + 2 * 2**20, (start, peaks)
