"""What an engine answers to some prompts, to compare where its weights lie."""

from __future__ import annotations

from typing import Any

from thermocline import SamplingParams
from thermocline.engine.engine import Engine
from thermocline.pack.stored_model import StoredModel
from thermocline.plan.memory import GIB
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session

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


def chats_kept(model: StoredModel, asked: EngineOptions) -> int:
    """Return how many full contexts of keys and values a session has, some of whose weights are on disk.

    The budget is kept, and of several contexts an eighth of it holds them.
    """
    assert asked.ram is not None and asked.context is not None
    with Session.open(model, asked) as session:
        chats, rest = divmod(session.placement.kv_tokens, asked.context)
        assert rest == 0 and session.from_disk and session.memory_bytes <= asked.ram * GIB
        assert chats == 1 or session.placement.bytes["cpu"]["keys and values"] <= asked.ram * GIB / 8
        return chats
