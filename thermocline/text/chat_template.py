"""A conversation -> the token ids the model was trained to see: its chat template, rendered and tokenised.

Owns where a template is found and which tokens are control tokens. A control token comes from the template,
never from a message: a user's "<|im_end|>" is seven characters of text. Must not know the engine.
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
from thermocline.files.bounded import parse_json, quoted, read_small
from thermocline.text.template_process import ANSWERS, OWN, SPOKEN, Span, TemplateProcess
from thermocline.text.tokenizer import Tokenizer
from thermocline.text.tokenizer_parts import MARKER
from thermocline.text.tokenizer_process import Added

Message = Mapping[str, Any]  # "role", "content" (a text, or parts of one), and what else the template knows
JINJA_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
MAX_CONFIG_BYTES = 64 << 20
MAX_TEMPLATE_BYTES = 1 << 20  # the longest in the field have 20 KB
TOKEN_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
UNLESS_GIVEN = {"tools": None, "documents": None}  # defined, as in transformers
RESERVED = {"messages", "add_generation_prompt", *(f"{name}_token" for name in TOKEN_NAMES)}


class ChatTemplate:
    """The template of the model in `directory`, or `source` in its place.

    An answer ends at `stop_ids`: the control token that the template writes after each, where there is one.
    """

    def __init__(self, directory: Path, tokenizer: Tokenizer, source: str | None = None) -> None:
        config = _config(directory / CONFIG_FILE)
        name = "the template given"
        if source is None:
            source, name = _source(directory, config)
        if source is None:
            raise UsageError(
                f"{directory.name}: this model has no chat template: it continues texts, it was not made to "
                "chat; use `thermocline run`, or give a template with --template FILE"
            )
        if len(source) > MAX_TEMPLATE_BYTES:
            raise BadFile(
                f"{name}: a chat template of {len(source)} characters; the most is {MAX_TEMPLATE_BYTES}"
            )
        self.source = source
        self._tokens = _special_tokens(config, directory / CONFIG_FILE)
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
        """-> (the text, who wrote which spans of it)."""
        variables = UNLESS_GIVEN | dict(variables or {})
        if taken := RESERVED & variables.keys():
            raise UsageError(f"{', '.join(sorted(taken))} cannot be given to a chat template as a variable")
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
        """`check` may refuse the text before it is split into tokens.

        `token_ids`: of answers, by the message's index, as they were generated. They stand for the answer's
        text where the template leaves it whole and a control token follows it. Tokenised again, it may become
        other tokens, and all from there on would have to be computed again.
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
        """What the template writes after an answer, if that is a control token."""
        answer = secrets.token_hex(8)
        try:
            text, _ = self.render(
                [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}],
                add_generation_prompt=False,
            )
        except (UsageError, BadFile):  # a template with other needs: the model's own end tokens have to do
            return ()
        token = self._encoder.first_control(text.partition(answer)[2].lstrip())
        return () if token is None else (token,)

    def close(self) -> None:
        self._process.close()


def _plain(message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UsageError(f"a message is {quoted(message)}; it must have a role and a content")
    return {key: value for key, value in message.items() if value is not None}


# ---- the model's files


def _config(path: Path) -> dict[str, Any]:
    return parse_json(read_small(path, MAX_CONFIG_BYTES), str(path)) if path.exists() else {}


def _source(directory: Path, config: dict[str, Any]) -> tuple[str | None, str]:
    """(the template, where it is). The file of its own wins, as in transformers."""
    path = directory / JINJA_FILE
    if path.exists():
        try:
            return read_small(path, MAX_TEMPLATE_BYTES).decode(), str(path)
        except UnicodeDecodeError:
            raise BadFile(f"{path}: not UTF-8 text") from None
    name = f"{directory / CONFIG_FILE}: chat_template"
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
        if found is None:
            raise BadFile(f"{name} has no template named default; give one with --template FILE")
    if found is not None and not isinstance(found, str):
        raise BadFile(f"{name} is {quoted(found)}, not a text")
    return found, name


def _special_tokens(config: dict[str, Any], path: Path) -> dict[str, str]:
    """`bos_token` and the like, for the template to write; as texts, or as objects with a `content`."""
    out = {}
    for name in (f"{n}_token" for n in TOKEN_NAMES):
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            out[name] = value
        elif value is not None:
            raise BadFile(f"{path}: {name} is {quoted(value)}, not a token")
    return out


# ---- text of two origins -> ids


class GuardedEncoder:
    """Tokenises as the tokenizer does, but takes control tokens only from a template's own text.

    It is the same tokenizer (the model is shared) in which control tokens have other names, which nobody can
    guess: in the template's text each is replaced by its name, and in a message's text there is nothing to
    find. Tokenising trusted and other text apart would be simpler, but would split words where they meet.

    Control tokens are the special ones, and added ones which the template writes and which look like markers,
    such as <think>. These last the model may write too: an earlier answer's are taken. Other added tokens
    (runs of spaces, say) are text.
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
        """The ids of text[at:end]; both are the borders of spans."""
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
            raise UsageError("the conversation is not valid Unicode: it has a lone surrogate") from None

    def ends_at(self, text: str, spans: Sequence[Span], at: int) -> bool:
        """Whether the template writes a control token there: what follows is tokenised apart anyway."""
        own = next((text[a:b] for a, b, who in spans if a == at and who == OWN), "")
        return self.first_control(own) is not None

    def first_control(self, text: str) -> int | None:
        found = self._control.match(text)
        return None if found is None else self._controls[found[0]]


def _is_control(token: Added, template: str) -> bool:
    name = token.content
    return token.special or (name in template and MARKER.fullmatch(name) is not None)


def _any_of(tokens: Iterable[Added]) -> re.Pattern[str]:
    """As the library finds them: the first in the list wins; no letter stands beside a `single_word`."""
    found = [
        rf"(?<!\w){t}(?!\w)" if single else t
        for t, single in ((re.escape(t.content), t.single_word) for t in tokens)
    ]
    return re.compile("|".join(found) or r"(?!)")


def _unguessable() -> str:
    """Letters alone: no normaliser or whitespace rule knows them."""
    return "".join(secrets.choice(string.ascii_lowercase) for _ in range(24))
