"""Compare chat templates with transformers, and read back the calls that they write.

Each DIR/*.jinja renders 20 conversations here and in transformers: the texts must be equal, or both refuse.
One difference is ours: where a template joins `safe` text and other text, jinja2 writes the other one with
HTML's escapes (Functionary 3.1). No model was trained on these, and none are written here.
Then an answer that calls functions is rendered, and the answer parser must find the same calls in it.

    python scripts/chat_templates.py DIR

It needs transformers and the package itself.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thermocline.errors import ThermoclineError
from thermocline.server.api.parsing.answer_parser import AnswerFormat
from thermocline.server.api.parsing.call_forms import Call
from thermocline.server.api.parsing.harmony import parser_of
from thermocline.text.chat_template import ChatTemplate
from thermocline.text.tokenizer import Tokenizer

ARGUMENTS = {"city": "Köln <&> Bonn", "days": 3}
PARAMETERS = {
    "type": "object",
    "required": ["city"],
    "properties": {
        "city": {"type": "string", "description": "A city."},
        "days": {"type": "integer", "description": "How many."},
    },
}
WEATHER = {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": ARGUMENTS},
}
SYSTEM = {"role": "system", "content": " You are brief.\n"}
HELLO = {"role": "user", "content": "Hello!  How are\n\nyou?"}
FINE = {"role": "assistant", "content": "Fine. 🙂"}
MORE = {"role": "user", "content": "Ça va, 你好\r\n    ok"}
THOUGHT = {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."}
MARKED = {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\nFour."}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
SAID = {"role": "assistant", "content": "I look.", "reasoning_content": "Rain?", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "Rain, 7°", "tool_call_id": "abcdefghi", "name": "get_weather"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": " there"}]}
FIRST: dict[str, list[dict[str, Any]]] = {
    "a question": [HELLO],
    "with a system": [SYSTEM, HELLO],
    "an empty system": [{"role": "system", "content": ""}, HELLO],
    "two turns": [SYSTEM, HELLO, FINE, MORE],
    "a thought": [HELLO, THOUGHT, MORE],
    "a marked thought": [HELLO, MARKED, MORE],
    "parts": [PARTS],
    "parts after a turn": [SYSTEM, HELLO, FINE, PARTS],
    "an empty question": [{"role": "user", "content": ""}],
    "an answer to go on": [HELLO, FINE],
}
WITH_TOOLS: dict[str, list[dict[str, Any]]] = {
    "tools": [HELLO],
    "tools and a system": [SYSTEM, HELLO],
    "a call": [HELLO, CALLED],
    "a call and its result": [HELLO, CALLED, RESULT],
    "a call with a thought": [SYSTEM, HELLO, SAID, RESULT],
    "a call, then an answer": [HELLO, CALLED, RESULT, FINE, MORE],
    "two calls": [HELLO, {**CALLED, "tool_calls": [CALL, CALL]}, RESULT, RESULT],
}
THINKING = (True, False)  # asked of HELLO, with tools the second time


def conversations() -> list[tuple[str, Sequence[dict[str, Any]], dict[str, Any]]]:
    """Return (what it is, messages, variables) of each."""
    made: list[tuple[str, Sequence[dict[str, Any]], dict[str, Any]]] = []
    made += [(name, messages, {}) for name, messages in FIRST.items()]
    made += [(name, messages, {"tools": TOOLS}) for name, messages in WITH_TOOLS.items()]
    for thinks in THINKING:
        made.append((f"thinking {thinks}", [SYSTEM, HELLO], {"enable_thinking": thinks}))
    made.append(("thinking with tools", [HELLO], {"enable_thinking": True, "tools": TOOLS}))
    return made


def directory() -> Path:
    """Return a new directory with a tokenizer of single letters."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    path = Path(tempfile.mkdtemp())
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Library(models.BPE({letter: i for i, letter in enumerate(["<s>", "</s>", *letters])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return path


def theirs(them: Any, source: str, messages: Any, variables: dict[str, Any]) -> str | None:
    """Return transformers' text, or None if the template refuses."""
    try:
        return str(
            them.apply_chat_template(
                messages, chat_template=source, add_generation_prompt=True, tokenize=False, **variables
            )
        )
    except Exception:  # a template may raise anything
        return None


def ours(template: ChatTemplate, messages: Any, variables: dict[str, Any]) -> str | None:
    try:
        return template.render(messages, variables=variables)[0]
    except ThermoclineError:
        return None


def read_back(template: ChatTemplate, source: str) -> str:
    """Return what the parser makes of a call as the template writes it: "read", or why not."""
    format = AnswerFormat.of(source)
    if not format.calls_known:
        return "no form of calls"
    asked = ours(template, [HELLO], {"tools": TOOLS})
    try:
        text, _ = template.render([HELLO, CALLED], add_generation_prompt=False, variables={"tools": TOOLS})
    except ThermoclineError as error:
        return f"the template refuses: {str(error)[:60]}"
    begin, form = _common(asked or "", text), format.call
    if format.harmony:  # the prompt ends behind the head of the answer's first message
        begin = text.rfind("<|start|>assistant") + len("<|start|>assistant")
    elif form is not None and form.opens:  # the prompt may begin as a call does
        begin = text.find(form.opens, max(0, begin - len(form.opens)))
        if begin < 0:
            return "the template writes none"
    answer = text[begin:]
    if form is not None:  # the special token behind a call is no text
        answer = answer[: answer.rfind(form.closes or "}") + len(form.closes or "}")]
        answer += "]" * (form.closes is None and form.written.all is not None)
    parts = parser_of(format, tools={"get_weather": PARAMETERS}, thinking=False)
    calls = [p for p in (*parts.push(answer), *parts.flush()) if isinstance(p, Call)]
    found = [(c.name, json.loads(c.arguments)) for c in calls]
    return "read" if found == [("get_weather", ARGUMENTS)] else f"found {found} in {answer[:90]!r}"


def _common(a: str, b: str) -> int:
    """Return the length of the longest text that both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    from tokenizers import Tokenizer as Library
    from transformers import PreTrainedTokenizerFast

    path, wrong = directory(), 0
    them = PreTrainedTokenizerFast(
        tokenizer_object=Library.from_file(str(path / "tokenizer.json")), bos_token="<s>", eos_token="</s>"
    )
    tokenizer = Tokenizer(path)
    for file in sorted(options.directory.glob("*.jinja")):
        source, equal, refused, differs = file.read_text(), 0, 0, []
        template = ChatTemplate(path, tokenizer, source)
        for name, messages, variables in conversations():
            want, got = theirs(them, source, messages, variables), ours(template, messages, variables)
            same = want == got or (want is not None and html.unescape(want) == got)
            equal, refused = equal + same, refused + (want is None and got is None)
            differs += [] if same else [name]
        calls = read_back(template, source)
        template.close()
        wrong += bool(differs) + (calls.startswith("found"))
        print(f"{file.stem[:48]:48} {equal}/{len(conversations())} equal ({refused} refused)  calls: {calls}")
        for name in differs:
            print(f"    differs: {name}")
    tokenizer.close()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
