"""The bodies of answers: OpenAI's objects with llama.cpp's `timings`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from thermocline import __version__
from thermocline.engine.request import Chunk, Figures
from thermocline.engine.sampler import TokenLogprobs
from thermocline.server.api.parsing.answer_parser import Parts, Piece
from thermocline.server.api.parsing.call_forms import Call
from thermocline.server.http import sse
from thermocline.server.http.refusal import Refusal
from thermocline.server.process.messages import Finished, Token
from thermocline.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Head:
    """Fields that all objects of one answer share."""

    id: str
    created: int
    model: str

    @staticmethod
    def of(kind: str, number: str, model: str) -> Head:
        return Head(f"{kind}{number}", int(time.time()), model)

    def object(self, name: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id, "object": name, "created": self.created, "model": self.model,
            "system_fingerprint": f"thermocline-{__version__}", "choices": list(choices)
        }  # fmt: skip


def usage(ended: Sequence[Finished], n: int) -> dict[str, Any]:
    """Return OpenAI's `usage` of all answers, n to each prompt."""
    figures = [e.figures for e in ended]
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
    """Return llama.cpp's `timings` of one answer; null means nothing was measured."""
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
    data = tokenizer.spelled(token)
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
    """Return `logprobs` of /v1/completions. A prompt's first token has no log probability."""
    texts = [spelling(tokenizer, i)["token"] for i, _ in tokens]
    offsets = []
    for text, (token, _) in zip(texts, tokens, strict=True):
        offsets.append(offset)
        offset += (
            len(text) if tokenizer.token_bytes(token) else 0
        )  # a special token's name is not in the text
    top = [None if x is None else {spelling(tokenizer, i)["token"]: p for i, p in x.top} for _, x in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [None if x is None else x.logprob for _, x in tokens],
        "top_logprobs": top,
        "text_offset": offsets,
    }


# ---- one class for each kind of request


class Answer:
    """The objects that answer one request. Its `count` choices grow side by side."""

    kind, streamed = "", ""  # how its id begins, and the name of a stream's objects
    silence = sse.SILENCE  # sent in a stream when there is nothing else to send

    def __init__(self, model: str, tokenizer: Tokenizer, request: Any, count: int) -> None:
        self.tokenizer, self.request, self.count = tokenizer, request, count
        self.head = Head.of(self.kind, secrets.token_hex(12), model)
        self._ended: dict[int, Finished] = {}

    @property
    def include_usage(self) -> bool:
        options = self.request.stream_options
        return options is not None and bool(options.include_usage)

    def begin(self) -> list[dict[str, Any]]:
        return []

    def take(self, i: int, event: Token | Finished) -> list[dict[str, Any]]:
        """Return the objects to send for an event of choice i."""
        return self.add(i, event.chunk) if isinstance(event, Token) else self.end(i, event)

    def add(self, i: int, chunk: Chunk) -> list[dict[str, Any]]:
        """Return the objects to send for one token of choice i."""
        raise NotImplementedError

    def end(self, i: int, ended: Finished) -> list[dict[str, Any]]:
        raise NotImplementedError

    def choice(self, i: int, ended: Finished) -> dict[str, Any]:
        """Return choice i as a whole."""
        raise NotImplementedError

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        more = {"usage": None} if self.include_usage else {}
        return self.head.object(self.streamed, [choice]) | more

    def event(self, body: dict[str, Any]) -> bytes:
        """Return an object of a stream as it is sent."""
        return sse.event(body)

    def closing(self) -> bytes:
        """Return the end of a stream."""
        used = self.head.object(self.streamed, []) | {"usage": self._usage()} if self.include_usage else None
        return (b"" if used is None else sse.event(used)) + sse.DONE

    def failure(self, refusal: Refusal) -> bytes:
        """Return the end of a stream whose request has failed."""
        return sse.event({"error": refusal.error})

    def _usage(self) -> dict[str, Any]:
        return usage([self._ended[i] for i in range(self.count)], self.request.n or 1)

    def whole(self) -> dict[str, Any]:
        choices = [self.choice(i, self._ended[i]) for i in range(self.count)]
        more = {"usage": self._usage(), "timings": timings(self._ended[0].figures)}
        return self.head.object(self.streamed.removesuffix(".chunk"), choices) | more


def marked_text(tokenizer: Tokenizer, parts: Parts, chunk: Chunk) -> str:
    """Return a token's text for the parser `parts`, with the name of a special token that it reads."""
    if not tokenizer.is_special(chunk.token_id):
        return chunk.text
    name = tokenizer.name(chunk.token_id)
    return chunk.text + name if name in parts.marks else chunk.text


