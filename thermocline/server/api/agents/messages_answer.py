"""Answers of `/v1/messages`: Anthropic's message, and its events in their order."""

from __future__ import annotations

import json
from typing import Any

from thermocline.server.api.agents.growing import AnswerPart, Event, GrowingAnswer
from thermocline.server.http import sse
from thermocline.server.http.refusal import Refusal
from thermocline.server.process.messages import Finished

_SIGNATURE = "thermocline"  # clients send a thought back only with a signature; it says whose thought it is


class MessageAnswer(GrowingAnswer):
    kind = "msg_"
    prefixes = {"thought": "block", "text": "block", "call": "block"}  # noqa: RUF012
    silence = sse.named_event({"type": "ping"})

    def _message(self, ended: Finished | None) -> Event:
        return {
            "id": self.head.id, "type": "message", "role": "assistant", "model": self.head.model,
            "content": [] if ended is None else list(map(_block, self.parts)),
            **self._stopped(ended), "usage": self._used(ended),
        }  # fmt: skip

    def _stopped(self, ended: Finished | None) -> Event:
        reason = None
        if ended is not None:
            reason = "max_tokens" if ended.finish_reason == "length" else "end_turn"
            if reason == "end_turn" and ended.stop is not None:
                reason = "stop_sequence"
            elif reason == "end_turn" and self.called:
                reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": None if ended is None else ended.stop}

    def _used(self, ended: Finished | None) -> Event:
        """Return the tokens. `input_tokens` are those that were computed, as Anthropic counts them."""
        prompt, cached, made = self.prompt_tokens, 0, 0
        if ended is not None:
            f = ended.figures
            prompt, cached, made = f.prompt_tokens, f.cached_tokens, f.tokens
        return {
            "input_tokens": prompt - cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached, "output_tokens": made,
        }  # fmt: skip

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.parts) - 1, "delta": delta}

    def begin(self) -> list[Event]:
        return [{"type": "message_start", "message": self._message(None)}, {"type": "ping"}]

    def opened(self, part: AnswerPart) -> list[Event]:
        match part.kind:
            case "thought":
                block = {"type": "thinking", "thinking": "", "signature": ""}
            case "text":
                block = {"type": "text", "text": ""}
            case "call":
                block = _block(part) | {"input": {}}
        found: list[Event] = [
            {"type": "content_block_start", "index": len(self.parts) - 1, "content_block": block}
        ]
        if part.call is not None:
            given = json.dumps(_input(part.call.arguments), ensure_ascii=False)
            found.append(self._delta({"type": "input_json_delta", "partial_json": given}))
        return found

    def grown(self, part: AnswerPart, text: str) -> list[Event]:
        if part.kind == "thought":
            return [self._delta({"type": "thinking_delta", "thinking": text})]
        return [self._delta({"type": "text_delta", "text": text})]

    def closed(self, part: AnswerPart) -> list[Event]:
        stop: Event = {"type": "content_block_stop", "index": len(self.parts) - 1}
        if part.kind == "thought":
            return [self._delta({"type": "signature_delta", "signature": _SIGNATURE}), stop]
        return [stop]

    def finished(self, ended: Finished) -> list[Event]:
        delta = {"type": "message_delta", "delta": self._stopped(ended), "usage": self._used(ended)}
        return [delta, {"type": "message_stop"}]

    def whole(self) -> Event:
        return self._message(self._ended[0])

    def failure(self, refusal: Refusal) -> bytes:
        return self.event(refusal.anthropic())


def _block(part: AnswerPart) -> Event:
    if part.call is not None:
        given = _input(part.call.arguments)
        return {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": given}
    if part.kind == "thought":
        return {"type": "thinking", "thinking": part.text, "signature": _SIGNATURE}
    return {"type": "text", "text": part.text}


def _input(arguments: str) -> Event:
    """Return a call's arguments as an object. Others, which a model may write, go to `arguments`."""
    try:
        found = json.loads(arguments)
        json.dumps(found, allow_nan=False)  # 1e999 is JSON, and infinity is not
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}
