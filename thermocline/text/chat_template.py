"""Turn a conversation into the token ids that the model was trained to see, by its chat template.

A control token comes from the template, never from a message: a user's "<|im_end|>" is ten characters of
text. This file decides where a template is found and which tokens are control tokens.
"""

from __future__ import annotations

import re
import secrets
import string
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thermocline.errors import BadFile, UsageError
from thermocline.files.bounded import parse_json, quoted
from thermocline.files.small_files import SmallFiles, small_files
from thermocline.text.template_process import ANSWERS, OWN, SPOKEN, Span, TemplateProcess
from thermocline.text.tokenizer import Tokenizer
from thermocline.text.tokenizer_parts import MARKER
from thermocline.text.tokenizer_process import Added

Message = Mapping[str, Any]  # "role", "content" (a text or its parts), and other keys that the template reads
JINJA_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
JSON_FILE = "chat_template.json"  # of older processors
MAX_CONFIG_BYTES = 64 << 20
MAX_TEMPLATE_BYTES = 1 << 20  # the longest known have 20 KB
TOKEN_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
UNLESS_GIVEN = {"tools": None, "documents": None}  # defined even if not given, as in transformers
THOUGHTS = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # names that templates have for one, as in transformers
RESERVED = {"messages", "add_generation_prompt", *(f"{name}_token" for name in TOKEN_NAMES)}


class ChatTemplate:
    """The chat template among a model's small files, or `source` in its place.

    An answer ends at `stop_ids`: the control token, if any, that the template writes after an answer.
    """

    def __init__(self, files: SmallFiles | Path, tokenizer: Tokenizer, source: str | None = None) -> None:
        """`files`: or the directory that they are in."""
        files = small_files(files)
        config = _config(files)
        name = "the template given"
        if source is None:
            source, name = _source(files, config)
        if source is None:
            raise UsageError(
                f"{files.origin.name}: this model has no chat template, so it was made to continue texts, "
                "not to chat; use `thermocline run`, or give a template with --template FILE"
            )
        if len(source) > MAX_TEMPLATE_BYTES:
            raise BadFile(
                f"{name}: the chat template has {len(source)} characters; the limit is {MAX_TEMPLATE_BYTES}"
            )
        self.source = source
        self._tokens = _special_tokens(config, files.label(CONFIG_FILE))
        self._process = TemplateProcess(source, name)
        self._encoder = GuardedEncoder(tokenizer, source)
        self._stop_ids: tuple[int, ...] | None = None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[Span]]:
        """Return the text and its spans, each with its author."""
        variables = UNLESS_GIVEN | dict(variables or {})
        if taken := RESERVED & variables.keys():
            raise UsageError(
                f"{', '.join(sorted(taken))} cannot be variables of a chat template; leave them out"
            )
        if not messages:
            raise UsageError("a conversation needs at least one message")
        variables["add_generation_prompt"] = add_generation_prompt
        return self._process.render([_plain(m) for m in messages], self._tokens, variables)

    def encode(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        token_ids: Mapping[int, Sequence[int]] | None = None,
        check: Callable[[str], None] = lambda text: None,
    ) -> list[int]:
        """Return the conversation's ids. `check` may refuse the rendered text before it is tokenised.

        `token_ids`: an answer's ids as generated, by the message's index. They are used if the template
        leaves the answer's text whole and writes a control token after it. Tokenising that text again may
        give other ids, and everything after them would have to be computed again.
        """
        text, spans = self.render(messages, add_generation_prompt=add_generation_prompt, variables=variables)
        check(text)
        ids: list[int] = []
        at = 0
        waiting = deque(sorted((token_ids or {}).items()))
        for start, stop, who in spans:
            while waiting and who == SPOKEN + waiting[0][0] % ANSWERS:
                i, known = waiting.popleft()
                if text[start:stop] == messages[i]["content"] and self._encoder.ends_at(text, spans, stop):
                    ids += [*self._encoder.encode(text, spans, at, start), *known]
                    at = stop
                    break
        return ids + self._encoder.encode(text, spans, at, len(text))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        if self._stop_ids is None:
            self._stop_ids = self._find_stop_ids()
        return self._stop_ids

    def _find_stop_ids(self) -> tuple[int, ...]:
        """Return the control token that the template writes after an answer, if there is one."""
        answer = secrets.token_hex(8)
        try:
            text, _ = self.render(
                [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}],
                add_generation_prompt=False,
            )
        except (UsageError, BadFile):  # the template needs other messages; the model's own end tokens remain
            return ()
        token = self._encoder.first_control(text.partition(answer)[2].lstrip())
        return () if token is None else (token,)

    def close(self) -> None:
        self._process.close()