class GrowingMessage:
    """The message of one choice, as it grows."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.texts: dict[str, list[str]] = {"content": [], "reasoning_content": []}
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[Chunk] = []

    def deltas(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for piece in pieces:
            if isinstance(piece, Call):
                function = {"name": piece.name, "arguments": piece.arguments}
                call = {"id": piece.id, "type": "function", "function": function}
                found.append({"tool_calls": [{"index": len(self.calls)} | call]})
                self.calls.append(call)
            else:
                kind, text = piece
                self.texts[kind].append(text)
                found.append({kind: text})
        return found

    def reason(self, ended: Finished) -> str:
        return "tool_calls" if self.parts.called and ended.finish_reason == "stop" else ended.finish_reason

    @property
    def message(self) -> dict[str, Any]:
        text, thought = ("".join(self.texts[kind]) for kind in ("content", "reasoning_content"))
        made: dict[str, Any] = {"role": "assistant", "content": text or ("" if not self.calls else None)}
        made["refusal"] = None
        if thought:
            made["reasoning_content"] = thought
        if self.calls:
            made["tool_calls"] = self.calls
        return made


class ChatAnswer(Answer):
    kind, streamed = "chatcmpl-", "chat.completion.chunk"

    def __init__(self, model: str, tokenizer: Tokenizer, request: Any, parts: Callable[[], Parts]) -> None:
        super().__init__(model, tokenizer, request, request.n or 1)
        self._growing = [GrowingMessage(parts()) for _ in range(self.count)]

    def begin(self) -> list[dict[str, Any]]:
        return [self._delta(i, {"role": "assistant", "content": ""}) for i in range(self.count)]

    def _delta(self, i: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return self.chunk({"index": i, "delta": delta, "finish_reason": reason})

    def add(self, i: int, chunk: Chunk) -> list[dict[str, Any]]:
        growing = self._growing[i]
        deltas = growing.deltas(growing.parts.push(marked_text(self.tokenizer, growing.parts, chunk)))
        if chunk.logprobs is None:
            return [self._delta(i, d) for d in deltas]
        growing.logprobs.append(chunk)
        made = [self._delta(i, d) for d in deltas or [{}]]
        made[0]["choices"][0]["logprobs"] = chat_logprobs(self.tokenizer, [chunk])
        return made

    def end(self, i: int, ended: Finished) -> list[dict[str, Any]]:
        self._ended[i], growing = ended, self._growing[i]
        made = [self._delta(i, d) for d in growing.deltas(growing.parts.flush())]
        return [*made, self._delta(i, {}, growing.reason(ended)) | {"timings": timings(ended.figures)}]

    def choice(self, i: int, ended: Finished) -> dict[str, Any]:
        growing, logprobs = self._growing[i], None
        if self.request.logprobs:
            logprobs = chat_logprobs(self.tokenizer, growing.logprobs)
        about = {"logprobs": logprobs, "finish_reason": growing.reason(ended)}
        return {"index": i, "message": growing.message} | about


class CompletionAnswer(Answer):
    kind, streamed = "cmpl-", "text_completion"

    def __init__(
        self, model: str, tokenizer: Tokenizer, request: Any, prompts: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(model, tokenizer, request, len(prompts))
        self._prompts = prompts
        self._texts: list[list[str]] = [[] for _ in prompts]
        self._chunks: list[list[Chunk]] = [[] for _ in prompts]
        self._echo = [tokenizer.decode(ids) if request.echo else "" for ids in prompts]

    def _choice(self, i: int, text: str, reason: str | None, logprobs: Any) -> dict[str, Any]:
        return {"index": i, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def begin(self) -> list[dict[str, Any]]:
        return [self.chunk(self._choice(i, t, None, None)) for i, t in enumerate(self._echo) if t]

    def add(self, i: int, chunk: Chunk) -> list[dict[str, Any]]:
        offset, known = len(self._echo[i]) + sum(map(len, self._texts[i])), None
        self._texts[i].append(chunk.text)
        if chunk.logprobs is not None:
            self._chunks[i].append(chunk)
            known = text_logprobs(self.tokenizer, [(chunk.token_id, chunk.logprobs)], offset)
        elif not chunk.text:
            return []
        return [self.chunk(self._choice(i, chunk.text, None, known))]

    def end(self, i: int, ended: Finished) -> list[dict[str, Any]]:
        self._ended[i] = ended
        known = text_logprobs(self.tokenizer, self._scores(i, ended)) if ended.prompt_logprobs else None
        made = self.chunk(self._choice(i, "", ended.finish_reason, known))
        return [made | {"timings": timings(ended.figures)}]

    def _scores(self, i: int, ended: Finished) -> list[tuple[int, TokenLogprobs | None]]:
        """Return the prompt's tokens with their log probabilities; the first token has none."""
        found: list[TokenLogprobs | None] = [None, *ended.prompt_logprobs]
        return list(zip(self._prompts[i], found, strict=True))

    def choice(self, i: int, ended: Finished) -> dict[str, Any]:
        known = None
        if self.request.logprobs is not None:
            tokens = self._scores(i, ended) if self.request.echo else []
            tokens += [(c.token_id, c.logprobs) for c in self._chunks[i]]
            known = text_logprobs(self.tokenizer, tokens)
        return self._choice(i, self._echo[i] + "".join(self._texts[i]), ended.finish_reason, known)


class InfillAnswer(Answer):
    """An answer of `/infill`: the text between two others, with llama.cpp's keys."""

    kind, streamed = "infill-", ""

    def __init__(self, model: str, tokenizer: Tokenizer, request: Any, count: int) -> None:
        super().__init__(model, tokenizer, request, count)
        self._texts: list[str] = []

    def _content(self, text: str, *, stop: bool) -> dict[str, Any]:
        return {"index": 0, "content": text, "stop": stop, "model": self.head.model}

    def _last(self, text: str, ended: Finished) -> dict[str, Any]:
        f, kind = ended.figures, "limit" if ended.finish_reason == "length" else "eos"
        about = {
            "stop_type": kind if ended.stop is None else "word", "stopping_word": ended.stop or "",
            "tokens_predicted": f.tokens, "tokens_evaluated": f.prompt_tokens,
            "tokens_cached": f.cached_tokens, "truncated": False, "timings": timings(f),
        }  # fmt: skip
        return self._content(text, stop=True) | about

    def add(self, i: int, chunk: Chunk) -> list[dict[str, Any]]:
        self._texts.append(chunk.text)
        return [self._content(chunk.text, stop=False)] if chunk.text else []

    def end(self, i: int, ended: Finished) -> list[dict[str, Any]]:
        self._ended[i] = ended
        return [self._last("", ended)]

    def whole(self) -> dict[str, Any]:
        return self._last("".join(self._texts), self._ended[0])

    def closing(self) -> bytes:
        return b""
