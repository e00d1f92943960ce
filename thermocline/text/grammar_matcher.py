"""Enforce grammars: which tokens of a model's vocabulary may come next, by the library `llguidance`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import Unsupported, UsageError
from thermocline.text.confined_process import ConfinedProcess, ProcessEnded, paths_of
from thermocline.text.grammar import KINDS, Grammar
from thermocline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WORKER = "thermocline.text.grammar_worker"
WAIT_S = 10.0  # limit for a trial that does not get its second of processor time
VERDICTS = 4096  # remembered; about 1 MiB
KEPT = 32  # compiled grammars; the least recently used is dropped first

Mask = NDArray[np.bool_]


class Grammars:
    """Constraints for one tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._vocabulary: GrammarVocabulary | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def constraint(
        self, grammar: Grammar, stop_ids: Sequence[int] = (), *, checked: bool = False
    ) -> GrammarConstraint:
        """Return the constraint of one answer, which the tokenizer's eos and `stop_ids` end.

        Raise UsageError if the grammar cannot be enforced. `checked`: `check` has passed it already, here or
        in another process of this program.
        """
        if not checked:
            check(grammar)
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = GrammarVocabulary(self._tokenizer)
            matcher = self._compiled.pop(grammar, None) or _compiled(self._vocabulary, grammar)
            self._compiled[grammar] = matcher
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            ends = (*self._tokenizer.eos_ids, *stop_ids)
            named = grammar.kind == "answer"  # we wrote it, and it names only a template's marks
            return GrammarConstraint(matcher.deep_copy(), self._vocabulary, ends, controls=named)


class GrammarVocabulary:
    """A tokenizer as the library sees it: the bytes of each token that writes text, and an end token.

    Control tokens have no bytes, so that no client's grammar can write one. `controls` has their ids by name,
    for the marks of templates. The end is an extra id, since a model may have several end tokens, or none.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        self.size = self.eos_token_id = tokenizer.vocab_size
        self.bos_token_id = None
        self.special_token_ids = (self.size,)
        silent = [tokenizer.is_control(i) or i in tokenizer.eos_ids for i in range(self.size)]
        self.tokens = [b"" if s else tokenizer.token_bytes(i) for i, s in enumerate(silent)] + [b"<end>"]
        self.writes: Mask = np.array([len(t) > 0 for t in self.tokens[:-1]], np.bool_)
        self.controls = {tokenizer.name(i): i for i, s in enumerate(silent) if s}
        self._encode = tokenizer.encode
        self.there: LLTokenizer = LLTokenizer(TokenizerWrapper(self))

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that the grammar dictates: the tokenizer's own, if they spell it.

        They may not: SentencePiece adds a space at the start, and a control token has no bytes.
        """
        with contextlib.suppress(UsageError):
            ids = self._encode(text, add_special=False)
            if b"".join(self.tokens[i] for i in ids) == text.encode():
                return ids
        return list(self.there.greedy_tokenize(text))


class GrammarConstraint:
    """A `Constraint`: one answer's place in its grammar."""

    def __init__(
        self, matcher: LLMatcher, vocabulary: GrammarVocabulary, ends: Sequence[int], *, controls: bool
    ) -> None:
        """`controls`: the grammar may name them."""
        self._matcher, self._vocabulary, self._ends = matcher, vocabulary, list(ends)
        self._controls = controls
        self._ended = False

    def allowed(self) -> Mask:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise UsageError(f"the grammar cannot go on here: {_line(self._matcher.get_error())}")
        there = np.unpackbits(bits, count=self._vocabulary.size + 1, bitorder="little").view(np.bool_)
        mask: Mask = there[:-1]
        if not self._controls:  # a client's grammar could name control tokens by number
            mask &= self._vocabulary.writes
        mask[self._ends] = there[-1]
        return mask

    def accept(self, token: int) -> None:
        if token in self._ends:
            self._ended = True
        elif not self._matcher.consume_token(token):
            raise UsageError(f"the grammar cannot go on here: {_line(self._matcher.get_error())}")

    def is_complete(self) -> bool:
        return self._ended or self._matcher.is_stopped()


class _Verdicts:
    """The error of each grammar that was tried, or "". Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[bytes, str] = OrderedDict()  # by a hash: texts may have 64 KiB

    def get(self, grammar: Grammar) -> str | None:
        key = self._key(grammar)
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
            return self._found.get(key)

    def put(self, grammar: Grammar, why: str) -> None:
        with self._lock:
            self._found[self._key(grammar)] = why
            if len(self._found) > VERDICTS:
                self._found.popitem(last=False)

    @staticmethod
    def _key(grammar: Grammar) -> bytes:
        return hashlib.sha256(f"{grammar.kind}\n{grammar.text}".encode()).digest()


_verdicts = _Verdicts()


def is_tried(grammar: Grammar) -> bool:
    """Tell whether `check` knows its answer without a trial."""
    return _verdicts.get(grammar) is not None or _is_ours(grammar)


def check(grammar: Grammar) -> None:
    """Raise UsageError if the grammar cannot be enforced. This takes about a second at most, and no model.

    The trial runs in a process that can be killed: compiling a client's grammar may take for ever or crash.
    """
    path = _library()
    why = _verdicts.get(grammar)
    if why is None:
        why = "" if _is_ours(grammar) else _tried(grammar, path)
    if why:
        raise UsageError(f"the {KINDS[grammar.kind]} cannot be enforced: {why}")


def _is_ours(grammar: Grammar) -> bool:
    """Tell whether no part of the grammar is a client's: any JSON object, maybe after a thought."""
    if grammar.kind != "answer":
        return grammar == Grammar.json_object()
    form = json.loads(grammar.text)
    return form["calls"] is None and form["content"] == {"type": "object"}


def _tried(grammar: Grammar, path: list[str]) -> str:
    """Try a grammar; return its error or "". An error that may not recur is not remembered."""
    process = ConfinedProcess(WORKER, path)
    try:
        why = _line(process.ask(f"{grammar.kind}\n{grammar.text}".encode(), WAIT_S).decode(errors="replace"))
    except ProcessEnded as e:
        why = f"it {e}"
        if e.killed:  # the grammar may be blameless
            return why
    finally:
        process.close()
    _verdicts.put(grammar, why)
    return why


def _compiled(vocabulary: GrammarVocabulary, grammar: Grammar) -> LLMatcher:
    from llguidance import LLMatcher

    from thermocline.text.grammar_worker import limits, source

    text = source(grammar.kind, grammar.text, vocabulary.controls)
    matcher = LLMatcher(vocabulary.there, text, log_level=0, limits=limits())
    if matcher.is_error():
        why = _line(matcher.get_error())
        raise UsageError(f"the {KINDS[grammar.kind]} cannot be enforced with this model's vocabulary: {why}")
    return matcher


def _library() -> list[str]:
    """Return the library's directory. Raise Unsupported if it is not installed."""
    try:
        return paths_of("llguidance")
    except LookupError:
        raise Unsupported(
            "grammars and JSON schemas need llguidance; install it with `pip install 'thermocline[server]'`"
        ) from None


def _line(text: str) -> str:
    return " ".join(text.replace("<non-verbose/>", "").split())[:300]
