"""Requests that are there together and begin alike: what they share is computed once, and no bit changes."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from test_engine import Lab, native_lab, prompt, run
from toy import GREEDY, SPEC

from thermocline import LLM, SamplingParams
from thermocline.engine import decoder
from thermocline.engine import engine as engine_module
from thermocline.engine.engine import Engine
from thermocline.engine.kv_cache import BLOCK, BlockTable, KVCache
from thermocline.engine.request import Request
from thermocline.errors import IOFailure
from thermocline.model.spec import ModelSpec
from thermocline.ops.interface import Batch

ALL = dataclasses.replace(SPEC, sliding_window=40)
SPECS = {"no window": SPEC, "all": ALL, "some": dataclasses.replace(ALL, window_layers=(0,))}
SYSTEM = prompt(11, 100)  # three blocks and a bit
SHORT = dataclasses.replace(GREEDY, max_tokens=4)


@pytest.fixture(scope="module")
def lab() -> Lab:
    return native_lab()


def least(prompts: list[list[int]]) -> int:
    """To compute, where each takes what those before it have: whole blocks, short of its last token."""

    def shared(ids: list[int], other: list[int]) -> int:
        blocks = range(BLOCK, min(len(ids) - 1, len(other)) + 1, BLOCK)
        return max((n for n in blocks if ids[:n] == other[:n]), default=0)

    before = [max((shared(ids, p) for p in prompts[:i]), default=0) for i, ids in enumerate(prompts)]
    return sum(map(len, prompts)) - sum(before)


def checked(lab: Lab, e: Engine, prompts: list[list[int]], spec: ModelSpec | None = None) -> list[Request]:
    """All at once: each answers as alone, and nothing is computed twice."""
    requests = [e.submit(p, SHORT) for p in prompts]
    assert lab.answers(e, *requests) == [lab.alone(p, SHORT, spec=spec) for p in prompts]
    assert e.counts().prompt_tokens == least(prompts)
    assert e.counts().prompt_tokens + e.counts().cached_tokens == sum(map(len, prompts))
    assert e.counts().cached_tokens == sum(r.completion().figures.cached_tokens for r in requests)
    return requests


# ---- once


@pytest.mark.parametrize("chunk", [7, 32, 40, 256])
@pytest.mark.parametrize("name", SPECS)
def test_four_answers_to_one_prompt_compute_it_once(lab: Lab, name: str, chunk: int) -> None:
    e = lab.engine(SPECS[name], prefill_chunk=chunk)
    requests = checked(lab, e, [SYSTEM] * 4, SPECS[name])
    assert [r.cached for r in requests] == [0, 96, 96, 96] and e.counts().prompt_tokens == 100 + 3 * 4


@pytest.mark.parametrize("chunk", [40, 256])
def test_agents_with_one_system_prompt_compute_it_once(lab: Lab, chunk: int) -> None:
    """Two of them go on alike, and one comes back to what two others share."""
    two = SYSTEM + prompt(1, 40)
    agents = [[*SYSTEM, 5], [*two, 6, 7], SYSTEM[:64], [*two, 8], SYSTEM + prompt(2, 70), prompt(3, 50)]
    requests = checked(lab, lab.engine(prefill_chunk=chunk), agents)
    assert [r.cached for r in requests] == [0, 96, 32, 128, 96, 0]


def test_who_comes_in_the_midst_of_the_prompt_waits_for_the_rest(lab: Lab) -> None:
    e = lab.engine(prefill_chunk=40)
    first = e.submit(SYSTEM, SHORT)
    e.step()
    second = e.submit([*SYSTEM, 9], SHORT)
    run(e, first, second)
    assert (first.cached, second.cached) == (0, 96) and e.counts().prompt_tokens == 100 + 5


def test_only_who_begins_alike_waits_and_others_have_the_rest_of_the_step(lab: Lab) -> None:
    e = lab.engine(prefill_chunk=256)
    same = [e.submit(SYSTEM, SHORT) for _ in range(2)]
    other = e.submit(prompt(1, 50), SHORT)
    e.step()
    assert [r.computed for r in (*same, other)] == [96, 0, 50] and len(other.token_ids) == 1


@pytest.mark.parametrize("n", [63, 64])  # of 64 the last block is each one's own: its last token's logits are
def test_first_tokens_come_together_where_nobody_answered_before(lab: Lab, n: int) -> None:
    """Beside the first one's answer, the others' last tokens would come in chunks of four."""
    e = lab.engine(max_batch=4)
    requests = [e.submit(SYSTEM[:n], GREEDY) for _ in range(4)]
    for _ in range(2):
        e.step()
    assert [len(r.token_ids) for r in requests] == [1] * 4
    run(e, *requests)
    assert e.counts().prompt_tokens == 32 + 4 * (n - 32)


def test_nobody_waits_for_more_than_it_can_take(lab: Lab) -> None:
    """The second needs all that the first makes, the third what is there after a step."""
    e = lab.engine(prefill_chunk=80)
    first, second = (e.submit(SYSTEM, SHORT) for _ in range(2))
    third = e.submit([*SYSTEM[:64], 5, 6, 7], SHORT)
    for _ in range(2):
        e.step()
    assert (first.computed, second.computed, third.computed) == (96, 0, 67)
    run(e, first, second, third)


def test_a_block_that_is_taken_gives_its_own_back(lab: Lab) -> None:
    """Two fit beside each other; the third comes in as soon as the first has made what it shares."""
    e = lab.engine(context=128, kv_tokens=256, prefill_chunk=64)
    requests = [e.submit(SYSTEM, SHORT) for _ in range(3)]
    e.step()
    assert e.kv.used == 8 and e.counts().waiting == 1
    e.step()
    e.step()
    assert e.kv.used == 3 + 2 and e.counts().waiting == 1, "three blocks for both, and one each"
    e.step()
    assert e.kv.used == 3 + 3 and e.counts().waiting == 0
    run(e, *requests)
    assert e.counts().prompt_tokens == 100 + 4 + 4


def test_the_prompts_time_is_from_its_own_beginning() -> None:
    now = 0.0

    def clock() -> float:
        return now

    e = native_lab().engine(prefill_chunk=32, clock=clock)
    first, second = e.submit(SYSTEM, SHORT), e.submit(SYSTEM, SHORT)
    while not second.token_ids:
        e.step()
        now += 1.0
    run(e, first, second)
    assert (first.begun_s, second.begun_s) == (0.0, 3.0)


# ---- what goes wrong


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_when_the_first_is_cancelled_the_second_goes_on_from_there_and_the_third_waits_for_it(
    lab: Lab, steps: int
) -> None:
    e = lab.engine(prefill_chunk=40)
    first, second, third = (e.submit(SYSTEM, SHORT) for _ in range(3))
    for _ in range(steps):
        e.step()
    e.cancel(first)
    assert lab.answers(e, second, third) == [lab.alone(SYSTEM, SHORT)] * 2
    done = 40 * steps
    assert (second.cached, third.cached) == (done // BLOCK * BLOCK, 96)
    assert e.counts().prompt_tokens == done + (100 - second.cached) + 4


def test_a_scored_prompt_waits_for_nobody_and_nobody_for_it(lab: Lab) -> None:
    """It has a few tokens a step; what it has left so far is taken."""
    score = dataclasses.replace(SHORT, prompt_logprobs=0)
    e = lab.engine(max_batch=4, prefill_chunk=64)
    scored, plain, late = (e.submit(SYSTEM, p) for p in (score, SHORT, SHORT))
    other = e.submit(SYSTEM, score)
    e.step()
    assert scored.computed == 1 and plain.computed == 63 and late.computed == 0
    run(e, scored, plain, late, other)
    assert (scored.cached, plain.cached, late.cached, other.cached) == (0, 0, 96, 0)
    assert lab.answer(plain) == lab.answer(late) == lab.alone(SYSTEM, SHORT)
    assert len(scored.prompt_logprobs) == 99 and scored.prompt_logprobs == other.prompt_logprobs


def test_an_error_of_the_disk_ends_the_first_alone(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    e = lab.engine(prefill_chunk=40)
    first, second, third = (e.submit(SYSTEM, SHORT) for _ in range(3))
    e.step()
    real = decoder.forward

    def forward(model: Any, kv: Any, batch: Batch, *args: Any, **more: Any) -> Any:
        if first.error is None and first.table.held[0].blocks[0] in batch.block_table[:, 0]:
            raise IOFailure("the disk is gone")
        return real(model, kv, batch, *args, **more)

    monkeypatch.setattr(engine_module, "forward", forward)
    assert lab.answers(e, second, third) == [lab.alone(SYSTEM, SHORT)] * 2
    assert isinstance(first.error, IOFailure) and second.error is third.error is None
    assert (second.cached, third.cached) == (32, 96)


def test_a_step_that_is_given_up_costs_only_itself(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    e = lab.engine(prefill_chunk=64)
    requests = [e.submit(SYSTEM, SHORT) for _ in range(3)]
    real, calls = decoder.forward, 0

    def forward(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise KeyboardInterrupt
        return real(*args, **more)

    monkeypatch.setattr(engine_module, "forward", forward)
    while any(r.finish_reason is None for r in requests):
        try:
            e.step()
        except KeyboardInterrupt:
            e.check_integrity()
    monkeypatch.setattr(engine_module, "forward", real)
    assert [lab.answer(r) for r in requests] == [lab.alone(SYSTEM, SHORT)] * 3
    assert e.counts().prompt_tokens == 100 + 4 + 4 and e.counts().cached_tokens == 96 * 2


# ---- any history


def a_prompt(rng: random.Random, tree: list[list[int]]) -> list[int]:
    """A node of a tree, cut anywhere, or one more node."""
    ids = list(rng.choice(tree))
    if rng.random() < 0.3:
        ids = ids[: rng.randrange(1, len(ids) + 1)]
    if rng.random() < 0.5:
        ids = (ids + prompt(rng.randrange(1 << 30), rng.randrange(1, 90)))[:200]
        tree.append(ids)
    return ids


@pytest.mark.parametrize("seed", range(24))
def test_no_history_computes_more_than_it_must_or_changes_an_answer(lab: Lab, seed: int) -> None:
    rng = random.Random(seed)
    spec = rng.choice(list(SPECS.values()))
    e = lab.engine(
        spec, max_batch=rng.choice([2, 4, 8]), prefill_chunk=rng.choice([5, 32, 50, 256]), kv_tokens=8192
    )
    aborts = 0.05 * (seed % 2)
    tree, requests = [prompt(seed, 150)], list[Request]()
    prompts = [a_prompt(rng, tree) for _ in range(24)]
    for ids in prompts:
        requests.append(e.submit(ids, dataclasses.replace(SHORT, max_tokens=rng.randrange(1, 12))))
        while rng.random() < 0.5:
            e.step()
            e.check_integrity()
            if rng.random() < aborts and e.running:
                e.cancel(rng.choice(e.running))
    run(e, *requests)
    gone = [r for r in requests if r.finish_reason == "cancelled"]
    for request, ids in zip(requests, prompts, strict=True):
        if request not in gone:
            assert lab.answer(request) == lab.alone(ids, request.params, spec=spec)
    wasted = (BLOCK - 1) * len(gone)  # of each, the tokens of a block that it had begun
    assert e.counts().prompt_tokens <= least(prompts) + wasted
    if not gone:
        assert e.counts().prompt_tokens == least(prompts)


@pytest.mark.parametrize("seed", range(12))
def test_in_little_memory_too_nothing_leaks_and_everybody_answers_as_alone(lab: Lab, seed: int) -> None:
    rng = random.Random(seed)
    spec = rng.choice(list(SPECS.values()))
    e = lab.engine(
        spec, max_batch=4, prefill_chunk=rng.choice([16, 50]), kv_tokens=rng.choice([256, 352, 480])
    )
    tree = [prompt(seed, 150)]
    prompts = [a_prompt(rng, tree) for _ in range(16)]
    requests = [e.submit(p, SHORT) for p in prompts]
    assert lab.answers(e, *requests) == [lab.alone(p, SHORT, spec=spec) for p in prompts]


@pytest.mark.parametrize("window", [None, 5])
def test_looking_again_takes_what_is_there_and_always_has_room(window: int | None) -> None:
    """Pools that are full: what a table gives back is enough for what it takes."""
    rng = random.Random(3)
    kv = KVCache(dataclasses.replace(SPEC, sliding_window=window), 16, block=2, chunk=3)
    tables: list[tuple[BlockTable, list[int]]] = []
    found = 0
    for _ in range(3000):
        ids = [rng.randrange(2) for _ in range(rng.randrange(1, 16))]
        table = kv.open(ids)
        if kv.grow(table, len(ids)):
            tables.append((table, ids))
        else:
            kv.close(table)
            old, ids = tables.pop(rng.randrange(len(tables)))
            if rng.random() < 0.7:
                before = old.sealed
                kv.look_again(old, ids, len(ids))
                assert old.sealed >= before
                found += old.sealed > before
                at = old.sealed * 2
                while at < len(ids):
                    at = min(len(ids), at + 3)
                    kv.tables([old], [at])
                    kv.seal(old, ids, at)
                    kv.check_integrity()
            kv.close(old)
        kv.check_integrity()
    assert found > 50
    for table, _ in tables:
        kv.close(table)
    assert kv.used == 0


# ---- through the library


def test_best_of_computes_its_prompt_once() -> None:
    text = "Once upon a time there was a little girl who had a red ball. " * 8
    with LLM(context=256, gpu="off") as llm:
        n = len(llm.tokenizer.encode(text, parse_special=True))
        llm.best_of(4, text, SamplingParams(max_tokens=3, seed=1))
        counts = llm.engine.counts()
    assert n > 100 and counts.prompt_tokens == n + 3 * ((n - 1) % BLOCK + 1)
