"""What an engine answers to some prompts, to compare where its weights lie."""

from __future__ import annotations

from typing import Any

from thermocline import SamplingParams
from thermocline.engine.engine import Engine

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def prompts(vocab: int) -> list[list[int]]:
    """A prompt of many tokens, more than the slots of experts; a beginning of it; others."""
    long = [(7 * i + i * i) % vocab for i in range(40)]
    return [long, [*long[:35], 1, 2, 3], [5, 6, 7], [vocab - 1]]


def answers_of(engine: Engine, vocab: int) -> list[Any]:
    """One by one, with what is known of their beginnings; then all together."""
    found: list[Any] = []
    each = prompts(vocab)
    for some in [*([p] for p in each), each]:
        requests = [engine.submit(p, GREEDY) for p in some]
        while engine.step():
            pass
        done = [r.completion() for r in requests]
        found += [(c.token_ids, c.figures.logits_hash) for c in done]
    return found
