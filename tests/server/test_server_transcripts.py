"""Agents' sessions replayed: a turn computes only what is new, and answers as without a cache, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny
from agent_shapes import sent_events
from agent_transcripts import TURNS, claude_code, codex
from serving import Served, served

from thermocline.engine.kv_cache import BLOCK

# Each message is written with its thought, its text and its calls, and what comes next begins a line.
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ANSWER = 8  # tokens of each answer


@dataclass(frozen=True)
class Turn:
    prompt: int
    cached: int
    answer: list[Any]  # what the client gets, without ids

    @property
    def computed(self) -> int:
        return self.prompt - self.cached


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.hf_directory(tmp_path_factory.mktemp("model") / "tiny")


def serving(model: Path, context: int) -> Any:
    """One slot, so that a prompt that fills the context leaves no block of another in the cache."""
    return served(model=str(model), name="tiny", chat_template=TEMPLATE, context=context, max_batch=1)


def of_responses(server: Served, body: dict[str, Any]) -> Turn:
    asked = body | {"temperature": 0, "max_output_tokens": ANSWER}
    with server.client() as c:
        *_, last = sent_events(c.post("/v1/responses", json=asked).text)
    made = last["response"]
    answer = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in made["output"]]
    used = made["usage"]
    return Turn(used["input_tokens"], used["input_tokens_details"]["cached_tokens"], answer)


def of_messages(server: Served, body: dict[str, Any]) -> Turn:
    with server.client() as c:
        got = c.post("/v1/messages", json=body | {"temperature": 0, "max_tokens": ANSWER})
    events = list(sent_events(got.text))
    answer = [e for e in events if e["type"].startswith("content_block")]
    used = next(e["usage"] for e in events if e["type"] == "message_delta")
    return Turn(
        used["input_tokens"] + used["cache_read_input_tokens"], used["cache_read_input_tokens"], answer
    )


Replay = tuple[Callable[[int, int], Iterator[dict[str, Any]]], Callable[[Served, dict[str, Any]], Turn]]
CODEX: Replay = (codex, of_responses)
CLAUDE_CODE: Replay = (claude_code, of_messages)


@pytest.mark.parametrize(("agent", "asked"), [CODEX, CLAUDE_CODE], ids=["codex", "claude code"])
@pytest.mark.parametrize(
    ("turns", "system", "result", "context"),
    [(8, 300, 40, 3072), pytest.param(TURNS, 11000, 1100, 24576, marks=pytest.mark.slow)],
    ids=["short", "20,000 tokens"],
)
def test_each_turn_computes_only_what_is_new(
    model: Path, agent: Any, asked: Any, turns: int, system: int, result: int, context: int
) -> None:
    bodies = list(agent(system, result))[:turns]
    with serving(model, context) as server:
        found = [asked(server, body) for body in bodies]
        uncached = {}
        for i in range(1, turns, 6):
            with server.client() as c:  # whatever the cache held is gone
                fill = {"prompt": [65 + i] * (context - 1), "max_tokens": 1}
                assert c.post("/v1/completions", json=fill).status_code == 200
            uncached[i] = asked(server, bodies[i])
    assert len(found) == turns and found[0].cached == 0 and found[-1].prompt > 1.8 * system
    for before, turn in pairwise(found):  # the prompt of a turn is the beginning of the next one's
        new = turn.prompt - before.prompt
        assert 0 < new <= turn.computed < new + BLOCK, (before, turn)
    for i, turn in uncached.items():
        assert (turn.cached, turn.prompt) == (0, found[i].prompt)
        assert turn.answer == found[i].answer != [], i
