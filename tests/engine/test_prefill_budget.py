"""Fair prompts: a long one keeps nobody waiting for more than five decode steps, and changes no answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from test_engine import PROMPTS, REFERENCE, native_lab, prompt, run
from toy import GREEDY, SPEC

from thermocline.engine import decoder
from thermocline.engine import engine as engine_module
from thermocline.engine.engine import Engine
from thermocline.engine.prefill_budget import LEAST, PrefillBudget
from thermocline.engine.request import Request
from thermocline.engine.sampler import SamplingParams
from thermocline.ops.interface import Batch

LONG = dataclasses.replace(SPEC, max_context=4096)
TALK = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)

Cost = Callable[[int, bool], float]  # seconds of a step of so many tokens; of a prompt?


def costs(step_s: float, fixed_s: float, token_s: float) -> Cost:
    return lambda tokens, prompt: fixed_s + token_s * tokens if prompt else step_s


class Machine:
    """An engine whose steps take what they are said to take, by a clock of its own."""

    def __init__(self, cost: Cost, patch: pytest.MonkeyPatch, **options: Any) -> None:
        self.now, self.cost, self.chunks = 0.0, cost, list[int]()
        self.engine = REFERENCE.engine(LONG, context=1024, clock=lambda: self.now, **options)
        real = decoder.forward

        def forward(model: Any, kv: Any, batch: Batch, ops: Any, **more: Any) -> Any:
            of_prompts = len(batch.ids) > len(set(batch.sequence.tolist())) or self.prompted(batch)
            self.now += self.cost(len(batch.ids), of_prompts)
            if of_prompts:
                self.chunks.append(len(batch.ids))
            return real(model, kv, batch, ops, **more)

        patch.setattr(engine_module, "forward", forward)

    def prompted(self, batch: Batch) -> bool:
        lengths = {r.n_prompt for r in self.engine.running}
        return bool(batch.positions[0] < min(lengths))

    def talking(self, n: int = 2) -> list[Request]:
        """Answers that go on and on."""
        found = [self.engine.submit([5, 6 + i], TALK) for i in range(n)]
        for _ in range(4):
            self.engine.step()
        return found

    def gaps(self, until: Request) -> list[float]:
        """Between two tokens of an answer, while that prompt is computed."""
        out = []
        while until.computed < until.n_prompt:
            before = self.now
            self.engine.step()
            out.append(self.now - before)
        return out


MACHINES = {
    "memory bound, dense": costs(0.086, 0.086, 0.012),
    "fast prompts": costs(0.010, 0.010, 0.0001),
    "sparse answers, dense prompts": costs(0.038, 0.080, 0.012),
    "no cost but tokens": costs(0.020, 0.0, 0.010),
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_long_prompt_keeps_the_gap_below_five_decode_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = Machine(MACHINES[name], monkeypatch)
    m.talking()
    long = m.engine.submit(prompt(3, 900), GREEDY)
    gaps = m.gaps(long)
    assert max(gaps) <= 5 * m.cost(1, False)
    ideal = max(LEAST, 2 * m.cost(1, False) / m.cost(1, True))  # tokens that two thirds of the share would do
    assert len(gaps) <= 900 / min(256, ideal) * 2 + 12, "no shorter than it must be"


def test_even_where_no_chunk_is_short_enough_a_prompt_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    m = Machine(costs(0.001, 1.0, 0.1), monkeypatch)
    m.talking()
    m.gaps(m.engine.submit(prompt(3, 50), GREEDY))
    assert set(m.chunks[-12:]) <= {LEAST, 50 % LEAST}


def test_without_answers_a_chunk_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    m = Machine(MACHINES["memory bound, dense"], monkeypatch)
    m.gaps(m.engine.submit(prompt(3, 700), GREEDY))
    assert m.chunks == [256, 256, 188]


def test_a_chunk_is_whole_again_when_the_last_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    m = Machine(MACHINES["memory bound, dense"], monkeypatch)
    talking = m.talking()
    long = m.engine.submit(prompt(3, 900), GREEDY)
    m.engine.step()
    for request in talking:
        m.engine.cancel(request)
    m.gaps(long)
    assert m.chunks[-5:] == [LEAST, 256, 256, 256, 128]


def test_a_hiccup_makes_no_long_chunk() -> None:
    pace = PrefillBudget()
    for seconds in (0.1, 0.1, 9.0):
        pace.answered(seconds)
    pace.prompted(0.01, 1)
    assert pace.chunk(256) <= 3 * 0.13 / 0.01


def test_caches_that_a_chunk_left_cold_do_not_make_the_next_one_longer() -> None:
    """Measured on the bundled model: beside chunks answers take 1.4 times as long, the gap grew to 6.7."""
    pace = PrefillBudget()
    pace.answered(1.0)
    for _ in range(20):
        pace.prompted(0.1, 1)
        pace.answered(1.4)
    assert pace.chunk(256) == 28, "three steps of 1.0 s"
    for _ in range(20):
        pace.answered(1.4)
    assert pace.chunk(256) == 40, "steps without prompts have become longer"


def test_the_first_chunk_beside_answers_is_short_whatever_was_measured_without() -> None:
    pace = PrefillBudget()
    assert pace.chunk(256) == LEAST
    pace.answered(1.0)
    assert pace.chunk(256) == LEAST and pace.chunk(2) == 2 and pace.chunk(0) == 0


# ---- no answer depends on it


class Forced(PrefillBudget):
    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens

    def chunk(self, most: int) -> int:
        return min(most, self._tokens)


@pytest.mark.parametrize("chunk", [1, 3, 17, 256])
def test_answers_are_bit_for_bit_those_without_company_whatever_the_chunks(chunk: int) -> None:
    lab = native_lab()
    alone = [lab.alone(p) for p in PROMPTS]
    e = lab.engine(max_batch=len(PROMPTS))
    e.pace = Forced(chunk)
    requests = _one_by_one(e)
    run(e, *requests)
    assert [lab.answer(r) for r in requests] == alone


def _one_by_one(e: Engine) -> list[Request]:
    """The shortest answers already while the longest prompt comes."""
    requests = []
    for p in PROMPTS:
        requests.append(e.submit(p, GREEDY))
        e.step()
    return requests
