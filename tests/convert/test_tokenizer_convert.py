"""Vocabularies out of GGUF and SentencePiece files: the originals' ids; what is wrong is refused."""

from __future__ import annotations

import copy
import json
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kept_twins
import numpy as np
import pytest
import random_text
from random_text import DATA, REAL, TOKENIZERS

from thermocline import LLM, SamplingParams
from thermocline.convert import importer, pack_cache
from thermocline.convert.from_gguf import tokenizer_files
from thermocline.convert.pretokenizers import PRE_TOKENIZERS
from thermocline.convert.tokenizers import from_directory, from_gguf, from_sentencepiece
from thermocline.errors import BadFile, ThermoclineError, Unsupported, UsageError
from thermocline.files import sentencepiece as sentencepiece_model
from thermocline.files.gguf import GGUF
from thermocline.model.spec import ModelSpec
from thermocline.text.chat_template import GuardedEncoder
from thermocline.text.template_worker import FOREIGN
from thermocline.text.tokenizer import BYTE_OF, Tokenizer

tokenizers = pytest.importorskip("tokenizers")

VECTORS = sorted((DATA / "gguf_vocab").glob("*.gguf")) if DATA.is_dir() else []
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not here")


def opened(data: bytes, directory: Path, spec: ModelSpec | None = None) -> Tokenizer:
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_bytes(data)
    return Tokenizer(directory, spec)


# ---- small files of both kinds


def byte_level(**changed: Any) -> dict[str, Any]:
    tokens = ["<s>", "</s>", *BYTE_OF, "he", "Ġhe", "<|im_start|>", "    "]
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": np.array([3, 3] + [1] * 258 + [3, 4], np.int32),
        "merges": ["h e", "Ġ he"],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in {**values, **changed}.items() if v is not None}


PIECES = ["▁", "a", "b", "ab", "▁ab", "aa", "▁▁", "<", "s", ">", "<s", "日"]


def sentencepiece_like(**changed: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES]
    values = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        "scores": np.array([0.0] * 259 + [-float(i) for i in range(len(PIECES))], np.float32),
    }
    return {f"tokenizer.ggml.{k}": v for k, v in {**values, **changed}.items() if v is not None}


def _field(number: int, value: bytes | int | float) -> bytes:
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(n: int) -> bytes:
    out = b""
    while n > 0x7F:
        out, n = out + bytes([n & 0x7F | 0x80]), n >> 7
    return out + bytes([n])


def model_file(trainer: bytes = _field(3, 2), normalizer: bytes = _field(4, 0), pieces: bytes = b"") -> bytes:
    meta = sentencepiece_like()
    rows = zip(*(meta[f"tokenizer.ggml.{k}"] for k in ("tokens", "scores", "token_type")), strict=True)
    body = b"".join(_field(1, _field(1, t.encode()) + _field(2, float(s)) + _field(3, k)) for t, s, k in rows)
    return body + pieces + _field(2, trainer) + _field(3, normalizer)


# ---- the originals' ids


@pytest.mark.shared
@needs_data
@pytest.mark.parametrize("path", VECTORS, ids=lambda p: p.stem)
def test_every_vector_of_llama_cpp_is_met(path: Path, tmp_path: Path) -> None:
    with GGUF(path) as gguf:
        tok = opened(tokenizer_files(gguf)["tokenizer.json"], tmp_path)
    text = "Once upon a time,  日本 3.14\n"
    assert tok.decode(tok.encode(text)) == text
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().split("\n")[: len(texts)]
    assert len(texts) == len(lines) == 47
    for text, line in zip(texts, lines, strict=True):
        assert tok.encode(text, add_special=False) == [int(i) for i in line.split()], repr(text)


@pytest.mark.shared
@needs_data
@pytest.mark.parametrize("name", REAL)
def test_random_texts_have_the_original_librarys_ids_and_text(name: str, tmp_path: Path) -> None:
    """`python tests/random_text.py` does 100,000 of them."""
    if name in ("llama2", "mistral"):
        pytest.importorskip("sentencepiece")
    assert random_text.compare(REAL[name](tmp_path), 0, 1000) == []


