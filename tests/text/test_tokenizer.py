"""Text and ids: nothing is lost, no character is halved, and what is no tokenizer is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import embedders
import pytest

from thermocline.convert.pretokenizers import PRE_TOKENIZERS
from thermocline.errors import BadFile, IOFailure, Unsupported, UsageError
from thermocline.model.spec import ModelSpec
from thermocline.text.tokenizer import Detokenizer, Tokenizer

tokenizers = pytest.importorskip("tokenizers")

TOKENIZERS = Path(__file__).parents[3] / "shared" / "data" / "tokenizers"
SPEC = ModelSpec("test", 8, 8, 1, 1, 1, 8, 300, 64, "rms", 1e-5, "relu", bos_id=0, eos_ids=(1,))
TEXTS = [
    "Once upon a time",
    " leading space",
    "  two  spaces  ",
    "line\n\nbreak\ttab",
    "naïve café",
    "e\u0301 a\u0308 n\u0303",  # combining marks
    "日本語のテキスト",
    "한국어",
    "👍🏽 👩‍👩‍👧 🇫🇷",
    "مرحبا שלום",
    "math: ∀x∈ℝ 𝔘𝔫𝔦",
    "a\ufffdb",  # U+FFFD itself
    "",
]


# ---- small tokenizers, one per kind of decoder


def byte_level(path: Path) -> Path:
    """GPT-2's kind: every byte is a token, the last ones are added tokens (one with spaces, one special)."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1, **{c: i + 2 for i, c in enumerate(alphabet)}, "Ġt": 258, "he": 259}
    tok = tokenizers.Tokenizer(models.BPE(vocab, [("Ġ", "t"), ("h", "e")]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tok.add_tokens([AddedToken("    ", special=False), AddedToken("é日", special=False)])
    return _saved(tok, path)


def byte_fallback(path: Path) -> Path:
    """Llama's kind: ▁ for space, <0xNN> for what has no piece, one space before the first word."""
    from tokenizers import AddedToken, decoders, models, normalizers

    pieces = ["▁", "▁a", "▁the", "e", "n", "a", "time", "日", "é", "t", "i", "m", "O", "c", "u", "p", "o"]
    vocab = {"<s>": 0, "</s>": 1, "<unk>": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    vocab |= {piece: 259 + i for i, piece in enumerate(pieces)}
    tok = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tok.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", "<unk>")])
    return _saved(tok, path)


def metaspace(path: Path) -> Path:
    from tokenizers import decoders, models, pre_tokenizers

    letters = "▁abcdefghijklmnopqrstuvwxyz日本語é👍"
    tok = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    tok.decoder = decoders.Metaspace()
    return _saved(tok, path)


def _saved(tok: Any, path: Path) -> Path:
    path.mkdir(exist_ok=True)
    tok.save(str(path / "tokenizer.json"))
    return path


KINDS: dict[str, Callable[[Path], Path]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
}


@pytest.fixture(params=KINDS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return KINDS[request.param](tmp_path)


def library(directory: Path) -> Any:
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


def pushed(tok: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tok)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


# ---- text -> ids -> text


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_the_librarys(directory: Path, text: str) -> None:
    tok, lib = Tokenizer(directory), library(directory)
    ids = tok.encode(text)
    assert ids == lib.encode(text).ids
    assert tok.decode(ids) == lib.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", TEXTS)
def test_every_text_comes_back(tmp_path: Path, kind: str, text: str) -> None:
    tok = Tokenizer(KINDS[kind](tmp_path))
    assert tok.decode(tok.encode(text)) == text


def test_pushes_and_flush_are_the_full_decode_of_any_ids(directory: Path) -> None:
    tok, rng = Tokenizer(directory), random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(tok.vocab_size) for _ in range(rng.randrange(40))]
        assert "".join(pushed(tok, ids)) == tok.decode(ids)


def test_random_ids_decode_as_the_library_does(tmp_path: Path) -> None:
    """Byte-level tokens, in any order: invalid UTF-8 becomes U+FFFD in the same places."""
    tok, lib, rng = Tokenizer(byte_level(tmp_path)), library(tmp_path), random.Random(1)
    for _ in range(2000):
        ids = [rng.randrange(tok.vocab_size) for _ in range(rng.randrange(30))]
        assert tok.decode(ids) == lib.decode(ids)


def test_a_broken_run_of_byte_tokens_keeps_its_whole_characters(tmp_path: Path) -> None:
    """The library turns a whole run into U+FFFD; we have already shown its complete characters."""
    tok, lib = Tokenizer(byte_fallback(tmp_path)), library(tmp_path)
    euro, broken = [3 + b for b in "€".encode()], [3 + 0xFF]
    assert pushed(tok, euro + broken) == ["", "", "€", "\ufffd", ""]
    assert lib.decode(euro + broken) == "\ufffd" * 4


# ---- token by token


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", TEXTS)
def test_detokenizer_never_emits_half_a_character(tmp_path: Path, kind: str, text: str) -> None:
    """One byte per token, and the text cut short after every one of them."""
    tok = Tokenizer(KINDS[kind](tmp_path))
    lib = library(tmp_path)
    alphabet = {tok.token_bytes(i): i for i in range(tok.vocab_size) if len(tok.token_bytes(i)) == 1}
    ids = [alphabet[bytes([b])] for b in text.encode()]
    detokenizer, so_far = Detokenizer(tok, continuing=True), ""
    for n, token in enumerate(ids, start=1):
        so_far += detokenizer.push(token)
        assert text.startswith(so_far)
        assert len(so_far) == len(text.encode()[:n].decode(errors="ignore")), "nothing complete is held back"
    assert so_far + detokenizer.flush() == text == lib.decode(ids) or kind == "byte_fallback"


def test_an_incomplete_character_is_shown_only_when_it_cannot_be_completed(tmp_path: Path) -> None:
    tok = Tokenizer(byte_fallback(tmp_path))
    thumb = [3 + b for b in "👍".encode()]
    assert pushed(tok, thumb) == ["", "", "", "👍", ""]
    assert pushed(tok, thumb[:3]) == ["", "", "", "\ufffd"]
    assert pushed(tok, [*thumb[:2], 262]) == ["", "", "\ufffde", ""]


def test_the_first_space_is_cut_only_at_the_beginning_of_a_text(tmp_path: Path) -> None:
    tok = Tokenizer(byte_fallback(tmp_path))
    a, the = 260, 261
    assert pushed(tok, [a, the]) == ["a", " the", ""]
    assert pushed(tok, [0, a, the]) == ["", "a", " the", ""], "a special token is not the beginning"
    assert Detokenizer(tok, continuing=True).push(a) == " a"


def test_a_detokenizer_can_be_used_again_after_flush(tmp_path: Path) -> None:
    tok = Tokenizer(byte_level(tmp_path))
    detokenizer, ids = Detokenizer(tok, continuing=True), tok.encode("日")
    for _ in range(2):
        assert "".join(map(detokenizer.push, ids[:-1])) + detokenizer.flush() == "\ufffd"
        assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == "日"


def test_special_tokens_have_no_text_and_other_added_tokens_do(tmp_path: Path) -> None:
    tok = Tokenizer(byte_level(tmp_path))
    ids = tok.encode("<s>a    é日</s>", parse_special=True)
    assert ids[0] == 0 and tok.decode(ids) == "a    é日"
    assert tok.is_special(0) and not tok.is_special(5)


def test_an_id_without_a_token_has_no_text(tmp_path: Path) -> None:
    """Models pad their vocabulary: an id may exist in the logits only."""
    assert Tokenizer(byte_level(tmp_path), SPEC).decode([299]) == ""


def test_a_push_costs_the_same_however_long_the_text_is(tmp_path: Path) -> None:
    tok = Tokenizer(byte_level(tmp_path))
    detokenizer, ids = Detokenizer(tok), tok.encode("日本語 the " * 500)

    def best_of_5_s() -> float:
        times = []
        for _ in range(5):
            begin = time.thread_time()
            for i in ids:
                detokenizer.push(i)
            times.append(time.thread_time() - begin)
        return min(times)

    first = best_of_5_s()
    for _ in range(20):
        last = best_of_5_s()
    assert last < 5 * first


# ---- special tokens, truncation


def test_no_text_of_so_many_tokens_is_longer(tmp_path: Path) -> None:
    """The longest token again and again, and what normalising makes a quarter of its bytes of."""
    tok, plain = Tokenizer(byte_level(tmp_path)), "𝐀" * 100
    longest = max((tok.spelled(i) for i in range(tok.vocab_size)), key=len).decode()
    for text in (longest * 100, plain, "a", ""):
        ids = tok.encode(text, add_special=False, parse_special=True)
        most = tok.most_bytes(len(ids))
        assert most is not None and len(text.encode()) <= most
    assert tok.most_bytes(10) == 40 * len(longest.encode())


def test_a_text_is_unbounded_if_one_token_is_any_unknown_text(tmp_path: Path) -> None:
    from tokenizers import decoders, models

    tok = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tok.decoder = decoders.Fuse()
    assert Tokenizer(_saved(tok, tmp_path)).most_bytes(1) is None


def test_special_tokens_are_added_only_when_asked(tmp_path: Path) -> None:
    from tokenizers import processors

    tok = library(byte_level(tmp_path))
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tok.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer(tmp_path)
    assert ours.encode("a") == [0, *ours.encode("a", add_special=False)]


# Classes that had `add_bos_token` replace the file's template in transformers 4, and one that never had.
CLASSES = ("LlamaTokenizerFast", "GemmaTokenizerFast", "CohereTokenizerFast", "PreTrainedTokenizerFast")
FLAGS: tuple[dict[str, bool], ...] = (
    {},
    {"add_bos_token": True, "add_eos_token": True},
    {"add_bos_token": False, "add_eos_token": False},
)


@pytest.mark.oracle
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("around", [None, "$A", "<s> $A", "$A </s>", "<s> $A </s>"])
def test_tokenizer_json_alone_says_what_is_put_around_a_text(
    name: str, around: str | None, tmp_path: Path
) -> None:
    """`add_bos_token` of tokenizer_config.json counts for neither us nor transformers 5."""
    from tokenizers import processors
    from transformers import AutoTokenizer

    tok = library(byte_level(tmp_path))
    if around is not None:
        ends = [("<s>", 0), ("</s>", 1)]
        tok.post_processor = processors.TemplateProcessing(single=around, special_tokens=ends)
        tok.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    config = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<s>"}
    for flags in FLAGS:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | flags))
        ids = AutoTokenizer.from_pretrained(tmp_path)("a")["input_ids"]
        assert Tokenizer(tmp_path).encode("a") == ids, flags
        assert (0 in ids, 1 in ids) == ("<s>" in (around or ""), "</s>" in (around or "")), flags


def test_a_file_that_asks_for_truncation_is_not_obeyed(tmp_path: Path) -> None:
    tok = library(byte_level(tmp_path))
    tok.enable_truncation(4)
    tok.enable_padding(length=50)
    tok.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer(tmp_path).encode("x" * 20)) == 20


