"""Figures of a running server, taken at its port for `bench/server/serve.py`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

import serve_clients as clients
from serve_clients import Call, Told, ask, gather, insist

from thermocline import LLM, SamplingParams

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
Found = dict[str, Any]
NAMES = ("Tim", "Lily", "Ben", "Anna", "Max", "Sue", "Tom", "Mia")
THINGS = ("red ball", "big dog", "small cat", "blue bird", "magic hat", "toy car", "green frog", "old boat")
OPENINGS = [f"Once upon a time, {name} had a {thing}" for name in NAMES for thing in THINGS]
ENDLESS = {"prompt": OPENINGS[0], "max_tokens": -1, "ignore_eos": True, "stream": True}


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def greedy(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, **more)


# ---- crowd


@contextlib.asynccontextmanager
async def beside(*calls: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """They go on until the block is left; one that fails by itself fails it."""
    tasks = [asyncio.create_task(c) for c in calls]
    try:
        yield
    finally:
        for t in tasks:
            t.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    failures = [e for e in ended if not isinstance(e, asyncio.CancelledError | OSError)]
    assert not failures, failures


def crowd(port: int, llm: LLM, streaming: int, quiet: int, hostile: int, tokens: int = 100) -> Found:
    """Each streaming client asks for a story, two times; the hostile ones are slow in three ways."""
    asked = [{"prompt": p, "temperature": 0, "max_tokens": tokens, "stream": True} for p in OPENINGS]
    want = [c.text for c in llm.generate(OPENINGS[:streaming], greedy(tokens))]
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    body = head + b"Content-Type: application/json\r\nContent-Length: 500\r\n\r\n"
    wide = ENDLESS | {"n": 2, "logprobs": 20}

    async def run() -> list[Told]:
        kinds = (
            lambda: clients.dribble(port, head),
            lambda: clients.dribble(port, body),
            lambda: clients.never_read(port, wide),
        )
        slow = [kinds[i % 3]() for i in range(hostile)]
        async with beside(*(clients.idle(port) for _ in range(quiet)), *slow):
            await asyncio.sleep(1)
            calls = [insist(port, TEXT, a) for a in asked[:streaming] for _ in range(2)]
            return await gather(calls, streaming)

    with clients.polling(port, 50) as seconds:
        got = asyncio.run(run())
    wrong = sum(told.texts[0] != want[i // 2] for i, told in enumerate(got))
    return {"answers": len(got), "wrong": wrong, "polls": len(seconds),
            "health_p50_ms": 1e3 * statistics.median(seconds),
            "health_p99_ms": 1e3 * percentile(seconds, 0.99)}  # fmt: skip


def overload(port: int, seconds: float, room: int) -> Found:
    """As many endless streams as there is room for, whoever ends is replaced; how soon others are told."""

    async def hold() -> None:
        while True:
            await insist(port, TEXT, ENDLESS)

    async def run() -> None:
        async with beside(*(hold() for _ in range(room))):
            await asyncio.sleep(seconds)

    with clients.polling(port, 100, ENDLESS) as refused:
        asyncio.run(run())
    return {"refusals": len(refused), "refused_p50_ms": 1e3 * statistics.median(refused),
            "refused_p99_ms": 1e3 * percentile(refused, 0.99)}  # fmt: skip


# ---- leave


def leave(port: int, count: int, seed: int = 1) -> Found:
    """In rounds of 1 to 16 clients, each of which goes when and how it likes; then until all is free."""
    draw = random.Random(seed)
    seconds: list[float] = []
    while count > 0:
        together = min(count, draw.randint(1, 16))
        count -= together
        calls = [
            clients.leave(
                port,
                TEXT,
                ENDLESS
                | {"prompt": draw.choice(OPENINGS) * draw.choice((1, 20)), "stream": draw.random() < 0.7},
                draw.choice(("fin", "rst", "half")),
                draw.uniform(0, 0.3),
            )
            for _ in range(together)
        ]
        asyncio.run(gather(calls, together))
        seconds.append(clients.until_free(port))
    m = clients.metrics(port)
    return {"rounds": len(seconds), "cancelled": m["requests_cancelled_total"],
            "free_p50_ms": 1e3 * statistics.median(seconds),
            "free_p99_ms": 1e3 * percentile(seconds, 0.99),
            "longest_step_ms": 1e3 * m["longest_step_seconds"]}  # fmt: skip


# ---- mixed


@dataclass(frozen=True)
class Case:
    chat: bool
    prompt: str
    tokens: int
    stop: tuple[str, ...]
    rivals: int | None

    @staticmethod
    def drawn(draw: random.Random) -> Case:
        prompt = draw.choice(OPENINGS)[: draw.randint(8, 60)]
        stop = draw.choice(((), (), (".",), ("cat", "ball")))
        return Case(
            draw.random() < 0.5, prompt, draw.choice((1, 7, 24)), stop, draw.choice((None, None, 0, 3))
        )

    def asked(self, n: int, stream: bool) -> tuple[str, Found]:
        body: Found = {"temperature": 0, "max_tokens": self.tokens, "n": n, "stream": stream}
        body |= {"stop": list(self.stop)} if self.stop else {}
        if not self.chat:
            return TEXT, body | {"prompt": self.prompt, "logprobs": self.rivals}
        rivals = {} if self.rivals is None else {"logprobs": True, "top_logprobs": self.rivals}
        return CHAT, body | {"messages": [{"role": "user", "content": self.prompt}]} | rivals

    def alone(self, llm: LLM) -> tuple[str, list[float], str]:
        params = greedy(self.tokens, stop=self.stop, logprobs=self.rivals)
        if self.chat:
            made = llm.chat([{"role": "user", "content": self.prompt}], params)
        else:
            made = llm.generate(self.prompt, params)
        return made.text, [t.logprob for t in made.logprobs or ()], str(made.finish_reason)


def mixed(port: int, llm: LLM, count: int, seed: int = 1, together: int = 24) -> Found:
    """A fifth of the clients leave; of the others every text, log-probability and reason is compared."""
    draw = random.Random(seed)
    alone: dict[Case, tuple[str, list[float], str]] = {}
    wrong: list[Any] = []
    left = 0

    async def one(case: Case, n: int, stream: bool, after_s: float | None) -> None:
        nonlocal left
        path, body = case.asked(n, stream)
        if after_s is not None:
            left += 1
            return await clients.leave(port, path, body, draw.choice(("fin", "rst")), after_s)
        told = await insist(port, path, body)
        for i in range(n):
            if (told.texts[i], told.scores[i], told.reasons[i]) != alone[case]:
                wrong.append((case, told, alone[case]))

    calls = []
    for _ in range(count):
        case = Case.drawn(draw)
        if case not in alone:
            alone[case] = case.alone(llm)
        after_s = draw.uniform(0, 0.1) if draw.random() < 0.2 else None
        calls.append(one(case, draw.choice((1, 1, 2, 3)), draw.random() < 0.5, after_s))
    asyncio.run(gather(calls, together))
    clients.until_free(port)
    return {"requests": count, "kinds": len(alone), "left": left, "wrong": len(wrong), "first": wrong[:1]}


# ---- tokens a second


def inside(llm: LLM, prompt: str, tokens: int) -> float:
    at = [time.perf_counter() for chunk in llm.stream(prompt, greedy(tokens, ignore_eos=True)) if chunk.text]
    return (tokens - 1) / (at[-1] - at[0])


def streams(port: int, prompts: list[str], tokens: int) -> list[Told]:
    body = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    calls = [ask(port, TEXT, body | {"prompt": p}) for p in prompts]
    return asyncio.run(gather(calls, len(prompts)))


def tax(port: int, llm: LLM, rounds: int, tokens: int, engine: int) -> Found:
    """Ratios of rounds in which each is measured once, the server also with 100 polls of /health a second.

    `engine`: the process that computes. What it takes of the processor for a token is compared as well: of a
    machine that others use, too, that is the steadier figure.
    """
    alone, served, polled, cpu = [], [], [], []
    for _ in range(rounds):
        before = time.process_time()
        alone.append(inside(llm, OPENINGS[0], tokens))
        between = time.process_time() - before
        before = clients.cpu_seconds(engine)
        served.append(streams(port, OPENINGS[:1], tokens)[0].tokens_per_s)
        cpu.append(between / (clients.cpu_seconds(engine) - before))
        with clients.polling(port, 100):
            polled.append(streams(port, OPENINGS[:1], tokens)[0].tokens_per_s)

    def ratio(values: list[float]) -> float:
        return statistics.median(v / a for v, a in zip(values, alone, strict=True))

    return {"inside_tok_s": statistics.median(alone), "served": ratio(served), "polled": ratio(polled),
            "by_processor_time": statistics.median(cpu),
            "inside_spread": [min(alone), max(alone)]}  # fmt: skip


def batch(port: int, rounds: int, tokens: int) -> Found:
    ratios = []
    for _ in range(rounds):
        one = streams(port, OPENINGS[:1], tokens)[0].tokens_per_s
        many = streams(port, OPENINGS[:4], tokens)
        begin, end = max(t.at[0] for t in many), min(t.at[-1] for t in many)  # all four answer
        ratios.append(sum(begin < at <= end for t in many for at in t.at) / (end - begin) / one)
    return {"one_tok_s": one, "four_over_one": statistics.median(ratios), "ratios": ratios}


def processes(apart: int, within: int, rounds: int, tokens: int) -> Found:
    """Ratios of tokens/s: one stream, four, and /health's p99 beside four, in ms."""
    found: dict[str, list[float]] = {"one": [], "four": []}
    health: dict[str, list[float]] = {"apart_health_ms": [], "within_health_ms": []}
    for _ in range(rounds):
        for name, n in (("one", 1), ("four", 4)):
            speeds = []
            for port, waits in zip((apart, within), health.values(), strict=True):
                polling: contextlib.AbstractContextManager[list[float]] = contextlib.nullcontext([])
                if n == 4:
                    polling = clients.polling(port, 20)
                with polling as seconds:
                    many = streams(port, OPENINGS[:n], tokens)
                    speeds.append(sum(t.tokens_per_s for t in many))
                waits += seconds
            found[name].append(speeds[0] / speeds[1])
    return {**{k: statistics.median(v) for k, v in found.items()}, "ratios": found,
            **{k: 1e3 * percentile(v, 0.99) for k, v in health.items()}}  # fmt: skip


