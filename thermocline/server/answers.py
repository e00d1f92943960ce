"""The bodies of answers: OpenAI's objects with llama.cpp's `timings`. Must not know HTTP or the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from thermocline.engine import Chunk, Figures
from thermocline.sampler import TokenLogprobs
from thermocline.server.messages import Ended
from thermocline.tokenizer import Tokenizer


@dataclass
class Answer:
    """One choice, as it grows."""

    text: list[str] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    ended: Ended | None = None

    @property
    def whole(self) -> str:
        return "".join(self.text)

    def add(self, chunk: Chunk) -> None:
        self.text.append(chunk.text)
        if chunk.logprobs is not None:
            self.chunks.append(chunk)


@dataclass(frozen=True)
class Head:
    """What all objects of one answer have in common."""

    id: str
    created: int
    model: str

    @staticmethod
    def of(kind: str, number: str, model: str) -> Head:
        return Head(f"{kind}-{number}", int(time.time()), model)

    def object(self, name: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id, "object": name, "created": self.created, "model": self.model,
            "system_fingerprint": None, "choices": list(choices)
        }  # fmt: skip


def usage(found: Sequence[Answer], n: int) -> dict[str, Any]:
    """Of all answers, n of them to each prompt."""
    figures = [a.ended.figures for a in found if a.ended is not None]
    prompt = sum(f.prompt_tokens for f in figures[::n])
    made = sum(f.tokens for f in figures)
    cached = sum(f.cached_tokens for f in figures[::n])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def timings(f: Figures) -> dict[str, Any]:
    """llama.cpp's, of one answer; null where there is nothing to measure."""
    computed = f.prompt_tokens - f.cached_tokens
    prompt_ms = _ms(computed, f.prompt_tokens_per_s)
    decoded = max(0, f.tokens - 1)
    decode_ms = _ms(decoded, f.tokens_per_s)
    return {
        "cache_n": f.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _each(prompt_ms, computed),
        "prompt_per_second": f.prompt_tokens_per_s,
        "predicted_n": f.tokens,
        "predicted_ms": decode_ms,
        "predicted_per_token_ms": _each(decode_ms, decoded),
        "predicted_per_second": f.tokens_per_s,
    }


def _ms(count: int, per_s: float | None) -> float | None:
    return None if not per_s else 1e3 * count / per_s


def _each(ms: float | None, count: int) -> float | None:
    return None if ms is None or not count else ms / count


# ---- log probabilities


def spelling(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    data = tokenizer.token_bytes(token) or tokenizer.name(token).encode()
    return {"token": data.decode("utf-8", "replace"), "bytes": list(data)}


def chat_logprobs(tokenizer: Tokenizer, chunks: Sequence[Chunk]) -> dict[str, Any]:
    def one(token: int, found: TokenLogprobs) -> dict[str, Any]:
        top = [spelling(tokenizer, i) | {"logprob": p} for i, p in found.top]
        return spelling(tokenizer, token) | {"logprob": found.logprob, "top_logprobs": top}

    content = [one(c.token_id, c.logprobs) for c in chunks if c.logprobs is not None]
    return {"content": content, "refusal": None}


def text_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[tuple[int, TokenLogprobs | None]], offset: int = 0
) -> dict[str, Any]:
    """/v1/completions'. `tokens`: with what is known of each: nothing of a prompt's first one."""
    texts = [spelling(tokenizer, i)["token"] for i, _ in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    top = [None if x is None else {spelling(tokenizer, i)["token"]: p for i, p in x.top} for _, x in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [None if x is None else x.logprob for _, x in tokens],
        "top_logprobs": top,
        "text_offset": offsets,
    }
