"""A prompt's own probabilities (`echo`): those of `eval`, one row of logits for each request at a time."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from test_engine import PROMPTS, REFERENCE, engine, native_lab, prompt, run
from toy import GREEDY, SPEC, WEIGHTS, embedding

from thermocline import LLM, SamplingParams, UsageError
from thermocline.engine import decoder
from thermocline.engine import engine as engine_module
from thermocline.engine.engine import Engine
from thermocline.engine.request import Request
from thermocline.errors import NumericalError
from thermocline.offline import evaluate
from thermocline.offline.evaluate import Reader
from thermocline.ops.interface import Batch

SCORE = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=2)
TEXT = "Once upon a time there was a little girl who had a red ball, and she liked to play in the garden."


def scored(e: Engine, ids: list[int], params: SamplingParams = SCORE) -> Request:
    request = e.submit(ids, params)
    run(e, request)
    return request


def test_a_prompts_probabilities_are_those_of_eval() -> None:
    with LLM(context=256, gpu="off") as llm:
        done = llm.generate(TEXT, SCORE)
        e = llm._open()
        ids = np.array([llm.tokenizer.encode(TEXT)], np.int32)
        reader = Reader(e.model, e.ops, context=ids.shape[1])
        expected = evaluate.nll(reader.read(ids, 0, ids.shape[1] - 1)[0], ids[0, 1:])
    assert done.finish_reason == "length" and done.token_ids == [] and done.text == ""
    assert done.prompt_logprobs is not None
    own = [-t.logprob for t in done.prompt_logprobs]
    assert np.allclose(own, expected, rtol=1e-12, atol=0) and 20 < sum(own) < 200


@pytest.mark.parametrize("max_batch", [1, 3, 8])
@pytest.mark.parametrize("chunk", [5, 256])
def test_they_are_the_same_in_any_company_and_chunks(max_batch: int, chunk: int) -> None:
    lab = native_lab()
    ids = PROMPTS[-1]
    alone = scored(lab.engine(max_batch=8, prefill_chunk=64), ids).prompt_logprobs
    e = lab.engine(max_batch=max_batch, prefill_chunk=chunk)
    others = [e.submit(p, GREEDY) for p in PROMPTS[:4]]
    mine = e.submit(ids, SCORE)
    assert lab.answers(e, *others) == [lab.alone(p) for p in PROMPTS[:4]]
    assert mine.prompt_logprobs == alone and len(alone) == len(ids) - 1
    for report, token in zip(alone, ids[1:], strict=True):
        top = dict(report.top)
        assert len(top) == 2 and top.get(token, report.logprob) == report.logprob <= report.top[0][1] < 0


def test_a_cached_prefix_is_not_taken_and_is_left_for_others() -> None:
    e = engine()
    first = scored(e, PROMPTS[-1])
    again = scored(e, PROMPTS[-1])
    assert first.cached == again.cached == 0 and again.prompt_logprobs == first.prompt_logprobs
    plain = e.submit(PROMPTS[-1], GREEDY)
    assert REFERENCE.answers(e, plain) == [REFERENCE.alone(PROMPTS[-1])] and plain.cached == 96


def test_an_answer_follows_with_its_own_probabilities() -> None:
    params = dataclasses.replace(GREEDY, prompt_logprobs=0, logprobs=1, max_tokens=5)
    request = scored(engine(), PROMPTS[3], params)
    assert request.token_ids == REFERENCE.alone(PROMPTS[3])[0][:5]
    done = request.completion()
    assert done.prompt_logprobs is not None and len(done.prompt_logprobs) == len(PROMPTS[3]) - 1
    assert done.logprobs is not None and len(done.logprobs) == 5
    assert all(t.top == () for t in done.prompt_logprobs) and done.figures.tokens == 5


@pytest.mark.parametrize(("running", "most"), [(0, 4), (2, 4)])
def test_a_step_never_has_more_logits_than_requests_fit(
    running: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """memory.py and a GPU's buffers count `max_batch` rows; others' chunks stay as long as they were."""
    # By a clock that stands still a prompt's chunk beside answers is the shortest, on a busy machine too.
    e = engine(max_batch=4, prefill_chunk=64, clock=lambda: 0.0)
    rows, tokens = list[int](), list[int]()
    real = decoder.forward

    def forward(model: Any, kv: Any, batch: Batch, *args: Any, **more: Any) -> Any:
        rows.append(len(batch.logit_rows))
        tokens.append(len(batch.ids))
        return real(model, kv, batch, *args, **more)

    monkeypatch.setattr(engine_module, "forward", forward)
    mine = [e.submit(prompt(9, 30), SCORE) for _ in range(2)]
    others = [e.submit(prompt(i, 200), GREEDY) for i in range(running)]
    run(e, *mine, *others)
    assert max(rows) == most
    assert max(tokens) == (64 if running else 4)


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    request = scored(engine(), [5])
    assert request.completion().prompt_logprobs == [] and request.finish_reason == "length"


def test_no_tokens_at_all_reads_the_prompt_and_leaves_it_in_the_cache() -> None:
    e = engine()
    request = scored(e, PROMPTS[-1], SamplingParams(max_tokens=0))
    done = request.completion()
    assert (done.finish_reason, done.token_ids, done.text, list(request.chunks)) == ("length", [], "", [])
    assert done.prompt_logprobs is None and done.figures.prompt_tokens_per_s
    assert done.figures.first_token_s is None
    plain = e.submit(PROMPTS[-1], GREEDY)
    assert REFERENCE.answers(e, plain) == [REFERENCE.alone(PROMPTS[-1])] and plain.cached == 96


def test_a_full_context_can_be_scored() -> None:
    request = scored(engine(), prompt(0, 256))
    assert request.finish_reason == "length" and len(request.prompt_logprobs) == 255


def test_it_has_room_for_all_of_its_prompt_when_others_take_the_rest() -> None:
    e = engine(context=64, kv_tokens=64, max_batch=4)
    mine = e.submit(prompt(0, 33), SCORE)
    other = e.submit(prompt(1, 10), SamplingParams(temperature=0, max_tokens=22, ignore_eos=True))
    run(e, mine, other)
    assert len(mine.prompt_logprobs) == 32 and other.error is None


def test_damaged_weights_fail_the_scored_request_alone() -> None:
    e, embed = engine(), embedding(WEIGHTS).copy()
    embed[7] = np.nan
    e.model = dataclasses.replace(e.model, weights=dataclasses.replace(WEIGHTS, embed=embed))
    bad, good = e.submit([5, 7, 3, 4], SCORE), e.submit([5, 3, 4], SCORE)
    run(e, bad, good)
    assert isinstance(bad.error, NumericalError) and bad.finish_reason == "cancelled"
    assert good.error is None and len(good.prompt_logprobs) == 2 and e.kv.used == 0


def test_one_that_is_cancelled_keeps_what_it_has() -> None:
    e = engine(max_batch=2)
    request = e.submit(PROMPTS[-1], SCORE)
    e.step()
    e.cancel(request)
    done = request.completion()
    assert done.finish_reason == "cancelled" and done.prompt_logprobs is not None
    assert len(done.prompt_logprobs) == 2 and e.kv.used == 0


def test_the_number_of_alternatives_is_checked() -> None:
    with pytest.raises(UsageError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=-1)
    report = scored(engine(), [3, 4], dataclasses.replace(SCORE, prompt_logprobs=10**6)).prompt_logprobs[0]
    assert len(report.top) == SPEC.vocab_size
    assert sum(math.exp(p) for _, p in report.top) == pytest.approx(1)