def long(port: int, tokens: int, seed: int = 1) -> Found:
    """Gaps between tokens of four streams alone, and while a prompt of the whole context is read."""
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        context = loop.run_until_complete(_json(port, "/props"))["default_generation_settings"]["n_ctx"]
    draw = random.Random(seed)
    ids = [draw.randrange(300, 2000) for _ in range(context - 1)]
    span: list[float] = []

    async def prompt() -> None:
        await asyncio.sleep(0.2)
        begin = time.perf_counter()
        await ask(port, TEXT, {"prompt": ids, "max_tokens": 1, "stream": True})
        span.extend((begin, time.perf_counter()))

    async def beside_it() -> list[Told]:
        body = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        _, *rest = await asyncio.gather(
            prompt(), *(ask(port, TEXT, body | {"prompt": p}) for p in OPENINGS[:4])
        )
        return [told for told in rest if told is not None]

    alone = [g for told in streams(port, OPENINGS[:4], tokens) for g in told.gaps]
    got = asyncio.run(beside_it())
    gaps = [b - a for t in got for a, b in zip(t.at, t.at[1:], strict=False) if b > span[0] and a < span[1]]
    return {"context": context, "prompt_s": span[1] - span[0], "gaps": len(gaps),
            "idle_p50_ms": 1e3 * statistics.median(alone), "idle_p99_ms": 1e3 * percentile(alone, 0.99),
            "beside_p99_ms": 1e3 * percentile(gaps, 0.99),
            "over_idle_p99": percentile(gaps, 0.99) / percentile(alone, 0.99),
            "over_idle_p50": percentile(gaps, 0.99) / statistics.median(alone)}  # fmt: skip


async def _json(port: int, path: str) -> Any:
    async with Call(port, path) as call:
        return json.loads(await call.body())