@pytest.mark.shared
@needs_data
@pytest.mark.parametrize("name", ["llama2", "gpt2", "neox"])
def test_time_is_linear_in_the_length(name: str, tmp_path: Path) -> None:
    tok, _, _ = REAL[name](tmp_path)

    def seconds(run: str, size: int) -> float:
        text, times = run * (size // len(run.encode())), []
        for _ in range(2):
            begin = time.thread_time()
            tok.encode(text)
            times.append(time.thread_time() - begin)
        return min(times)

    for run in ("a", "7", " ", "\n", "👍", " \n", "!"):
        assert seconds(run, 1 << 17) < 10 * seconds(run, 1 << 15) + 0.05, run  # 4 is linear, 16 quadratic


def trained(directory: Path, **options: Any) -> Any:
    """A SentencePiece model of this repository's own texts, made as Gemma's: Google's library on it."""
    sentencepiece = pytest.importorskip("sentencepiece")
    texts = sorted((Path(__file__).parents[2] / "docs").glob("[gi]*/*.md"))
    lines = [line for path in texts for line in path.read_text("utf-8").splitlines() if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=800,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **{"model_type": "bpe", "add_dummy_prefix": False, "split_digits": True} | options,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))


USER_DEFINED = ["<start_of_turn>", "<end_of_turn>", "<unused0>", "\n\n", "\n\n\n", "\t\t", "▁▁", "▁▁▁▁"]


@pytest.mark.parametrize("options", [{}, {"split_by_whitespace": False}], ids=["words", "phrases"])
def test_a_model_made_as_gemmas_cuts_text_as_googles_library(options: dict[str, Any], tmp_path: Path) -> None:
    """BPE with byte fallback and user-defined symbols, newlines and runs of spaces among them."""
    theirs = trained(tmp_path, user_defined_symbols=USER_DEFINED, **options)
    data = from_sentencepiece(tmp_path / "tokenizer.model")
    crossing = any("▁" in theirs.id_to_piece(i).lstrip("▁") for i in range(len(theirs)))
    assert crossing == bool(options) == (json.loads(data)["pre_tokenizer"] is None)
    tok = opened(data, tmp_path)
    rng, spliced = random.Random(3), 0

    def piece() -> str:
        # Google's library takes a "▁▁" that stands in the text for two spaces if those are user-defined.
        return random_text.random_text(rng).replace("\0", "").replace("▁", "_")

    for _ in range(1500):
        text = piece()
        if rng.random() < 0.4:
            text += rng.choice(USER_DEFINED[2:]).replace("▁", " ") + piece()
        ids = theirs.encode(text)
        spliced += any(theirs.id_to_piece(i) in USER_DEFINED for i in ids)
        if "_of_turn>" not in text:  # which we never take from plain text
            assert tok.encode(text, add_special=False) == ids, repr(text)
    assert spliced > 300
    assert tok.encode("a<start_of_turn>b", add_special=False, parse_special=True) == theirs.encode(
        "a<start_of_turn>b"
    )


def test_a_gguf_and_a_model_file_of_the_same_pieces_are_the_same_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model_file())
    assert from_sentencepiece(tmp_path / "tokenizer.model") == from_gguf(sentencepiece_like(), "x.gguf")


def test_merges_follow_the_scores(tmp_path: Path) -> None:
    tok = opened(from_gguf(sentencepiece_like(), "x"), tmp_path)

    def pieces(text: str) -> list[str]:
        return [tok.name(i) for i in tok.encode(text)]

    assert pieces("abaab日é") == ["<s>", "▁ab", "a", "ab", "日", "<0xC3>", "<0xA9>"]
    better = sentencepiece_like()
    better["tokenizer.ggml.scores"][259 + PIECES.index("aa")] = -2.5  # before ab
    tok = opened(from_gguf(better, "x"), tmp_path)
    assert pieces("abaab") == ["<s>", "▁ab", "aa", "b"]


