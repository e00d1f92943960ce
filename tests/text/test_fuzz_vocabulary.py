"""Vocabularies with a wrong value in them, as tokenizer.json and as a GGUF's metadata: understood, or refused
in a line.

Mutants are made from fixed seeds, so a failure names the number that repeats it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf_files as g
import gguf_twins
import kept_twins
import numpy as np
import pytest
from test_fuzz_readers import _graft
from test_tokenizer_convert import byte_level, opened, sentencepiece_like

from thermocline.convert.from_gguf import inspect_gguf, tokenizer_files
from thermocline.convert.powerinfer import with_predictor
from thermocline.convert.tokenizers import from_gguf
from thermocline.errors import BadFile, ThermoclineError
from thermocline.files.gguf import GGUF
from thermocline.model.gguf_families import read_model
from thermocline.text.chat_template import GuardedEncoder
from thermocline.text.template_process import OWN
from thermocline.text.tokenizer import Tokenizer

MUTANTS = [25, pytest.param(600, marks=pytest.mark.slow)]  # of each kind
TEXT = "<s><|im_start|>he ab</s>"


def survives(mutant: str, read: Callable[[Any], object], what: Any) -> bool:
    """Whether `read` understood it; its refusal must be one line."""
    try:
        read(what)
        return True
    except ThermoclineError as e:
        message = str(e)
        assert message.isprintable() and len(message) < 1000, f"{mutant}: {message!r}"
    except Exception as e:
        pytest.fail(f"{mutant}: {type(e).__name__}: {e}")
    return False


# ---- tokenizer.json, in a chat


def guarded(tok: Tokenizer) -> list[int]:
    return GuardedEncoder(tok, "<|im_start|>").encode(TEXT, [(0, len(TEXT), OWN)], 0, len(TEXT))


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A node of the model or of the added tokens is replaced, moved or dropped; half the time an id is."""
    root: dict[str, Any] = json.loads(data)
    part, vocab = rng.choice(("added_tokens", "model")), root["model"]["vocab"]
    if rng.random() < 0.5:
        token = rng.choice(list(vocab))
        if rng.random() < 0.3:
            del vocab[token]
        else:
            vocab[token] = rng.choice((0, 1, vocab[token] + 64, 100_000, 1 << 31, (1 << 32) - 1))
    else:
        root[part] = json.loads(_graft(json.dumps({part: root[part]}).encode(), rng)).get(part)
    return json.dumps(root).encode()


@pytest.mark.parametrize("mutants", MUTANTS)
def test_a_chat_reads_or_refuses_a_damaged_tokenizer(tmp_path: Path, mutants: int) -> None:
    originals, understood = [from_gguf(make(), "x") for make in (byte_level, sentencepiece_like)], 0
    for i in range(mutants):
        rng = random.Random(i)
        mutant = mutated(rng.choice(originals), rng)
        understood += survives(f"mutant {i}", lambda data: guarded(opened(data, tmp_path)), mutant)
    assert mutants // 10 < understood < mutants


def test_a_vocabulary_with_ids_left_out_can_chat(tmp_path: Path) -> None:
    """The library counts tokens to number added ones, which gave a control token an ordinary one's id."""
    root = json.loads(from_gguf(byte_level(), "x"))
    del root["model"]["vocab"]["5"]
    tok = opened(json.dumps(root).encode(), tmp_path)
    assert guarded(tok) == tok.encode(TEXT, add_special=False, parse_special=True) != []


def test_ids_far_apart_are_refused(tmp_path: Path) -> None:
    root = json.loads(from_gguf(byte_level(), "x"))
    root["model"]["vocab"]["5"] = (1 << 32) - 1
    with pytest.raises(BadFile, match="has the token 4294967295"):
        opened(json.dumps(root).encode(), tmp_path)
    root["model"]["vocab"]["5"] = 1 << 20
    with pytest.raises(BadFile, match="262 tokens leave out 1048315 ids up to 1048576"):
        guarded(opened(json.dumps(root).encode(), tmp_path))


# ---- a GGUF's metadata


FAMILIES = {"llama_yarn": "llama", "gemma3": "gemma3", "phi3_longrope_long": "phi3", "nemotron": "nemotron"}
VALUES: list[Any] = [
    np.array([1, 2], np.int32), np.array([], np.float32), np.array([True]), np.linspace(0, 1, 2000),
    ["a", "b"], [], "", "two\nlines", 0, -1, 1 << 63, 1.5, float("nan"), True,
]  # fmt: skip
ABSENT = ["tokenizer.chat_template", "tokenizer.huggingface.json", "powerinfer.sparse_threshold"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[GGUF]]:
    pytest.importorskip("gguf")
    root = tmp_path_factory.mktemp("models")
    paths = [gguf_twins.write(kept_twins.write(n, root / n), root / f"{n}.gguf", arch=a)
             for n, a in FAMILIES.items()]  # fmt: skip
    opened = [GGUF(path) for path in paths]
    yield opened
    for one in opened:
        one.close()


@pytest.mark.parametrize("mutants", MUTANTS)
def test_any_value_in_a_ggufs_metadata_is_understood_or_refused(models: list[GGUF], mutants: int) -> None:
    understood = 0
    for i in range(mutants):
        rng = random.Random(i)
        gguf = rng.choice(models)
        before = gguf.metadata
        changed = before | rng.choice((byte_level, sentencepiece_like))()
        key = rng.choice([*changed, *ABSENT, f"{before['general.architecture']}.rope.scaling.type"])
        changed[key] = rng.choice(VALUES)
        gguf.metadata = changed
        try:
            for read in (tokenizer_files, lambda gguf: with_predictor(gguf, *read_model(gguf))):
                understood += survives(f"mutant {i}, {key}", read, gguf)
        finally:
            gguf.metadata = before
    assert mutants // 10 < understood < 2 * mutants


@pytest.mark.parametrize("key", ["general.name", "general.architecture", "tokenizer.ggml.model",
                                 "powerinfer.sparse_threshold"])  # fmt: skip
def test_an_array_where_inspect_shows_a_value_is_refused(key: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(g.gguf_file([(key, g.ARRAY, (g.F32, [0.5] * 200))], []).data)
    with pytest.raises(BadFile, match=rf"{key} is array\(\[0.5") as refused:
        inspect_gguf(path)
    assert str(refused.value).isprintable()