def test_a_lone_surrogate_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="character 2"):
        Tokenizer(byte_level(tmp_path)).encode("ab\ud800")


# ---- files that are not what they should be


def test_a_missing_tokenizer_says_what_is_missing_and_why(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"tokenizer\.json: not found.* to turn text into tokens"):
        Tokenizer(tmp_path)


def _directory(path: Path) -> None:
    path.mkdir()


def _fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [_directory, _fifo])
def test_a_path_that_is_not_a_file_is_refused_without_reading_it(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "tokenizer.json")
    with pytest.raises(BadFile):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"{}",
        b"[]",
        b"[" * 100_000,
        b"<html>not found</html>",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        b"PK\x03\x04\xff\xfe",
        b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":["a b"]}}',
        b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":99999999999},"merges":[]}}',
    ],
)
def test_a_malformed_tokenizer_is_a_bad_file_in_one_line(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(BadFile, match=r"tokenizer\.json: not a tokenizer") as refused:
        Tokenizer(tmp_path)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_an_io_failure(tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / "tokenizer.json").chmod(0)
    with pytest.raises(IOFailure, match="Permission denied"):
        Tokenizer(tmp_path)


def test_a_tokenizer_of_another_model_is_refused_with_both_numbers(tmp_path: Path) -> None:
    byte_level(tmp_path)
    with pytest.raises(BadFile, match="has the token 259, but the model's tokens are 0 to 199"):
        Tokenizer(tmp_path, dataclasses.replace(SPEC, vocab_size=200))


def test_added_tokens_that_the_model_lacks_stay_text(tmp_path: Path) -> None:
    spec = dataclasses.replace(SPEC, vocab_size=261)
    tok = Tokenizer(byte_level(tmp_path), spec)
    assert [t.id for t in tok.added] == [0, 1, 260]
    twin = tok.renamed({"<s>": "<one>"}, "<filler>")
    for ids in (tok.encode("é日</s>", parse_special=True), twin("é日".encode())):
        assert max(ids) < 260 and tok.decode(ids) == "é日"
    path = tmp_path / "tokenizer.json"
    around = {"type": "RobertaProcessing", "sep": ["é日", 261], "cls": ["<s>", 0], "trim_offsets": True}
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"post_processor": around | {"add_prefix_space": False}})
    )
    with pytest.raises(BadFile, match="puts the token 261 around texts"):
        Tokenizer(tmp_path, spec)