def _plain(message: Message) -> dict[str, Any]:
    """Return a message as templates read it."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UsageError(f"a message is {quoted(message)}; it must be an object with role and content")
    given = {key: value for key, value in message.items() if value is not None}
    thought = next((given[name] for name in THOUGHTS if name in given), None)
    return given if thought is None else {"thinking": thought, **given, "reasoning_content": thought}


# ---- the model's files


def _config(files: SmallFiles) -> dict[str, Any]:
    if not files.has(CONFIG_FILE):
        return {}
    return parse_json(files.read(CONFIG_FILE, MAX_CONFIG_BYTES), files.label(CONFIG_FILE))


def _source(files: SmallFiles, config: dict[str, Any]) -> tuple[str | None, str]:
    """Return the template and its place. Its own file wins, as in transformers; its older one comes last."""
    if files.has(JINJA_FILE):
        name = files.label(JINJA_FILE)
        try:
            return files.read(JINJA_FILE, MAX_TEMPLATE_BYTES).decode(), name
        except UnicodeDecodeError:
            raise BadFile(f"{name}: not UTF-8 text") from None
    found, name = _keyed(config, files.label(CONFIG_FILE))
    if found is None and files.has(JSON_FILE):
        label = files.label(JSON_FILE)
        return _keyed(parse_json(files.read(JSON_FILE, MAX_CONFIG_BYTES), label), label)
    return found, name


def _keyed(held: dict[str, Any], file: str) -> tuple[str | None, str]:
    """Return the template that an object of JSON has, and its place."""
    name, found = f"{file}: chat_template", held.get("chat_template")
    if isinstance(found, list):  # several templates, by name
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
        if found is None:
            raise BadFile(f"{name} has no template named default; give one with --template FILE")
    if found is not None and not isinstance(found, str):
        raise BadFile(f"{name} is {quoted(found)}, not a text")
    return found, name


def _special_tokens(config: dict[str, Any], file: str) -> dict[str, str]:
    """Return `bos_token` and the like for the template. The file has texts, or objects with `content`."""
    out = {}
    for name in (f"{n}_token" for n in TOKEN_NAMES):
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            out[name] = value
        elif value is not None:
            raise BadFile(f"{file}: {name} is {quoted(value)}, not a token")
    return out


# ---- text of two origins -> ids


class GuardedEncoder:
    """A tokenizer that takes control tokens only from a template's own text.

    In a twin of the tokenizer, control tokens have names that nobody can guess. In the template's text each
    control token is replaced by that name; in a message's text there is none to find. Tokenising the
    template's and the messages' text separately would split words where the two meet.

    Control tokens are the special tokens, and those added tokens that the template writes and that look like
    markers, such as <think>. The model may write markers, too, so those in an earlier answer count. Other
    added tokens (say, runs of spaces) are text.
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._controls = {t.content: t.id for t in tokenizer.added if _is_control(t, template)}
        self._names = {content: _unguessable() for content in self._controls}
        self._ids = tokenizer.renamed(self._names, _unguessable())
        longest_first = sorted(
            (t for t in tokenizer.added if t.content in self._names), key=lambda t: -len(t.content)
        )
        self._control = _any_of(longest_first)
        self._marker = _any_of([t for t in longest_first if not t.special])

    def encode(self, text: str, spans: Sequence[Span], at: int, end: int) -> list[int]:
        """Return the ids of text[at:end]; `at` and `end` are borders of spans."""
        parts = []
        for start, stop, who in spans:
            if at <= start and stop <= end:
                tokens = self._control if who == OWN else self._marker
                parts += [text[at:start], tokens.sub(lambda m: self._names[m[0]], text[start:stop])]
                at = stop
        named = "".join([*parts, text[at:end]])
        try:
            return self._ids(named.encode())
        except UnicodeEncodeError:
            raise UsageError("the conversation is not valid Unicode: remove its unpaired surrogate") from None

    def ends_at(self, text: str, spans: Sequence[Span], at: int) -> bool:
        """Tell whether the template writes a control token there, which ends the piece to tokenise."""
        own = next((text[a:b] for a, b, who in spans if a == at and who == OWN), "")
        return self.first_control(own) is not None

    def first_control(self, text: str) -> int | None:
        found = self._control.match(text)
        return None if found is None else self._controls[found[0]]


def _is_control(token: Added, template: str) -> bool:
    name = token.content
    return token.special or (name in template and MARKER.fullmatch(name) is not None)


def _any_of(tokens: Iterable[Added]) -> re.Pattern[str]:
    """Match tokens as the library does: the first in the list wins, `single_word` ones stand alone."""
    found = [
        rf"(?<!\w){t}(?!\w)" if single else t
        for t, single in ((re.escape(t.content), t.single_word) for t in tokens)
    ]
    return re.compile("|".join(found) or r"(?!)")


def _unguessable() -> str:
    """Return random letters, which no normaliser or whitespace rule changes."""
    return "".join(secrets.choice(string.ascii_lowercase) for _ in range(24))
