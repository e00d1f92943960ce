"""Clients' grammars are tried out in turns; what needs no trial waits behind nobody's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import pytest

from thermocline.errors import UsageError
from thermocline.server.api import trials
from thermocline.server.api.trials import Trials
from thermocline.server.http.refusal import Refusal
from thermocline.text import grammar_matcher
from thermocline.text.confined_process import ConfinedProcess, ProcessEnded
from thermocline.text.grammar import Grammar, Thought


@dataclass
class Bench:
    """Trials that take as long as a test wants. `begun`: in order. No trial ends before `go` is set."""

    begun: list[str] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)

    def tried(self, g: Grammar, path: str) -> str:
        self.begun.append(g.text)
        assert self.go.wait(20)
        why = "it is bad" if "bad" in g.text else ""
        grammar_matcher._verdicts.put(g, why)
        return why


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench()
    monkeypatch.setattr(grammar_matcher, "_verdicts", grammar_matcher._Verdicts())
    monkeypatch.setattr(grammar_matcher, "_tried", made.tried)
    monkeypatch.setattr(trials, "AT_ONCE", 1)
    yield made
    made.go.set()


Ask = Callable[[str, str], "asyncio.Task[None]"]


def run(most: int, story: Callable[[Trials, Ask], Awaitable[None]]) -> None:
    async def main() -> None:
        made = Trials(most)

        def ask(text: str, client: str) -> asyncio.Task[None]:
            return asyncio.create_task(made.check(Grammar.regex(text), client))

        await story(made, ask)

    asyncio.run(main())


async def settled() -> None:
    """Every task has gone as far as it can without a thread's help."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_tried_grammars_and_any_json_object_do_not_wait(bench: Bench) -> None:
    """JSON mode waited in a line of strangers' grammars, a second each: its median went from 0.9 to 53 s."""

    async def story(made: Trials, ask: Ask) -> None:
        grammar_matcher._verdicts.put(Grammar.regex("known"), "")
        hostile = [ask(f"slow {i}", "h") for i in range(9)]
        await settled()
        thought = Grammar.answer(Thought("<think>", "</think>", begun=False), None, {"type": "object"})
        mode = [asyncio.create_task(made.check(g, "h")) for g in (Grammar.json_object(), thought)]
        known = ask("known", "h")
        await settled()
        assert all(task.done() and task.exception() is None for task in [*mode, known])
        assert len(bench.begun) <= 1 and not any(task.done() for task in hostile)
        bench.go.set()
        await asyncio.gather(*hostile)

    run(16, story)


def test_clients_take_turns(bench: Bench) -> None:
    async def story(made: Trials, ask: Ask) -> None:
        greedy = [ask(f"a{i}", "a") for i in range(5)]
        await settled()
        others = [ask("b0", "b"), ask("c0", "c"), ask("b1", "b")]
        await settled()
        bench.go.set()
        await asyncio.gather(*greedy, *others)
        assert bench.begun == ["a0", "a1", "b0", "c0", "a2", "b1", "a3", "a4"]

    run(16, story)


def test_one_client_cannot_take_all_the_places(bench: Bench) -> None:
    """A later client displaces the last trial of the client with the most, up to a fair part."""

    async def story(made: Trials, ask: Ask) -> None:
        greedy = [ask(f"a{i}", "a") for i in range(5)]  # one runs, four wait
        late = ask("a5", "a")
        fair = [ask("b0", "b"), ask("b1", "b")]
        beyond = ask("b2", "b")
        await settled()
        for lost in (late, greedy[4], greedy[3], beyond):
            error = lost.exception()
            assert isinstance(error, Refusal)
            assert (error.status, error.error["code"], error.headers["retry-after"]) == (
                503,
                "queue_full",
                "1",
            )
        bench.go.set()
        await asyncio.gather(*greedy[:3], *fair)

    run(4, story)


def test_a_grammar_is_tried_once_however_many_ask(bench: Bench) -> None:
    """64 clients that begin with the same new schema are no crowd. What was refused stays so."""

    async def story(made: Trials, ask: Ask) -> None:
        tasks = [ask("bad", f"client {i}") for i in range(64)]
        await settled()
        bench.go.set()
        errors = await asyncio.gather(*tasks, ask("bad", "late"), return_exceptions=True)
        assert {type(e) for e in errors} == {UsageError}
        with pytest.raises(UsageError, match="it is bad"):
            await ask("bad", "later")
        assert bench.begun == ["bad"]

    run(4, story)


def test_a_grammar_that_nobody_waits_for_is_not_tried(bench: Bench) -> None:
    async def story(made: Trials, ask: Ask) -> None:
        first, left, kept, shared = (ask(text, "a") for text in ("first", "left", "kept", "shared"))
        also = ask("shared", "b")
        await settled()
        for gone in (left, shared):
            gone.cancel()
        await settled()
        bench.go.set()
        await asyncio.gather(first, kept, also)
        assert bench.begun == ["first", "kept", "shared"]
        assert not made._asked and not made._waiting and not made._running

    run(4, story)


def test_a_verdict_is_remembered_but_for_one_by_the_clock_or_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad grammar cost a second of a processor each time that it was sent."""
    monkeypatch.setattr(grammar_matcher, "_verdicts", grammar_matcher._Verdicts())
    begun: list[str] = []
    real = ConfinedProcess.ask

    def counted(self: ConfinedProcess, request: bytes, wait_s: float) -> bytes:
        begun.append(request.decode())
        if b"killed" in request:
            raise ProcessEnded("takes too long", killed=True)
        return real(self, request, wait_s)

    monkeypatch.setattr(ConfinedProcess, "ask", counted)
    for _ in range(3):
        grammar_matcher.check(Grammar.json_object())
        grammar_matcher.check(Grammar.regex("fine"))
        for text in ("(?=a)b", "killed"):
            with pytest.raises(UsageError):
                grammar_matcher.check(Grammar.regex(text))
    assert begun == ["regex\nfine", "regex\n(?=a)b", *["regex\nkilled"] * 3]