def test_vocabulary_and_eos_are_the_models(tmp_path: Path) -> None:
    tok = Tokenizer(byte_level(tmp_path), SPEC)
    assert (tok.vocab_size, tok.eos_ids) == (300, (1,))


@pytest.mark.parametrize(
    "decoder", [{"type": "CTC", "pad_token": "_", "word_delimiter_token": "|", "cleanup": True}, None]
)
def test_a_decoder_we_do_not_know_is_refused_by_name(tmp_path: Path, decoder: Any) -> None:
    path = byte_level(tmp_path) / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "decoder": decoder}))
    with pytest.raises(Unsupported, match="CTC" if decoder else "no decoder"):
        Tokenizer(tmp_path)


def test_a_decoder_that_strips_the_end_is_refused(tmp_path: Path) -> None:
    from tokenizers import decoders

    tok = library(byte_fallback(tmp_path))
    tok.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])
    tok.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(Unsupported, match="strips"):
        Tokenizer(tmp_path)


# ---- files that attack


Change = Callable[[dict[str, Any]], None]


def _set(**parts: Any) -> Change:
    return lambda t: t.update(parts)


def _replaces(*contents: str, pattern: str = "a") -> Change:
    steps = [{"type": "Replace", "pattern": {"String": pattern}, "content": c} for c in contents]
    return _set(normalizer={"type": "Sequence", "normalizers": steps})


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _template(texts: int, tokens: int) -> dict[str, Any]:
    text, token = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<s>", "type_id": 0}}
    pair = [text, {"Sequence": {"id": "B", "type_id": 0}}]
    return {
        "type": "TemplateProcessing", "single": [token] * tokens + [text] * texts, "pair": pair,
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }  # fmt: skip


