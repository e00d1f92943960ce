"""Answers of `/v1/responses`: OpenAI's response object, and its events in their order."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from thermocline.server.api import schema
from thermocline.server.api.agents.growing import AnswerPart, Event, GrowingAnswer
from thermocline.server.api.agents.responses_input import ENCRYPTED, sealed
from thermocline.server.api.agents.responses_schema import ResponsesRequest
from thermocline.server.api.chat import BegunChat
from thermocline.server.http.refusal import Refusal
from thermocline.server.process.messages import Finished


class ResponseAnswer(GrowingAnswer):
    """`keep` gets the whole response and the assistant's message, if it is to be kept."""

    kind = "resp_"
    prefixes = {"thought": "rs", "text": "msg", "call": "fc"}  # noqa: RUF012

    def __init__(
        self,
        begun: BegunChat,
        request: ResponsesRequest,
        keep: Callable[[Event, schema.Message], None] | None,
    ) -> None:
        super().__init__(begun, request)
        self._about = _about(request)
        self._seals = ENCRYPTED in (request.include or ())
        self._keep = keep
        self._made: Event = {}  # the response, once it has ended
        self._sent = 0

    # ---- objects

    def _response(self, status: str) -> Event:
        ended = self._ended.get(0)
        is_cut = status == "incomplete"
        return {
            "id": self.head.id, "object": "response", "created_at": self.head.created, "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None, "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self.head.model,
            "output": [] if ended is None else [self._item(p, _status(p)) for p in self.parts],
            "usage": None if ended is None else self._used(ended),
            **self._about,
        }  # fmt: skip

    def _used(self, ended: Finished) -> Event:
        f = ended.figures
        return {
            "input_tokens": f.prompt_tokens,
            "input_tokens_details": {"cached_tokens": f.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": f.tokens,
            "output_tokens_details": {"reasoning_tokens": min(self.thought_tokens, f.tokens)},
            "total_tokens": f.prompt_tokens + f.tokens,
        }

    def _item(self, part: AnswerPart, status: str) -> Event:
        """Return a part as an item. One in progress has no text yet: events bring it."""
        begun = status == "in_progress"
        match part.kind:
            case "thought":
                content = [] if begun else [_thought(part.text)]
                item: Event = {"id": part.id, "type": "reasoning", "summary": [], "content": content}
                if self._seals:
                    item["encrypted_content"] = None if begun else sealed(part.text)
                return item | {"status": status}
            case "text":
                content = [] if begun else [_text(part.text)]
                return {"id": part.id, "type": "message", "status": status, "role": "assistant",
                        "content": content}  # fmt: skip
        assert part.call is not None
        arguments = "" if begun else part.call.arguments
        return {"id": part.id, "type": "function_call", "status": status, "call_id": part.call.id,
                "name": part.call.name, "arguments": arguments}  # fmt: skip

    # ---- events

    def _event(self, type: str, **fields: Any) -> Event:
        made = {"type": f"response.{type}", "sequence_number": self._sent, **fields}
        self._sent += 1
        return made

    def _of(self, grown: AnswerPart, type: str, **fields: Any) -> Event:
        return self._event(type, item_id=grown.id, output_index=len(self.parts) - 1, **fields)

    def begin(self) -> list[Event]:
        about = self._response("in_progress")
        return [self._event("created", response=about), self._event("in_progress", response=about)]

    def opened(self, part: AnswerPart) -> list[Event]:
        item = self._item(part, "in_progress")
        found = [self._event("output_item.added", output_index=len(self.parts) - 1, item=item)]
        if part.call is not None:
            found.append(self._of(part, "function_call_arguments.delta", delta=part.call.arguments))
        else:
            made = _thought("") if part.kind == "thought" else _text("")
            found.append(self._of(part, "content_part.added", content_index=0, part=made))
        return found

    def grown(self, part: AnswerPart, text: str) -> list[Event]:
        if part.kind == "thought":
            return [self._of(part, "reasoning_text.delta", content_index=0, delta=text)]
        return [self._of(part, "output_text.delta", content_index=0, delta=text, logprobs=[])]

    def closed(self, part: AnswerPart) -> list[Event]:
        done, text = [], part.text
        match part.kind:
            case "thought":
                done.append(self._of(part, "reasoning_text.done", content_index=0, text=text))
                done.append(self._of(part, "content_part.done", content_index=0, part=_thought(text)))
            case "text":
                done.append(self._of(part, "output_text.done", content_index=0, text=text, logprobs=[]))
                done.append(self._of(part, "content_part.done", content_index=0, part=_text(text)))
            case "call":
                assert part.call is not None
                name, arguments = part.call.name, part.call.arguments
                done.append(self._of(part, "function_call_arguments.done", name=name, arguments=arguments))
        item = self._item(part, _status(part))
        return [*done, self._event("output_item.done", output_index=len(self.parts) - 1, item=item)]

    def finished(self, ended: Finished) -> list[Event]:
        made = self._made = self._response("incomplete" if ended.finish_reason == "length" else "completed")
        if self._keep is not None:
            self._keep(made, self._message())
        return [self._event(made["status"], response=made)]

    def whole(self) -> Event:
        return self._made

    def _message(self) -> schema.Message:
        """Return the answer as a message of the conversation that goes on from it."""
        calls = [
            schema.ToolCall(
                id=p.call.id,
                function=schema.FunctionCall(name=p.call.name, arguments=p.call.arguments),
            )
            for p in self.parts
            if p.call is not None
        ]
        text = "".join(p.text for p in self.parts if p.kind == "text")
        thought = "".join(p.text for p in self.parts if p.kind == "thought")
        return schema.Message.model_construct(
            role="assistant", content=text, reasoning_content=thought or None, tool_calls=calls or None
        )

    def failure(self, refusal: Refusal) -> bytes:
        code = "server_error" if refusal.status >= 500 else "invalid_prompt"  # not to be sent again
        error = {"code": code, "message": refusal.error["message"]}
        failed = self._response("failed") | {"error": error}
        return self.event(self._event("failed", response=failed))


def _status(part: AnswerPart) -> str:
    return "incomplete" if part.is_cut else "completed"


def _thought(text: str) -> Event:
    return {"type": "reasoning_text", "text": text}


def _text(text: str) -> Event:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _about(r: ResponsesRequest) -> Event:
    """Return what a response repeats of its request: no instructions and no tools, which may be long."""
    config = None if r.text is None else r.text.format
    effort = None if r.reasoning is None else r.reasoning.effort
    return {
        "instructions": None, "tools": [], "background": False, "service_tier": "default",
        "tool_choice": r.tool_choice.model_dump() if isinstance(r.tool_choice, schema.ApiObject)
        else r.tool_choice or "auto",
        "parallel_tool_calls": r.parallel_tool_calls is not False,
        "previous_response_id": r.previous_response_id,
        "store": r.store is not False,
        "max_output_tokens": r.max_output_tokens, "max_tool_calls": None,
        "temperature": r.temperature, "top_p": r.top_p, "top_logprobs": 0, "truncation": "disabled",
        "text": {"format": {"type": "text"} if config is None
                 else config.model_dump(by_alias=True, exclude_none=True)},
        "reasoning": {"effort": effort, "summary": None},
        "metadata": r.metadata or {},
    }  # fmt: skip