def test_pieces_may_come_with_their_merges(tmp_path: Path) -> None:
    """As Gemma 4's do: no space before a text, newlines and spaces merge like all else."""
    tokens = ["<pad>", "<bos>", "<unk>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES, "\n", "\n\n"]
    meta = sentencepiece_like(
        model="gemma4",
        tokens=tokens,
        token_type=[3, 3, 2] + [6] * 256 + [1] * (len(PIECES) + 2),
        scores=None,
        merges=["a a", "a b", "▁ ab", "▁ ▁", "\n \n"],
        bos_token_id=1,
        add_bos_token=True,
    )
    tok = opened(from_gguf(meta, "x"), tmp_path)

    def pieces(text: str) -> list[str]:
        return [tok.name(i) for i in tok.encode(text)]

    assert pieces("abaab é\n\n") == ["<bos>", "ab", "aa", "b", "▁", "<0xC3>", "<0xA9>", "\n\n"]
    assert pieces(" ab  b") == ["<bos>", "▁ab", "▁▁", "b"]
    assert tok.decode(tok.encode(" ab  b\n")) == " ab  b\n"
    meta["tokenizer.ggml.merges"] = ["a q"]
    with pytest.raises(BadFile, match=r"merges\[0\] 'a q' is not of two tokens that make a third"):
        from_gguf(meta, "x")


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_what_goes_around_a_text_is_as_the_file_says(
    make: Callable[..., dict[str, Any]], bos: bool, eos: bool, tmp_path: Path
) -> None:
    meta = make(add_bos_token=bos, add_eos_token=eos, bos_token_id=1, eos_token_id=0)
    tok = opened(from_gguf(meta, "x"), tmp_path)
    assert tok.encode("ab") == [1] * bos + tok.encode("ab", add_special=False) + [0] * eos


def test_the_space_before_a_text_is_as_the_file_says(tmp_path: Path) -> None:
    with_space = opened(from_gguf(sentencepiece_like(), "x"), tmp_path / "a")
    without = opened(from_gguf(sentencepiece_like(add_space_prefix=False), "x"), tmp_path / "b")
    assert without.encode(" ab") == with_space.encode("ab") != without.encode("ab")
    assert (with_space.decode(with_space.encode(" ab")), without.decode(without.encode(" ab"))) == (
        " ab",
    ) * 2


def test_a_file_without_pre_is_known_by_its_architecture_or_refused(tmp_path: Path) -> None:
    old = {**byte_level(pre=None), "general.architecture": "falcon"}
    assert b"[0-9][0-9][0-9]" in from_gguf(old, "x")
    with pytest.raises(Unsupported, match=r"x\.gguf: has no tokenizer\.ggml\.pre"):
        from_gguf({**old, "general.architecture": "qwen2"}, "x.gguf")


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_all_text_in_linear_time(pre: str, tmp_path: Path) -> None:
    tok, rng = opened(from_gguf(byte_level(pre=pre), "x"), tmp_path), random.Random(0)
    normal = b'"normalizer": {"type": "NFC"}' in (tmp_path / "tokenizer.json").read_bytes()
    for _ in range(50):
        text = random_text.random_text(rng)
        if normal:
            text = tokenizers.normalizers.NFC().normalize_str(text)
        assert tok.decode(tok.encode(text, add_special=False)) == text
    for run in ("A", "a\u0301", " ", "\n ", "7", "."):
        times = []
        for size in (1 << 13, 1 << 15):
            begin = time.thread_time()
            tok.encode(run * size)
            times.append(time.thread_time() - begin)
        assert times[1] < 10 * times[0] + 0.05


CUTS = {  # texts that tell the families apart: the words before merging
    "gpt-2": ["It", "'s", " 2024", ",", " ", " OK", "'", "LL"],
    "falcon": ["It", "'", "s", " ", "202", "4", ",", " ", " OK", "'", "LL"],
    "smollm": ["It", "'s", " ", "2", "0", "2", "4", ",", " ", " OK", "'", "LL"],
    "llama-bpe": ["It", "'s", " ", "202", "4", ",", " ", " OK", "'LL"],
    "command-r": ["It", "'s", " ", "2", "0", "2", "4", ",", " ", " OK", "'", "LL"],
    "stablelm2": ["It", "'s", " ", "2", "0", "2", "4", ",", " ", " OK", "'LL"],
    "qwen2": ["It", "'s", " ", "2", "0", "2", "4", ",", " ", " OK", "'LL"],
    "tekken": ["It", "'s", " ", "2", "0", "2", "4", ",", " ", " OK", "'LL"],
    "gpt-4o": ["It's", " ", "202", "4", ",", " ", " OK'LL"],
    "kimi-k2": ["It's", " ", "202", "4", ",", " ", " OK'LL"],
    "deepseek-llm": ["It", "'", "s", " ", "2024", ",", " ", " OK", "'", "LL"],
}


@pytest.mark.parametrize("pre", CUTS)
def test_each_family_cuts_words_in_its_own_way(pre: str) -> None:
    text = "It's 2024,  OK'LL"
    lib = tokenizers.Tokenizer.from_str(from_gguf(byte_level(pre=pre), "x").decode())
    spans = [span for _, span in lib.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[a:b] for a, b in spans] == CUTS[pre]


@pytest.mark.parametrize(("pre", "cuts"), [("qwen2", ["क", "ाम"]), ("qwen35", ["काम"])])
def test_marks_belong_to_words_in_the_newer_qwens(pre: str, cuts: list[str]) -> None:
    lib = tokenizers.Tokenizer.from_str(from_gguf(byte_level(pre=pre), "x").decode())
    assert ["काम"[a:b] for _, (a, b) in lib.pre_tokenizer.pre_tokenize_str("काम")] == cuts


# ---- control tokens


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_text_becomes_control_tokens_only_when_asked(
    make: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    tok = opened(from_gguf(make(), "x"), tmp_path)
    assert 0 not in tok.encode("a<s>b</s>", add_special=False)
    assert tok.decode(tok.encode("a<s>b</s>")) == "a<s>b</s>"
    parsed = tok.encode("a<s>b", add_special=False, parse_special=True)
    assert sum(map(tok.is_special, parsed)) == 1 and tok.decode(parsed).replace(" ", "") == "ab"


def test_added_tokens_that_are_no_control_tokens_are_always_found(tmp_path: Path) -> None:
    tok = opened(from_gguf(byte_level(), "x"), tmp_path)
    assert tok.encode("he    he").count(261) == 1


@pytest.mark.parametrize("name", ["<|im_start|>", "<｜User｜>", "<start_of_turn>"])
def test_a_control_token_that_its_file_calls_ordinary_is_one_by_its_look(name: str, tmp_path: Path) -> None:
    meta = byte_level()
    meta["tokenizer.ggml.tokens"][260] = name
    meta["tokenizer.ggml.token_type"][260] = 4
    tok = opened(from_gguf(meta, "x"), tmp_path)
    assert 260 not in tok.encode(f"he{name}") and tok.decode(tok.encode(f"he{name}")) == f"he{name}"
    assert 260 in tok.encode(f"he{name}", parse_special=True)


def test_phi_3s_end_that_its_file_calls_ordinary_is_a_control_token(tmp_path: Path) -> None:
    """Its eos is another, so no key names "</s>", and a user who typed it ended the text."""
    kinds = [2, 3, 4] + [6] * 256 + [1] * len(PIECES)
    tok = opened(from_gguf(sentencepiece_like(token_type=kinds), "x"), tmp_path)
    assert 2 not in tok.encode("ab</s>") and tok.decode(tok.encode("ab</s>")) == "ab</s>"
    assert 2 not in GuardedEncoder(tok, "").encode("ab</s>", [(0, 6, FOREIGN)], 0, 6)
    assert 2 in tok.encode("ab</s>", parse_special=True)


@pytest.mark.shared
@needs_data
@pytest.mark.parametrize("path", VECTORS, ids=lambda p: p.stem)
def test_no_text_writes_a_control_token_of_a_real_vocabulary(path: Path, tmp_path: Path) -> None:
    with GGUF(path) as gguf:
        tok = opened(tokenizer_files(gguf)["tokenizer.json"], tmp_path)
        kinds = gguf.metadata["tokenizer.ggml.token_type"]
        names = [
            t for t, kind in zip(gguf.metadata["tokenizer.ggml.tokens"], kinds, strict=True) if kind in (3, 4)
        ]
    id_of = {tok.name(i): i for i in range(tok.vocab_size)}
    for name in ["</s>", *names]:
        ids = tok.encode(f"a {name} b", add_special=False)
        assert id_of.get(name) not in ids and not any(map(tok.is_special, ids)), name


@pytest.mark.parametrize("kind", [1, 3, 4], ids=["normal", "control", "user-defined"])
def test_the_models_ends_are_control_tokens_whatever_the_file_calls_them(kind: int, tmp_path: Path) -> None:
    meta = byte_level()
    meta["tokenizer.ggml.tokens"][260] = "[E]"
    meta["tokenizer.ggml.tokens"][258:260] = ["[E", "E]"]
    meta["tokenizer.ggml.token_type"][260] = kind
    meta["tokenizer.ggml.merges"] = ["[ E", "E ]", "[E ]"]
    for which in ({"eos_ids": (1, 260)}, {"bos_id": 260}):
        spec = ModelSpec("test", 8, 8, 1, 1, 1, 8, 262, 64, "rms", 1e-5, "relu", **which)
        tok = opened(from_gguf(meta, "x"), tmp_path, spec)
        for text in ("he[E]", "[E]", "[E][E] he"):
            assert 260 not in tok.encode(text) and tok.decode(tok.encode(text)) == text
        assert tok.encode("he[E]", add_special=False, parse_special=True)[-1] == 260
        assert tok.is_control(260)


def test_a_word_that_ends_texts_is_still_a_word(tmp_path: Path) -> None:
    """A newline, say, ends the answers of some models, and may stand in any prompt."""
    newline = byte_level()["tokenizer.ggml.tokens"].index("Ċ")
    spec = ModelSpec("test", 8, 8, 1, 1, 1, 8, 262, 64, "rms", 1e-5, "relu", eos_ids=(newline,))
    tok = opened(from_gguf(byte_level(), "x"), tmp_path, spec)
    assert tok.encode("\n", add_special=False) == [newline] and not tok.is_control(newline)


def test_a_control_token_that_merging_itself_makes_is_spelt(tmp_path: Path) -> None:
    """Some tokenizer.json have merges up to "</s>", so that plain text ended the turn."""
    root = json.loads(from_gguf(sentencepiece_like(), "x"))
    root["model"]["merges"] += [["<", "s"], ["<s", ">"]]
    tok = opened(json.dumps(root).encode(), tmp_path)
    assert tok.name(1) == "<s>"
    ids = tok.encode("ab<s>")
    assert ids[0] == 1 and 1 not in ids[1:] and tok.decode(ids) == "ab<s>"


def test_an_unknown_character_is_the_unknown_token(tmp_path: Path) -> None:
    meta = sentencepiece_like()
    meta["tokenizer.ggml.tokens"] = [t.replace("<0x", "<1x") for t in meta["tokenizer.ggml.tokens"]]
    meta["tokenizer.ggml.token_type"] = [1 if k == 6 else k for k in meta["tokenizer.ggml.token_type"]]
    assert opened(from_gguf(meta, "x"), tmp_path).encode("ab é")[-1] == 0


def test_phi_3s_control_tokens_swallow_the_space_after_them(tmp_path: Path) -> None:
    meta = {**sentencepiece_like(), "general.name": "Phi3"}
    tok = opened(from_gguf(meta, "x"), tmp_path)
    assert tok.encode("</s>  ab", parse_special=True) == tok.encode("</s>ab", parse_special=True)


# ---- directories


def test_a_directory_with_a_model_file_has_its_added_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model_file())
    end = 259 + len(PIECES)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": end}))
    decoder = {str(end): {"content": "<|im_end|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": decoder, "add_bos_token": False})
    )
    tok = opened(from_directory(tmp_path), tmp_path)
    assert tok.encode("ab<|im_end|>", parse_special=True) == [*tok.encode("ab"), end]
    assert tok.encode("ab")[0] != 1 and tok.is_special(end)


