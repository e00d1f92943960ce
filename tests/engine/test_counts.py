"""What a server asks of the engine at any moment: how full it is, and that what leaves frees its place."""

from __future__ import annotations

import dataclasses

from test_engine import PROMPTS, engine, prompt, run
from toy import GREEDY

from thermocline.engine.engine import Counts
from thermocline.engine.kv_cache import BLOCK
from thermocline.engine.sampler import SamplingParams


def test_counts_say_who_runs_who_waits_and_what_was_computed() -> None:
    e = engine(max_batch=2, context=128, kv_tokens=256)
    assert e.counts() == Counts(0, 2, 0, 8, 8, 0, 0, 0, 0)
    few = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    requests = [e.submit(p, few) for p in (PROMPTS[3], PROMPTS[3], PROMPTS[0])]
    e.step()
    now = e.counts()
    assert (now.running, now.slots, now.waiting) == (2, 2, 1)
    assert now.kv_free + now.kv_cached + e.kv.used == now.kv_blocks == 8
    run(e, *requests)
    done = e.counts()
    assert (done.running, done.waiting, done.tokens) == (0, 0, 12)
    assert done.prompt_tokens + done.cached_tokens == 32 + 32 + 1
    assert done.kv_cached == 1 and done.kv_free == 7, "a prompt's whole block stays to be found"
    again = e.submit([*PROMPTS[3], 1], few)
    run(e, again)
    assert e.counts().cached_tokens == again.cached == BLOCK


def test_a_request_cancelled_amid_its_prompt_frees_keys_and_values_at_once() -> None:
    e = engine(prefill_chunk=40, context=256, kv_tokens=256)
    request = e.submit(prompt(0, 200), dataclasses.replace(GREEDY, max_tokens=50))
    waiting = e.submit(prompt(1, 200), GREEDY)
    e.step()
    assert e.kv.used == 8 and e.counts().waiting == 1
    e.cancel(request)
    now = e.counts()
    assert e.kv.used == 0 and now.kv_free + now.kv_cached == 8 and now.running == 0
    e.step()
    assert e.counts().running == 1 and waiting.computed == 40, "its place is the next one's"
    run(e, waiting)


def test_a_stop_string_frees_the_rest_of_its_answer_at_once() -> None:
    e = engine()
    free = e.submit(PROMPTS[1], GREEDY)
    run(e, free)
    stop = free.completion().text[3:5]
    request = e.submit(PROMPTS[1], dataclasses.replace(GREEDY, stop=(stop,)))
    while request.finish_reason is None:
        e.step()
    assert request.finish_reason == "stop" and e.kv.used == 0 and e.counts().running == 0
