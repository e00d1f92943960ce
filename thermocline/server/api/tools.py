"""Which functions an answer may or must call, and the grammar that enforces it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from thermocline.server.api.parsing.answer_parser import AnswerFormat
from thermocline.server.api.parsing.call_forms import Schemas
from thermocline.server.api.schema import AllowedTools, ChatRequest, Function, NamedTool
from thermocline.server.http.refusal import Refusal
from thermocline.text.grammar import Grammar


@dataclass(frozen=True)
class Offer:
    """The functions that the model is shown, and the conditions on its calls."""

    shown: Sequence[Function] = ()
    callable: Sequence[Function] = ()
    must: bool = False  # the answer has to be a call
    several: bool = True
    asked: bool = False  # there are conditions, so a grammar is needed

    @property
    def schemas(self) -> Schemas | None:
        """Return what the model is shown, by name, with the schemas of arguments; None: nothing."""
        return {f.name: f.parameters or {} for f in self.shown} or None

    @staticmethod
    def of(r: ChatRequest, format: AnswerFormat) -> Offer:
        """Return the offer of a request; refuse one that cannot be honoured."""
        choice, shown = r.tool_choice, [t.function for t in r.tools or ()]
        if choice == "none" or (not shown and choice in (None, "auto")):
            return Offer()
        if not shown:
            raise Refusal(
                400, "tool_choice: there are no tools to choose from; give tools", param="tool_choice"
            )
        if not format.calls_known:
            about = "the form of calls in this model's chat template is not supported; leave tools out"
            raise Refusal(400, f"tools: {about}", param="tools")
        must = choice == "required"
        several = r.parallel_tool_calls is not False
        names = {f.name for f in shown}
        match choice:
            case NamedTool():
                names, must, several = {choice.function.name}, True, False
            case AllowedTools():
                names = {t.function.name for t in choice.allowed_tools.tools}
                must = choice.allowed_tools.mode == "required"
        if missing := names - {f.name for f in shown}:
            about = f"there is no function {min(missing)[:64]!r} among the tools"
            raise Refusal(400, f"tool_choice: {about}", param="tool_choice")
        may = [f for f in shown if f.name in names]
        asked = must or not several or len(may) < len(shown) or any(f.strict for f in may)
        return Offer(shown, may, must, several, asked)


def answer_grammar(
    offer: Offer, format: AnswerFormat, thinking: bool, content: Grammar | None
) -> Grammar | None:
    """Return the grammar of a whole answer, if it needs one. `content`: the grammar of its text.

    `thinking`: the prompt ends in a thought. Thoughts stay free, so that the model can think before it calls
    a function or writes JSON.
    """
    if content is not None and content.kind != "json_schema":
        if offer.asked:
            about = (
                "it is for the whole answer and cannot be combined with conditions on calls; leave one out"
            )
            raise Refusal(400, f"grammar: {about}", param="grammar")
        return content
    tools = offer.asked or (bool(offer.shown) and content is not None)
    if not tools and (content is None or format.think is None):
        return content
    thought = format.thought(begun=thinking)
    calls = None
    if tools:
        functions = [(f.name, _arguments(f, kept=offer.must or bool(f.strict))) for f in offer.callable]
        calls = format.calls(functions, several=offer.several)
    if offer.must:
        return Grammar.answer(thought, calls, None)
    return Grammar.answer(thought, calls, "text" if content is None else json.loads(content.text))


def _arguments(f: Function, *, kept: bool) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object. No schema: no arguments.

    `kept`: the schema is enforced. If a call is neither required nor strict, only the model reads it, as with
    OpenAI.
    """
    if not kept:
        return {"type": "object"}
    if f.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    type_ = f.parameters.get("type", "object")
    if type_ != "object" and not (isinstance(type_, list) and "object" in type_):
        raise Refusal(
            400, f"tools: the parameters of {f.name[:64]!r} have to be of type object", param="tools"
        )
    return {**f.parameters, "type": "object"}