@pytest.mark.parametrize("added", [{"x": 9999}, {"x": 5}, {"x": -1}, {"x": "y"}, {"x": None}])
def test_added_tokens_that_do_not_fit_are_refused(added: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model_file())
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    with pytest.raises(BadFile):
        from_directory(tmp_path)


def test_a_packed_directory_with_only_a_model_file_tokenises(tmp_path: Path) -> None:
    kept_twins.write("llama", tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.model").write_bytes(model_file())
    before = pack_cache.source_hash(tmp_path / "hf")
    importer.pack(tmp_path / "hf", tmp_path / "pack", "f32")
    tok = Tokenizer(tmp_path / "pack")
    assert tok.decode(tok.encode("ab é")) == "ab é"
    (tmp_path / "hf" / "tokenizer.model").write_bytes(model_file(normalizer=_field(3, 0) + _field(4, 0)))
    assert pack_cache.source_hash(tmp_path / "hf") != before, "another tokenizer is another pack in the cache"


def test_a_prompt_may_write_control_tokens_and_text_may_not(tiny_pack: Path) -> None:
    with LLM(tiny_pack) as llm:
        name = llm.tokenizer._controls[llm.spec.bos_id or 0]
        both = [llm.generate(p, SamplingParams(max_tokens=1)).figures.prompt_tokens for p in (name, name * 3)]
    assert both[1] - both[0] == 2


# ---- files that are not what they should be


BAD_GGUF: dict[str, tuple[dict[str, Any], str]] = {
    "no model": (byte_level(model=None), "model is missing"),
    "tokens are numbers": (byte_level(tokens=[1, 2]), r"tokens\[0\] is 1"),
    "no tokens": (byte_level(tokens=None), "tokens is missing"),
    "empty": (byte_level(tokens=[], token_type=[], bos_token_id=None, eos_token_id=None), "0 tokens"),
    "a token twice": (byte_level(tokens=["a", "a"], token_type=[1, 1]), "both 'a'"),
    "a surrogate": (byte_level(tokens=["\ud800"]), "tokens"),
    "a long token": (byte_level(tokens=["x" * 5000]), "at most 4096"),
    "types too few": (byte_level(token_type=[1]), "token_type has 1 entries for 262 tokens"),
    "type 9": (byte_level(token_type=[9] * 262), r"token_type\[0\] is 9"),
    "a merge of one": (byte_level(merges=["he"]), r"merges\[0\]"),
    "a merge of nothing known": (byte_level(merges=["x y"]), r"merges\[0\]"),
    "merges missing": (byte_level(merges=None), "merges is missing"),
    "bos outside": (byte_level(bos_token_id=262), "0 to 261"),
    "bos is true": (byte_level(bos_token_id=True), "bos_token_id"),
    "flag is text": (byte_level(add_bos_token="yes"), "true or false"),
    "eos outside": (byte_level(eos_token_id=-1), "eos_token_id is -1"),
    "scores missing": (sentencepiece_like(scores=None), "scores is missing"),
    "scores too few": (sentencepiece_like(scores=[0.0]), "scores has 1 entries"),
    "a score NaN": (sentencepiece_like(scores=[float("nan")] * (259 + len(PIECES))), r"scores\[0\]"),
    "no bytes, no unknown": (sentencepiece_like(tokens=["a"], token_type=[1], scores=[0]), "would be lost"),
    "byte -1": (sentencepiece_like(tokens=["<0x-1>", "<unk>"], token_type=[6, 2], scores=[0, 0]), "<0x-1>"),
    "a long piece": (sentencepiece_like(tokens=["?", "a" * 300], token_type=[2, 1], scores=[0, 0]), "300"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_GGUF)
def test_a_malformed_gguf_vocabulary_is_refused_in_one_line(case: str) -> None:
    metadata, message = BAD_GGUF[case]
    with pytest.raises(BadFile, match=message) as refused:
        from_gguf(metadata, "m.gguf")
    assert str(refused.value).startswith("m.gguf: ") and "\n" not in str(refused.value)


def test_bytes_of_everyday_text_must_have_tokens() -> None:
    with pytest.raises(BadFile, match="no token for the byte 0x21"):
        from_gguf(byte_level(tokens=["a"], token_type=[1], merges=[], bos_token_id=0, eos_token_id=0), "m")


@pytest.mark.parametrize("key, value", [("model", "bert"), ("pre", "klingon"), ("pre", "default")])
def test_an_unknown_kind_is_refused_by_name(key: str, value: str) -> None:
    with pytest.raises(Unsupported, match=f"tokenizer.ggml.{key} '{value}' is not known"):
        from_gguf(byte_level(**{key: value}), "m.gguf")


BAD_MODEL: dict[str, tuple[bytes, type[ThermoclineError], str]] = {
    "empty": (b"", BadFile, "an empty file"),
    "html": (b"<html>", BadFile, "HTML"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\n", BadFile, "git-lfs"),
    "json": (b'{"a": 1}', BadFile, "not a SentencePiece model"),
    "cut": (model_file()[:-2], BadFile, "truncated"),
    "cut in a number": (b"\x0a\xff", BadFile, "ends inside a number"),
    "endless number": (b"\xff" * 20, BadFile, "more than 10 bytes"),
    "2**60 bytes": (b"\x0a" + _varint(2**60), BadFile, "truncated"),
    "not UTF-8": (model_file(pieces=_field(1, _field(1, b"\xff"))), BadFile, "not UTF-8"),
    "score inf": (model_file(pieces=_field(1, _field(1, b"x") + _field(2, float("inf")))), BadFile, "inf"),
    "type 7": (model_file(pieces=_field(1, _field(1, b"x") + _field(3, 7))), BadFile, "type 7"),
    "unigram": (model_file(trainer=_field(3, 1)), Unsupported, "unigram"),
    "unigram by default": (model_file(trainer=b""), Unsupported, "unigram"),
    "charsmap": (model_file(normalizer=_field(4, 0) + _field(2, b"x")), Unsupported, "nmt_nfkc"),
    "squeezes spaces": (model_file(normalizer=b""), Unsupported, "spaces"),
    "suffix": (model_file(trainer=_field(3, 2) + _field(24, 1)), Unsupported, "suffix"),
    "a piece twice": (model_file(pieces=_field(1, _field(1, b"ab"))), BadFile, "both 'ab'"),
}


@pytest.mark.parametrize("case", BAD_MODEL)
def test_a_malformed_model_file_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    data, error, message = BAD_MODEL[case]
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(error, match=message) as refused:
        from_sentencepiece(tmp_path / "tokenizer.model")
    assert str(refused.value).startswith(str(tmp_path)) and "\n" not in str(refused.value)


@pytest.mark.parametrize("mutants", [600, pytest.param(3000, marks=pytest.mark.slow)])
def test_damaged_model_files_are_read_or_refused_and_nothing_else(mutants: int) -> None:
    data, rng, refused = model_file(), random.Random(0), 0
    for _ in range(mutants):
        mutant = bytearray(data)
        for _ in range(rng.choice((1, 2, 8))):
            mutant[rng.randrange(len(mutant))] = rng.choice((0, 0x0A, 0x7F, 0xFF, rng.randrange(256)))
        if rng.random() < 0.2:
            del mutant[rng.randrange(len(mutant)) :]
        try:
            sentencepiece_model.parse(bytes(mutant), "x")
        except (BadFile, Unsupported):
            refused += 1
    assert mutants // 6 < refused < mutants


@pytest.mark.parametrize("mutants", [100, pytest.param(400, marks=pytest.mark.slow)])
def test_damaged_gguf_vocabularies_load_and_encode_or_are_refused(mutants: int, tmp_path: Path) -> None:
    """reliability: duplicates, empty and odd tokens, lists of other lengths, merges in circles."""
    rng, good = random.Random(0), 0
    odd = [
        "",
        "a",
        "▁",
        "<0x41>",
        "<0x-1>",
        "\x00",
        "a" * 300,
        "h e",
        " ",
        7,
        None,
        float("nan"),
        2**40,
        -1,
        True,
    ]
    for n in range(mutants):
        metadata = copy.deepcopy((byte_level, sentencepiece_like)[n % 2]())
        for _ in range(rng.choice((1, 1, 3))):
            key = rng.choice(list(metadata))
            value = metadata[key].tolist() if isinstance(metadata[key], np.ndarray) else metadata[key]
            if isinstance(value, list) and rng.random() < 0.9:
                at = rng.randrange(len(value)) if value else 0
                value[at : at + rng.randrange(2)] = [rng.choice([*odd, *value[:9]])] * rng.choice((1, 1, 0))
                metadata[key] = value
            else:
                metadata[key] = rng.choice([*odd, []])
        try:
            tok = opened(from_gguf(metadata, "x"), tmp_path)
            for text in ("", "he ab  日<s></s>\x00", " é👍"):
                tok.decode(tok.encode(text))
        except (BadFile, Unsupported, UsageError):
            continue
        good += 1
    assert mutants // 20 < good < mutants * 7 // 8


def test_pieces_together_are_bounded() -> None:
    """All ways to cut a piece in two are tried: a file could ask for hours."""
    tokens = ["?", *(f"{i:0256d}" for i in range(40_000))]
    meta = sentencepiece_like(tokens=tokens, token_type=[2] + [1] * 40_000, scores=[0] * 40_001)
    with pytest.raises(BadFile, match="together"):
        from_gguf(meta, "x")


@pytest.mark.shared
@needs_data
def test_a_real_model_file_is_converted_in_seconds() -> None:
    begin = time.thread_time()
    from_sentencepiece(TOKENIZERS / "llama2" / "tokenizer.model")
    assert time.thread_time() - begin < 3  # 0.15 measured: 32,000 pieces in every cut