def _wordpiece(t: dict[str, Any]) -> None:
    t["model"] = {"type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 10**9, "vocab": {"<unk>": 0, "a": 1}}  # fmt: skip


def _long_pieces(t: dict[str, Any]) -> None:
    pieces = [["<unk>", 0.0], *(["a" * n, -1.0] for n in range(4000, 5000, 100))]
    t["model"] = {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}


SPLIT = {"type": "CharDelimiterSplit", "delimiter": ","}
ATTACKS: dict[str, tuple[Change, str]] = {
    "a long replacement": (_replaces("b" * 1_000_000), "normalizer's Replace writes 1000000 characters"),
    "replacements that multiply": (_replaces(*["a" * 32] * 8), "normalizer makes a text .* times as long"),
    "replacements of nothing": (_replaces(*["aaaa"] * 8, pattern=""), "times as long"),
    "a long pattern": (_set(pre_tokenizer=_split("a" * 5000)), "pre_tokenizer's Split has a pattern of 5000"),
    "many steps": (
        _set(pre_tokenizer={"type": "Sequence", "pretokenizers": [_split("a")] * 1000}),
        "pre_tokenizer has 1000 steps",
    ),
    "a text a thousand times": (_set(post_processor=_template(1000, 0)), "writes a text 1000 times"),
    "tokens around a text": (_set(post_processor=_template(1, 9999)), "puts 9999 tokens around a text"),
    "unlimited words": (_wordpiece, "splits words of 1000000000 characters"),
    "long pieces": (_long_pieces, "a token of 4900 characters"),
    "another family's part": (_set(pre_tokenizer=SPLIT), "pre_tokenizer has a CharDelimiterSplit step"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_parts_that_no_family_needs_are_refused_by_name(tmp_path: Path, name: str) -> None:
    change, why = ATTACKS[name]
    path = byte_level(tmp_path) / "tokenizer.json"
    tokenizer = json.loads(path.read_text()) | {"added_tokens": []}
    change(tokenizer)
    path.write_text(json.dumps(tokenizer))
    with pytest.raises((BadFile, Unsupported), match=why) as refused:
        Tokenizer(tmp_path)
    assert "\n" not in str(refused.value) and str(path) in str(refused.value)


def with_pattern(path: Path, pattern: str) -> Tokenizer:
    file = byte_level(path) / "tokenizer.json"
    byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps = {"type": "Sequence", "pretokenizers": [_split(pattern), byte]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pre_tokenizer": steps}))
    return Tokenizer(path)


def test_a_pattern_that_goes_astray_costs_its_text_an_error_and_nothing_else(tmp_path: Path) -> None:
    """The library panics, which is no Exception: it ended `run` with a traceback, and a server's chat."""
    tok = with_pattern(tmp_path, "(a+)+b")
    with pytest.raises(BadFile, match=r"tokenizer\.json: the tokenizers library fails on it"):
        tok.encode("a" * 100)
    assert tok.decode(tok.encode("time")) == "time"


def test_a_process_that_dies_of_a_text_is_replaced_with_all_it_had(tmp_path: Path) -> None:
    """Twins too: a conversation is tokenised by one."""
    tok = Tokenizer(byte_level(tmp_path))
    twin = tok.renamed({"<s>": "qqqq"}, "zzzz")
    confined, ids = tok._process._confined, twin(b"aqqqqb<s>")
    assert ids[1] == 0 and 0 not in ids[2:]
    first = confined._process
    assert first is not None
    first.kill()
    with pytest.raises(BadFile, match="this text takes too long"):
        tok.encode("time")
    assert tok.decode(tok.encode("time")) == "time" and confined._process is not first
    confined.close()
    assert twin(b"aqqqqb<s>") == ids


def test_a_text_that_takes_all_memory_is_a_bad_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library aborts its process there; it was the server's."""
    tok = Tokenizer(byte_level(tmp_path))
    process = tok._process._confined._process
    assert process is not None
    resource = pytest.importorskip("resource")
    resource.prlimit(process.pid, resource.RLIMIT_AS, (1 << 24, 1 << 24))
    with pytest.raises(BadFile, match=r"takes too much memory|fails on it"):
        tok.encode("time " * 1_000_000)
    assert tok.decode(tok.encode("time")) == "time"


def test_a_file_replaced_in_use_is_not_taken_for_the_one_that_was_opened(tmp_path: Path) -> None:
    tok = Tokenizer(byte_level(tmp_path))
    tok.close()
    byte_fallback(tmp_path)
    with pytest.raises(BadFile, match="was replaced while in use"):
        tok.encode("time")


# ---- genuine ones

# What the named families' files have: none of it may be refused. (pre-tokenizers of GGUF's names: below)
GENUINE: dict[str, dict[str, Any]] = {
    "Llama 2, Mistral, Phi-3": {
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "post_processor": _template(1, 1),
    },
    "Llama 3": {"post_processor": {"type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        _template(1, 1)]}},
    "Gemma": {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
                          "invert": False},
    },
    "Falcon": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Punctuation", "behavior": "Contiguous"},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        {"type": "Digits", "individual_digits": False}, _split("[0-9][0-9][0-9]")]}},
    "Llama, without legacy": {
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
    },
    "T5's kind": {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Nmt"}, {"type": "NFKC"}, {"type": "Strip", "strip_left": False, "strip_right": True},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}]}},
}  # fmt: skip


@pytest.mark.parametrize("family", GENUINE)
def test_a_familys_parts_are_not_refused(tmp_path: Path, family: str) -> None:
    path = byte_level(tmp_path) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | GENUINE[family]))
    assert Tokenizer(tmp_path).encode("time") == library(tmp_path).encode("time").ids


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_no_known_pre_tokenizer_is_refused(tmp_path: Path, name: str) -> None:
    path = byte_level(tmp_path) / "tokenizer.json"
    steps = {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[name].steps()}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pre_tokenizer": steps}))
    assert Tokenizer(tmp_path).encode("the time") == library(tmp_path).encode("the time").ids


@pytest.mark.shared
@pytest.mark.skipif(not TOKENIZERS.is_dir(), reason="../shared/data/tokenizers is not here")
@pytest.mark.parametrize("name", ["gpt_neox_20B"])
def test_a_real_tokenizer_round_trips_and_streams_random_ids(name: str) -> None:
    tok, lib, rng = Tokenizer(TOKENIZERS / name), library(TOKENIZERS / name), random.Random(0)
    for text in TEXTS:
        assert tok.decode(tok.encode(text)) == unicodedata.normalize("NFC", text)  # as this tokenizer does
    for _ in range(300):
        ids = [rng.randrange(tok.vocab_size) for _ in range(rng.randrange(100))]
        assert "".join(pushed(tok, ids)) == tok.decode(ids) == lib.decode(ids)


def test_pieces_of_words_are_joined_as_the_library_joins_them(tmp_path: Path) -> None:
    path = embedders.bert(tmp_path / "bert")
    tok, lib = Tokenizer(path), library(path)
    for text in ("The cat sat on a mat.", "unseen dogs, ran. All", "the", "", "caf\u00e9 \u4f60 xyz"):
        ids = tok.encode(text)
        assert ids == lib.encode(text).ids
        assert tok.decode(ids) == lib.decode(ids)
