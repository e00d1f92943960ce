"""States in slots: what is kept is found, nothing leaks, and no answer depends on what was kept."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from recurrent_toy import SPECS, recurrent_lab
from test_engine import Lab, prompt, run
from toy import GREEDY

from thermocline import _native
from thermocline.engine import decoder
from thermocline.engine import engine as engine_module
from thermocline.engine.kv_cache import BLOCK, BlockTable, KVCache
from thermocline.engine.request import Request
from thermocline.engine.state_pool import CHECKPOINTS, NONE, StatePool, StateTurns, reserved_bytes, slots_for
from thermocline.errors import IOFailure
from thermocline.model.spec import RECURRENT
from thermocline.offline.evaluate import Reader
from thermocline.offline.packing.collect import InputCollector, collect
from thermocline.ops.cpu import CpuOps
from thermocline.ops.interface import F32
from thermocline.plan.memory import layer_shape, others_of
from thermocline.quantise.importance import check, of_moments

SHORT = dataclasses.replace(GREEDY, max_tokens=4)
LONG = dataclasses.replace(GREEDY, max_tokens=70)
PROMPTS = [prompt(seed, n) for seed, n in enumerate((1, 5, 31, 32, 33, 64, 70, 100))]
KINDS = [*SPECS]
SPEC = SPECS["deltanet"]


@pytest.fixture(scope="module", params=KINDS)
def lab(request: pytest.FixtureRequest) -> Lab:
    return recurrent_lab(request.param)


@pytest.fixture(scope="module")
def deltanet() -> Lab:
    return recurrent_lab("deltanet")


# ---- no bit depends on it


def test_company_chunks_and_threads_change_no_bit(lab: Lab) -> None:
    kind = next(k for k in KINDS if SPECS[k] is lab.spec)
    prompts = PROMPTS[1::2]
    alone = [lab.alone(p, SHORT, prefill_chunk=1) for p in prompts]
    assert len({tuple(tokens) for tokens, _ in alone}) == len(prompts), "answers all alike prove nothing"
    for threads, chunk, batch in ((1, 256, 8), (2, 7, 3), (3, 33, 8), (1, 40, 2)):
        e = recurrent_lab(kind, threads=threads).engine(max_batch=batch, prefill_chunk=chunk)
        assert lab.answers(e, *(e.submit(p, SHORT) for p in prompts)) == alone, (threads, chunk, batch)


@pytest.mark.parametrize("format", ["q8_0", "q4_0"])
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights_change_no_bit_with_company_either(kind: str, format: str) -> None:
    lab = recurrent_lab(kind, format=format)
    alone = [lab.alone(p, SHORT, prefill_chunk=1) for p in PROMPTS[3::3]]
    e = lab.engine(max_batch=8, prefill_chunk=50)
    assert lab.answers(e, *(e.submit(p, SHORT) for p in PROMPTS[3::3])) == alone


def test_native_answers_are_the_references(lab: Lab) -> None:
    kind = next(k for k in KINDS if SPECS[k] is lab.spec)
    theirs = recurrent_lab(kind, native=False)
    for ids in PROMPTS[::3]:
        assert lab.alone(ids, SHORT)[0] == theirs.alone(ids, SHORT)[0]


def test_a_prompt_that_begins_alike_goes_on_from_a_state(lab: Lab) -> None:
    e, ids = lab.engine(), PROMPTS[-1]
    first = e.submit(ids, GREEDY)
    run(e, first)
    again, longer, other = (e.submit(x, GREEDY) for x in (ids, [*ids, 3, 4], [*ids[:70], 9]))
    answers = lab.answers(e, again, longer, other)
    assert answers == [lab.answer(first), lab.alone([*ids, 3, 4]), lab.alone([*ids[:70], 9])]
    assert (first.cached, again.cached, longer.cached, other.cached) == (0, 96, 96, 0)


def test_the_next_turn_goes_on_from_the_answers_last_block(lab: Lab) -> None:
    e = lab.engine()
    first = e.submit(PROMPTS[3], LONG)
    run(e, first)
    second = e.submit([*first.ids, 5], SHORT)
    assert lab.answers(e, second) == [lab.alone([*first.ids, 5], SHORT)]
    assert second.cached == (len(first.ids) - 1) // BLOCK * BLOCK == 96


def test_an_answer_keeps_one_state_and_its_prompts(deltanet: Lab) -> None:
    """The prompt's end, which another turn may take, and the last of the answer's three blocks."""
    e = deltanet.engine(max_batch=1)
    run(e, e.submit(PROMPTS[-1], dataclasses.replace(GREEDY, max_tokens=110)))
    assert e.kv.states is not None and e.kv.states.cached == 2


def test_a_long_prompts_states_in_passing_go_first(deltanet: Lab) -> None:
    e, kept = deltanet.engine(max_batch=1, prefill_chunk=32, kv_tokens=2048), PROMPTS[6:8]
    for ids in kept:
        run(e, e.submit(ids, dataclasses.replace(GREEDY, max_tokens=1)))
    run(e, e.submit(prompt(50, 250), SHORT))
    again = [e.submit(ids, SHORT) for ids in kept]
    run(e, *again)
    assert [r.cached for r in again] == [64, 96]


@pytest.mark.parametrize("chunk", [7, 40, 256])
def test_four_answers_to_one_prompt_compute_it_once(lab: Lab, chunk: int) -> None:
    e = lab.engine(max_batch=4, prefill_chunk=chunk)
    requests = [e.submit(PROMPTS[-1], SHORT) for _ in range(4)]
    assert lab.answers(e, *requests) == [lab.alone(PROMPTS[-1], SHORT)] * 4
    assert [r.cached for r in requests] == [0, 96, 96, 96] and e.counts().prompt_tokens == 100 + 3 * 4


def test_agents_with_one_system_prompt_compute_it_once(deltanet: Lab) -> None:
    """Each length that somebody shares is a chunk's end."""
    system = prompt(11, 100)
    two = system + prompt(1, 40)
    agents = [[*system, 5], [*two, 6, 7], [*two, 8], system + prompt(2, 70), prompt(3, 50)]
    e = deltanet.engine(max_batch=8)
    requests = [e.submit(ids, SHORT) for ids in agents]
    assert deltanet.answers(e, *requests) == [deltanet.alone(ids, SHORT) for ids in agents]
    assert [r.cached for r in requests] == [0, 96, 128, 96, 0]


