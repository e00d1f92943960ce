"""Read text files as passages of token ids, each of which is computed on its own.

The same files, tokenizer and options give the same passages.
"""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thermocline.errors import BadFile, UsageError
from thermocline.files.bounded import open_regular, read_at
from thermocline.ops.interface import I32
from thermocline.pack.stored_model import StoredModel
from thermocline.text.tokenizer import FILE, Tokenizer

CONTEXT = 512
PIECE_BYTES = 256 << 10  # read and tokenised at a time


@dataclass(frozen=True)
class Corpus:
    """Passages of token ids. `prefix` (the beginning-of-text token) precedes each and is not counted."""

    name: str
    prefix: I32
    passages: tuple[I32, ...]
    sha256: str  # of the ids and the positions of the cuts

    @property
    def tokens(self) -> int:
        return self.tokens_before(len(self.passages))

    def tokens_before(self, passage: int) -> int:
        """Return the tokens of all passages before this one."""
        return sum(map(len, self.passages[:passage]))


def passage_tokens(context: int, prefix: int, unit: int) -> int:
    """Return the tokens of a full passage: whole windows of `unit` tokens. Raises UsageError."""
    size = (context - prefix) // unit * unit
    if size < unit:
        raise UsageError(f"a context of {context} tokens is too short: {unit + prefix} at least")
    return size


def read_corpus(pack: StoredModel, files: Sequence[str], tokens: int, context: int, unit: int) -> Corpus:
    """Read at most `tokens` tokens (-1: all) of the files, in passages for a context of `context` tokens.

    Passages are taken from the files in turn, so that each has its part. A token takes 4 bytes of memory.
    Raises UsageError, BadFile or IOFailure.
    """
    if not pack.small_files.has(FILE):
        raise UsageError(
            f"{pack.path}: has no tokenizer for a corpus; leave --corpus out to use random tokens"
        )
    tokenizer = Tokenizer(pack.small_files, pack.spec)
    bos = pack.spec.bos_id
    prefix = [bos] if bos is not None and tokenizer.encode("a")[:1] == [bos] else []
    size = passage_tokens(context, len(prefix), unit)
    queues = [_passages(Path(f), tokenizer, size) for f in files]
    passages: list[I32] = []
    while queues and tokens:
        for queue in list(queues):
            found = next(queue, None)
            if found is None:
                queues.remove(queue)
            elif tokens:
                passages.append(found if tokens < 0 else found[:tokens])
                tokens -= len(passages[-1]) if tokens > 0 else 0
    return _corpus(", ".join(files), prefix, passages, unit)


def random_corpus(pack: StoredModel, tokens: int, context: int, unit: int, seed: int = 1) -> Corpus:
    """Make a corpus of random tokens, for a pack without a tokenizer (from `synth`)."""
    size = passage_tokens(context, 0, unit)
    usable = np.setdiff1d(np.arange(pack.spec.vocab_size), pack.spec.eos_ids)
    ids = np.random.default_rng(seed).choice(usable, tokens).astype(np.int32)
    passages = [ids[at : at + size] for at in range(0, tokens, size)]
    return _corpus(f"random tokens, seed {seed}", [], passages, unit)


def _corpus(name: str, prefix: list[int], passages: list[I32], unit: int) -> Corpus:
    n = sum(map(len, passages))
    if n == 0:
        raise UsageError(f"{name}: holds no text to profile with; give other files")
    if max(map(len, passages)) < unit:
        raise UsageError(
            f"{name}: too short to profile with: {n} tokens; a text of at least {unit} is needed"
        )
    digest = hashlib.sha256(np.array(prefix, "<i4").tobytes())
    for p in passages:
        digest.update(len(p).to_bytes(4, "little") + p.astype("<i4").tobytes())
    return Corpus(name, np.array(prefix, np.int32), tuple(passages), digest.hexdigest())


def _passages(path: Path, tokenizer: Tokenizer, size: int) -> Iterator[I32]:
    """Yield a file's tokens, without end-of-text tokens, in passages of `size`. The last may be shorter."""
    ids: list[int] = []
    for text in _pieces(path):
        found = tokenizer.encode(text, add_special=False, parse_special=True)
        ids += [i for i in found if i not in tokenizer.eos_ids]
        whole = len(ids) // size * size
        for at in range(0, whole, size):
            yield np.array(ids[at : at + size], np.int32)
        del ids[:whole]
    if ids:
        yield np.array(ids, np.int32)


def _pieces(path: Path) -> Iterator[str]:
    """Yield a file's text, cut at line ends. The file is open only while it is read: there may be many."""
    decoder, at, held = codecs.getincrementaldecoder("utf-8-sig")(), 0, ""
    while True:
        fd, size = open_regular(path)
        try:
            data = read_at(fd, at, min(PIECE_BYTES, size - at), path).tobytes()
        finally:
            os.close(fd)
        try:
            held += decoder.decode(data, final=at + len(data) >= size)
        except UnicodeDecodeError as e:
            byte = e.object[e.start]
            raise BadFile(f"{path}: not UTF-8 text: 0x{byte:02x} at about byte {at + e.start}") from None
        if "\0" in held:
            raise BadFile(f"{path}: not text: has a zero byte after byte {at}")
        at += len(data)
        if at >= size:
            break
        cut = held.rfind("\n") + 1 or len(held)
        yield held[:cut]
        held = held[cut:]
    if held:
        yield held
