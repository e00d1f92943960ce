"""Keys and values in f16, q8_0 and q4_0: their bytes are what is planned, and company changes no bit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_engine import Lab, native_lab, prompt
from toy import GREEDY, SPEC, random_weights

from thermocline import LLM, _native
from thermocline.engine.kv_cache import BLOCK, KVCache, bytes_for, in_ram, reserved_bytes
from thermocline.engine.sampler import SamplingParams
from thermocline.errors import UsageError
from thermocline.llm import BUNDLED
from thermocline.model.modes import CACHE_TYPES, PLAIN, CacheTypes, row_bytes
from thermocline.model.spec import ModelSpec
from thermocline.ops import reference
from thermocline.ops.interface import F32, KVShape
from thermocline.pack.pack import Pack
from thermocline.plan.budget import all_in_ram
from thermocline.plan.memory import Needs
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session

Run = Callable[..., Any]
WIDE = dataclasses.replace(SPEC, n_heads=2, n_kv_heads=1, head_dim=32)  # whole blocks
WINDOWED = dataclasses.replace(WIDE, sliding_window=40, window_layers=(1,))
EVERY = [CacheTypes(k, v) for k in CACHE_TYPES for v in CACHE_TYPES]
QUANTISED = [t for t in EVERY if t.quantised]


def lab(spec: ModelSpec = WIDE, threads: int = 2) -> Lab:
    return native_lab(spec=spec, w=random_weights(spec), threads=threads)


@pytest.fixture(scope="module", params=QUANTISED, ids=str)
def types(request: pytest.FixtureRequest) -> CacheTypes:
    made: CacheTypes = request.param
    return made


# ---- bytes


@pytest.mark.parametrize("types", EVERY, ids=str)
def test_a_cache_takes_the_bytes_that_are_planned(types: CacheTypes) -> None:
    assert KVCache(WIDE, 3, types=types).nbytes == bytes_for(WIDE, 3 * BLOCK, types)
    e = lab(WINDOWED).engine(prefill_chunk=16, kv_tokens=300, cache=types)
    assert e.kv.nbytes == reserved_bytes(WINDOWED, 300, 256, 16, types)
    assert e.traffic.position_bytes == bytes_for(WIDE, 1, types)


def test_a_page_has_the_bytes_that_the_core_says() -> None:
    for (name, number), dim in ((x, dim) for x in CACHE_TYPES.items() for dim in (32, 64, 96, 128, 160)):
        shape = KVShape(1, 1, dim, BLOCK, CacheTypes(name, name))
        assert shape.k_bytes == shape.v_bytes == _native.cache_page_bytes(number, dim, BLOCK)
    assert [row_bytes(name, 128) for name in CACHE_TYPES] == [256, 136, 72]


def test_the_plan_of_a_session_counts_them() -> None:
    pack, found = Pack.open(BUNDLED), {}
    for types in (PLAIN, CacheTypes("q8_0", "q8_0"), CacheTypes("q4_0", "q4_0")):
        made = all_in_ram(pack, None, Needs("exact", 512, 1, 1, types=types))
        found[types.k] = made.placement.bytes["cpu"]["keys and values"]
        with Session.open(pack, EngineOptions(context=512, max_batch=1, cache_type_k=types.k,
                                              cache_type_v=types.v)) as session:  # fmt: skip
            engine = session.load()
            planned = session.placement.bytes["cpu"]["keys and values"]
            assert engine.kv.nbytes == planned == found[types.k]
    assert found["q8_0"] * 32 == found["f16"] * 17 and found["q4_0"] * 32 == found["f16"] * 9


# ---- company, chunks, prefixes, windows


@pytest.mark.parametrize("spec", [WIDE, WINDOWED], ids=["all positions", "a window"])
def test_company_chunks_and_threads_change_no_bit(types: CacheTypes, spec: ModelSpec) -> None:
    ids = [prompt(1, 70), prompt(2, 7), prompt(3, 33)]
    alone = [lab(spec).alone(x, cache=types) for x in ids]
    for threads, chunk in ((1, 16), (2, 5)):
        here = lab(spec, threads)
        e = here.engine(max_batch=3, prefill_chunk=chunk, cache=types)
        assert here.answers(e, *(e.submit(x, GREEDY) for x in ids)) == alone, (threads, chunk)


@pytest.mark.parametrize("spec", [WIDE, WINDOWED], ids=["all positions", "a window"])
def test_a_prefix_that_is_found_is_the_one_that_would_be_computed(types: CacheTypes, spec: ModelSpec) -> None:
    shared, here = prompt(4, 3 * BLOCK), lab(spec)
    e = here.engine(cache=types)
    first = e.submit([*shared, *prompt(5, 9)], GREEDY)
    here.answers(e, first)
    again = e.submit([*shared, *prompt(6, 11)], GREEDY)
    (answer,) = here.answers(e, again)
    assert again.completion().figures.cached_tokens >= 2 * BLOCK
    assert answer == here.alone([*shared, *prompt(6, 11)], cache=types)


def test_the_types_change_an_answer_only_a_little() -> None:
    """They must change something, or they are not used; a score or a value that is wrong would show."""
    ids, here = prompt(7, 200), lab()
    logits = {}
    for types in EVERY:
        e = here.engine(cache=types)
        request = e.submit(ids, SamplingParams(temperature=0, max_tokens=1, logprobs=5))
        here.answers(e, request)
        logits[types] = [p.logprob for p in request.completion().logprobs or ()]
    plain = np.array(logits[PLAIN])
    far = {t: float(np.abs(np.array(x) - plain).max()) for t, x in logits.items()}
    assert far.pop(PLAIN) == 0
    assert all(0 < d < 0.5 for d in far.values()), far
    assert far[CacheTypes("q8_0", "q8_0")] < 0.03


# ---- the rotation


def test_the_rotation_keeps_products_and_undoes_itself() -> None:
    rng = np.random.default_rng(0)
    for n in (32, 64, 96, 128, 160, 256):
        q, k = rng.standard_normal((2, 5, n), dtype=np.float32)
        turned = reference._hadamard(q)
        np.testing.assert_allclose((turned * reference._hadamard(k)).sum(1), (q * k).sum(1), atol=1e-4)
        np.testing.assert_allclose(reference._hadamard(turned), q, atol=1e-5)
    outlier: F32 = np.zeros((1, 64), np.float32)
    outlier[0, 5] = 8
    assert (np.abs(reference._hadamard(outlier)) == 1).all(), "one large element becomes many of one size"


def test_an_outlier_costs_its_neighbours_no_precision() -> None:
    """What the rotation is for: without it, one key element of 50 would leave 4 bits for nothing else."""
    rng = np.random.default_rng(1)
    k = rng.standard_normal((1, 128), dtype=np.float32)
    k[0, 3] = 50
    shape = KVShape(1, 1, 128, BLOCK, CacheTypes("q4_0", "q4_0"))
    errors = []
    for turned in (k, reference._hadamard(k)):
        kv = in_ram(0, shape)
        page = np.zeros((1, 1), np.int32)
        reference._store_keys(kv, page[0], 0, turned)
        stored = reference._keys_at(kv, page)[0, :1]
        back = stored if turned is k else reference._hadamard(stored)
        errors.append(np.abs(np.delete(back - k, 3, axis=1)[:, :31]).mean())
    assert errors[1] < 0.6 * errors[0]


# ---- refusals


def test_heads_that_are_no_whole_blocks_are_refused() -> None:
    odd = dataclasses.replace(SPEC, head_dim=80, n_heads=2)
    with pytest.raises(UsageError, match=r"keys in q8_0 need heads of a multiple of 32 .* have 80; use f16"):
        KVCache(odd, 2, types=CacheTypes("q8_0", "f16"))
    with pytest.raises(UsageError, match="values in q4_0"):
        KVCache(odd, 2, types=CacheTypes("f16", "q4_0"))
    KVCache(odd, 2)


def test_a_model_with_such_heads_is_refused_before_it_is_loaded(tiny_pack: Path, thermocline: Run) -> None:
    ran = thermocline("run", "-m", tiny_pack, "--cache-type-v", "q8_0", "hello")
    assert ran.code == 2 and "values in q8_0 need heads of a multiple of 32 elements" in ran.err
    assert ran.err.count("\n") == 1
    for command in (["eval", str(tiny_pack), "--text", __file__], ["plan", str(tiny_pack)]):
        ran = thermocline(*command, "--cache-type-k", "q4_0")
        assert ran.code == 2 and "keys in q4_0 need heads" in ran.err, command


def test_a_type_that_there_is_not_is_refused(thermocline: Run) -> None:
    with pytest.raises(UsageError, match="cache_type_k is 'q5_0'; it must be one of f16, q8_0, q4_0"):
        LLM(cache_type_k="q5_0", lazy=True)
    for command in ("run", "chat", "serve", "bench", "eval", "plan"):
        ran = thermocline(command, "--cache-type-k", "f8")
        assert ran.code == 2 and "--cache-type-k must be one of f16, q8_0, q4_0, not 'f8'" in ran.err


def test_a_gpu_is_refused(thermocline: Run, tmp_path: Path) -> None:
    ran = thermocline("run", "--gpu", "stand-in", "--cache-type-k", "q8_0", "hello")
    assert ran.code == 2 and "--gpu stand-in with keys and values in q8_0 keys, f16 values" in ran.err
    plan = ("plan", "llama-2-7b", "--hardware", "rtx4090-i9-13900k", "--cache-type-v", "q4_0")
    ran = thermocline(*plan)
    assert ran.code == 2 and "a GPU keeps keys and values as f16" in ran.err
    assert thermocline(*plan, "--vram", "0").code == 0


def test_environment_variables_and_json_have_them(thermocline: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THERMOCLINE_CACHE_TYPE_K", "q8_0")
    ran = thermocline("run", "-n", "2", "--cache-type-v", "q4_0", "--json", "-q", "Once upon a time")
    found = json.loads(ran.out)
    assert (found["cache_type_k"], found["cache_type_v"]) == ("q8_0", "q4_0")