def test_a_scored_prompt_is_scored_as_alone(deltanet: Lab) -> None:
    score = dataclasses.replace(SHORT, prompt_logprobs=0)
    e = deltanet.engine(max_batch=4)
    scored, plain = e.submit(PROMPTS[-1], score), e.submit(PROMPTS[-1], SHORT)
    assert deltanet.answers(e, scored, plain) == [deltanet.alone(PROMPTS[-1], SHORT)] * 2
    assert len(scored.prompt_logprobs) == 99


# ---- what goes wrong


@pytest.mark.parametrize("error", [KeyboardInterrupt, IOFailure])
def test_a_step_that_fails_halfway_changes_nothing(deltanet: Lab, error: type[BaseException]) -> None:
    """Every other step dies in its last layer, when the others' states are written."""
    e = deltanet.engine(prefill_chunk=40)
    requests = [e.submit(p, SHORT) for p in PROMPTS[-3:]]
    ops, calls = e.ops, 0

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(ops, name)

        def head(self, *args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % 2:
                raise error("broken off")
            return ops.head(*args)

    e.ops = Failing()
    while any(r.finish_reason is None for r in requests):
        try:
            e.step()
        except KeyboardInterrupt:
            e.check_integrity()
    if error is KeyboardInterrupt:
        assert [deltanet.answer(r) for r in requests] == [deltanet.alone(p, SHORT) for p in PROMPTS[-3:]]
    e.check_integrity()
    assert e.kv.used == 0


def test_an_error_of_one_request_ends_it_alone(deltanet: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    e = deltanet.engine()
    requests = [e.submit(p, SHORT) for p in PROMPTS[-3:]]
    real = decoder.forward

    def forward(model: Any, kv: Any, batch: Any, *args: Any, **more: Any) -> Any:
        if requests[1].error is None and len(requests[1].token_ids) == 2 and batch.positions.max() > 64:
            at = requests[1].table.held[0].blocks[0]
            if at in batch.block_table[:, 0]:
                raise IOFailure("the disk is gone")
        return real(model, kv, batch, *args, **more)

    monkeypatch.setattr(engine_module, "forward", forward)
    run(e, *requests)
    assert isinstance(requests[1].error, IOFailure)
    for i in (0, 2):
        assert deltanet.answer(requests[i]) == deltanet.alone(PROMPTS[-3 + i], SHORT)


@pytest.mark.parametrize("seed", range(6))
def test_any_history_answers_as_alone_and_leaks_nothing(deltanet: Lab, seed: int) -> None:
    rng = random.Random(seed)
    e = deltanet.engine(
        max_batch=rng.choice([1, 2, 4]),
        prefill_chunk=rng.choice([5, 32, 50]),
        kv_tokens=rng.choice([256, 1024]),
    )
    tree, requests = [prompt(seed, 150)], list[Request]()
    for _ in range(10):
        ids = rng.choice(tree)[: rng.randrange(1, 150)] + prompt(rng.randrange(99), rng.randrange(0, 60))
        tree.append(ids)
        requests.append(e.submit(ids, dataclasses.replace(GREEDY, max_tokens=rng.randrange(1, 40))))
        while rng.random() < 0.6:
            e.step()
            e.check_integrity()
            if rng.random() < 0.1 and e.running:
                e.cancel(rng.choice(e.running))
    run(e, *requests)
    for request in requests:
        if request.finish_reason != "cancelled":
            own = request.ids[: request.n_prompt]
            assert deltanet.answer(request) == deltanet.alone(own, request.params)


# ---- the pool


@pytest.mark.parametrize("seed", range(20))
def test_no_history_loses_a_slot_or_finds_another_texts_state(seed: int) -> None:
    """Each slot remembers the text that it was written for."""
    rng = random.Random(seed)
    kv = KVCache(SPEC, 40, block=2)
    kv.keep_states(StatePool(SPEC, sequences=4))
    assert kv.states is not None
    written: dict[int, tuple[int, ...]] = {}
    running: list[tuple[BlockTable, list[int], int]] = []  # with how much of it is computed
    for _ in range(600):
        if running and rng.random() < 0.8:
            table, ids, at = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.15 or at == len(ids):
                kv.close(table)
                continue
            read, to = kv.state_slots([table])
            again = kv.state_slots([table])
            assert read is not None and to is not None and again[1] is not None and read[0] != to[0]
            assert (again[1] == to).all(), "a step that is made again takes no more slots"
            assert table.state == read[0] and (at == 0) == (read[0] == NONE)
            assert at == 0 or written[read[0]] == tuple(ids[:at])
            if rng.random() < 0.2:  # the step failed
                written[int(to[0])] = ()
                running.append((table, ids, at))
                continue
            at = min(len(ids), at + rng.randrange(1, 5))
            written[int(to[0])] = tuple(ids[:at])
            kv.tables([table], [at])
            kv.seal(table, ids, at, n_prompt=len(ids) // 2)
            running.append((table, ids, at))
        elif len(running) < 4:
            ids = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
            table = kv.open(ids)
            if table.sealed:
                assert written[table.state] == tuple(ids[: 2 * table.sealed])
            if kv.grow(table, len(ids)):
                running.append((table, ids, 2 * table.sealed))
            else:
                kv.close(table)
        kv.check_integrity()
    for table, _, _ in running:
        kv.close(table)
    kv.check_integrity()
    assert kv.used == 0 and kv.states.used == 0


def test_a_prefix_counts_only_as_far_as_a_state_goes() -> None:
    kv = KVCache(SPEC, 40, block=2)
    kv.keep_states(StatePool(SPEC, sequences=1))
    assert kv.states is not None
    ids = [1, 2, 3, 4, 5, 6, 7]
    table = kv.open(ids)
    assert kv.grow(table, 7)
    for at in (3, 4, 7):
        kv.state_slots([table])
        kv.tables([table], [at])
        kv.seal(table, ids, at, n_prompt=7)
    assert kv.open([*ids, 8]).sealed == 2, "blocks of 6 positions are there, a state after 4"
    assert kv.open(ids[:4]).sealed == 0


def test_an_equal_state_stays_private_and_a_forgotten_one_is_free() -> None:
    pool = StatePool(SPEC, 2)
    a, b = pool.take(), pool.take()
    assert pool.publish(a, b"x") and not pool.publish(b, b"x")
    pool.release(a)
    pool.release(b)
    assert pool.cached == 1 and pool.hold(b"x") == a
    pool.forget(b"x")
    pool.forget(b"y")
    assert b"x" not in pool and pool.used == 1
    pool.release(a)
    pool.release(NONE)
    pool.check_integrity()
    assert pool.available == pool.n_slots and pool.cached == 0


def test_states_in_passing_go_before_older_ones() -> None:
    pool = StatePool(SPEC, 1)
    names = [bytes([i]) for i in range(pool.n_slots)]
    for i, name in enumerate(names):
        slot = pool.take()
        pool.publish(slot, name, passing=i == 3)
        pool.release(slot)
    pool.take()
    assert names[3] not in pool and names[0] in pool
    pool.take()
    assert names[0] not in pool


def test_turns_read_what_was_written_last() -> None:
    turns = StateTurns(SPEC, 2)
    steps = [turns.step(n, first=first) for n, first in ((2, True), (2, False), (1, True))]
    seen = [[[] if slots is None else slots.tolist() for slots in step] for step in steps]
    assert seen == [[[-1, -1], [2, 3]], [[2, 3], [0, 1]], [[-1], [2]]]
    assert StateTurns(dataclasses.replace(SPEC, mixers=(), recurrent=None)).step(1, first=True) == (
        None,
        None,
    )


# ---- memory


@pytest.mark.parametrize("batch", [1, 3])
def test_a_sessions_states_are_what_the_plan_says(deltanet: Lab, batch: int) -> None:
    e = deltanet.engine(max_batch=batch)
    assert e.kv.states is not None
    floats = 2 * (3 * (32 + 2 * 2 * 8) + 4 * 8 * 8)  # of two layers
    assert e.kv.states.nbytes == reserved_bytes(SPEC, batch) == 4 * floats * (2 * batch + CHECKPOINTS)
    assert slots_for(batch) == e.kv.states.n_slots == e.counts().states
    plan = others_of(SPEC, context=256, kv_tokens=256 * batch, max_batch=batch, threads=2)
    assert plan["recurrent states"] == e.kv.states.nbytes
    for x in e.kv.states.layers.values():
        assert x.ctypes.data % 64 == 0 and x.dtype == np.float32


def test_counts_tell_of_states(deltanet: Lab) -> None:
    e = deltanet.engine(max_batch=2)
    run(e, e.submit(PROMPTS[-1], SHORT))
    now = e.counts()
    assert (now.states, now.states_cached, now.states_free) == (8, 1, 7)


@pytest.mark.parametrize("kind", KINDS)
def test_the_core_takes_no_more_scratch_than_planned(kind: str) -> None:
    lab = recurrent_lab(kind, format="q8_0", threads=3)
    e = lab.engine(max_batch=4)
    run(e, *(e.submit(prompt(i, 200), SHORT) for i in range(4)))
    most = _native.scratch_bytes(layer_shape(lab.spec), tokens=256, positions=256, threads=3)
    assert lab.ops.native.scratch_bytes <= most


# ---- without an engine


@pytest.mark.parametrize("kind", KINDS)
def test_whoever_reads_texts_in_steps_gets_the_engines_logits(kind: str) -> None:
    """Evaluating, two texts side by side, twice: logits of the second time begin from nothing again."""
    lab = recurrent_lab(kind)
    texts = np.array([prompt(1, 64), prompt(2, 64)], np.int32)
    model = decoder.bind(lab.spec, lab.weights, lab.ops)
    whole = Reader(model, lab.ops, context=64, side=2, step=64)
    steps = Reader(model, lab.ops, context=64, side=2, step=7)
    once = whole.read(texts, 0, 64)
    for reader in (steps, steps, whole):
        assert reader.read(texts, 0, 64).tobytes() == once.tobytes()
    steps.prompt(texts[:1], 40)
    assert steps.read(texts[:1], 40, 64).tobytes() == once[:1, 40:].tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_collected_of_the_layers_that_have_them(kind: str) -> None:
    lab = recurrent_lab(kind)
    moments = collect(lab.spec, lab.weights, np.array([prompt(1, 40)], np.int32), threads=1)
    fed = [i for i in range(3) if i not in lab.spec.no_ffn]
    names = {"head", "layers.1.qkv", "layers.1.attn_out"}
    names |= {f"layers.{i}.{part}" for i in fed for part in ("ffn", "down")}
    recurrent = [i for i in range(3) if lab.spec.mixer(i) in RECURRENT]
    names |= {f"layers.{i}.{part}" for i in recurrent for part in ("mixer", "mixer_out")}
    assert set(moments) == names and all(m.rows == 40 for found in moments.values() for m in found)
    check(of_moments(moments), lab.spec, "a test")


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_mixers_last_matrix_reads_is_what_it_is_multiplied_with(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The squares of a column of the product are the quadratic form of its row in the moments."""
    lab, grew, real = recurrent_lab(kind), [], InputCollector.mixer_add
    i = next(i for i in range(3) if lab.spec.mixer(i) in RECURRENT)
    mixer = lab.weights.layers[i].mixer
    assert mixer is not None

    def watched(ops: InputCollector, x: F32, h: F32, bound: Any, step: Any, states: F32) -> None:
        before = x.copy()
        real(ops, x, h, bound, step, states)
        grew.append((x - before) / np.float32(lab.spec.residual_scale))

    monkeypatch.setattr(InputCollector, "mixer_add", watched)
    texts = np.array([prompt(1, 40)], np.int32)
    (inner,) = collect(lab.spec, lab.weights, texts, threads=1, window=1 << 16)[f"layers.{i}.mixer_out"]
    out = CpuOps(1).embed(mixer.out, np.arange(mixer.out.shape[0], dtype=np.int32))
    wanted = (grew[0].astype(np.float64) ** 2).sum(axis=0)
    got = np.einsum("rc,cd,rd->r", out, inner.products[0], out)
    assert np.abs(got - wanted).max() < 0.02 * wanted.mean()
