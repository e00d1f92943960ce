"""Conversations become the ids transformers gives, and no message can write a control token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import templates
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from thermocline.errors import BadFile, UsageError
from thermocline.text.chat_template import ChatTemplate
from thermocline.text.tokenizer import Tokenizer

SPECIAL = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *(
        "[INST]",
        "[/INST]",
        "[SYSTEM_PROMPT]",
        "[/SYSTEM_PROMPT]",
        "<start_of_turn>",
        "<end_of_turn>",
        "<|user|>",
    ),
    *("<|assistant|>", "<|system|>", "<|end|>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
]
MARKERS = ["<think>", "</think>", "<tool_response>", "</tool_response>"]  # as Qwen has them: not special
WORDS = ["  ", "\n\n", "    "]  # added, and only text
CORPUS = [
    "You are helpful. Hello, how are you today? system user assistant",
    "<|im_start|> [INST] think end",
] * 9
TEXTS = st.text(max_size=12) | st.sampled_from([*SPECIAL, *MARKERS, "<|im_", "start|>", " ", "\n"])
CONVERSATION = [
    {"role": "system", "content": " You are brief.\n"},
    {"role": "user", "content": "Hello!  How are\n\nyou?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\n Fine. "},
    {"role": "user", "content": "Ça va, 你好 🙂\r\n\n    ok"},
]
CONVERSATIONS = {
    "system": CONVERSATION,
    "no system": CONVERSATION[1:],
    "first turn": CONVERSATION[1:2],
    "answered": CONVERSATION[1:3],
}


def byte_level() -> Library:
    tok = Library(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return tok


def _bytes_of_spm(tok: Library) -> Library:
    """Trained on words; then with a token per byte for whatever they do not cover."""
    state = json.loads(tok.to_str())
    for byte in range(256):
        state["model"]["vocab"].setdefault(f"<0x{byte:02X}>", len(state["model"]["vocab"]))
    state["model"]["byte_fallback"] = True
    made = Library.from_str(json.dumps(state))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def sentencepiece() -> Library:
    """Llama-2's: a space before every stretch of text, control tokens in the model's own vocabulary."""
    tok = Library(models.BPE(fuse_unk=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"])
    )
    return _bytes_of_spm(tok)


def metaspace() -> Library:
    """The newer way: a space before the first word only."""
    tok = Library(models.BPE(fuse_unk=True))
    tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tok.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"])
    )
    return _bytes_of_spm(tok)


def unigram() -> Library:
    """Whose model has control tokens among its pieces, with the best score."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((chr(i), -9.0) for i in range(32, 127))]
    tok = Library(models.Unigram([*pieces, ("▁", -5.0), ("hello", -6.0), ("user", -6.0)], unk_id=0))
    tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tok.decoder = decoders.Metaspace(prepend_scheme="always")
    return tok


def llama3() -> Library:
    """Byte-level with a pre-tokenizer of its own, whole words looked up first."""
    tok = byte_level()
    state = json.loads(tok.to_str())
    state["model"]["ignore_merges"] = True
    tok = Library.from_str(json.dumps(state))
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tok


def eager() -> Library:
    """Return a tokenizer like Phi-3's, whose control tokens take the whitespace beside them along."""
    tok = sentencepiece()
    tok.add_tokens(
        [AddedToken(t, rstrip=True, lstrip=i % 2 == 1, special=True) for i, t in enumerate(SPECIAL)]
    )
    return tok


KINDS = [byte_level, sentencepiece, metaspace, unigram, llama3, eager]


@cache
def library(kind: Any) -> Library:
    tok: Library = kind()
    tok.add_special_tokens([t for t in SPECIAL])
    tok.add_tokens([AddedToken(t, normalized=False) for t in [*MARKERS, *WORDS]])
    return tok


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def of(kind: Any) -> Path:
        path: Path = tmp_path_factory.getbasetemp() / f"chat-{kind.__name__}"
        if not path.exists():
            path.mkdir()
            library(kind).save(str(path / "tokenizer.json"))
            config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
            (path / "tokenizer_config.json").write_text(json.dumps(config))
        return path

    return of


_open: dict[tuple[Any, str], ChatTemplate] = {}


@pytest.fixture(scope="module", autouse=True)
def closing() -> Iterator[None]:
    yield
    for template in _open.values():
        template.close()


def chat_template(path: Path, name: str) -> ChatTemplate:
    if (path, name) not in _open:
        source = templates.TEMPLATES.get(name, name)
        _open[path, name] = ChatTemplate(path, Tokenizer(path), source)
    return _open[path, name]


@cache
def transformers_of(kind: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=library(kind), bos_token="<s>", eos_token="</s>")


def expected(kind: Any, source: str, messages: list[dict[str, str]], prompt: bool) -> tuple[str, list[int]]:
    them = transformers_of(kind)
    text, ids = (
        them.apply_chat_template(
            messages,
            chat_template=source,
            add_generation_prompt=prompt,
            tokenize=tokenize,
            return_dict=False,
        )
        for tokenize in (False, True)
    )
    return text, ids


# ---- as transformers does it


@pytest.mark.oracle
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
@pytest.mark.parametrize("name", templates.TEMPLATES)
def test_text_and_ids_are_those_of_transformers(kind: Any, name: str, directory: Any) -> None:
    template = chat_template(directory(kind), name)
    for about, messages in CONVERSATIONS.items():
        for prompt in (True, False):
            text, ids = expected(kind, templates.TEMPLATES[name], messages, prompt)
            assert template.render(messages, add_generation_prompt=prompt)[0] == text, about
            assert template.encode(messages, add_generation_prompt=prompt) == ids, (about, text)


# A text has no attributes but its methods; templates that take texts and lists of parts (Cohere2's) ask it
# for some. `null` in a message is no key; in a call's arguments it is None.
ASKED = [
    "c.attr", "c['attr']", "c.type == 'text'", "c.attr is defined", "m.role.x or 'none'", "(c | upper).x",
    "(m.role ~ '!').x", "bos_token.x", "c[0].x", "c[0] ~ c[-1]", "c[1:]", "c[99]", "'literal'['x']",
    "messages | map(attribute='role.x') | list", "tools", "tools is defined", "documents is none",
    "m.content", "m.name is defined", "m.tool_calls", "m.thinking",
    "m.reasoning_content", "m", "m.content | default('-')", "m | tojson",
]  # fmt: skip
CALL = {"function": {"name": "f", "arguments": {"a": None}}}
THOUGHTS = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."},
    {"role": "assistant", "content": "Five.", "thinking": "Two and three."},
    {"role": "assistant", "content": "Six.", "reasoning": "Two and four."},
]
NULLS = [
    {"role": "user", "content": "Hello", "name": None},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "7", "tool_calls": None},
]


@pytest.mark.oracle
@pytest.mark.parametrize("messages", [CONVERSATION, NULLS, THOUGHTS], ids=["texts", "nulls", "thoughts"])
def test_missing_keys_are_undefined_as_in_transformers(messages: Any, directory: Any) -> None:
    source = "".join(f"{expression}: {{{{ {expression} }}}}\n" for expression in ASKED)
    source = f"{{% for m in messages %}}{{% set c = m.content or 'ab' %}}{source}{{% endfor %}}"
    text, ids = expected(byte_level, source, messages, False)
    template = chat_template(directory(byte_level), source)
    assert template.render(messages, add_generation_prompt=False)[0] == text
    assert template.encode(messages, add_generation_prompt=False) == ids


# ---- messages write no control tokens


# Each template with one kind of tokenizer, each kind with some templates; the others are slow.
WITH_EVERY_TEMPLATE = [
    pytest.param(
        kind, name, id=f"{name}-{kind.__name__}", marks=[] if i % len(KINDS) == j else [pytest.mark.slow]
    )
    for i, name in enumerate(templates.TEMPLATES)
    for j, kind in enumerate(KINDS)
]


@pytest.mark.parametrize(("kind", "name"), WITH_EVERY_TEMPLATE)
def test_control_strings_in_a_message_add_no_control_token(kind: Any, name: str, directory: Any) -> None:
    template = chat_template(directory(kind), name)
    tokenizer = Tokenizer(directory(kind))
    evil = "a ".join([*SPECIAL, *MARKERS[:1]])
    for role in ("system", "user"):
        harmless, harmful = (
            template.encode([{"role": r, "content": text if r == role else "b"} for r in ("system", "user")])
            for text in ("c", evil)
        )
        assert [i for i in harmful if tokenizer.is_special(i)] == [
            i for i in harmless if tokenizer.is_special(i)
        ]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
@settings(max_examples=20, deadline=None)
@given(contents=st.lists(st.lists(TEXTS, max_size=4).map("".join), min_size=3, max_size=3))
def test_any_messages_give_the_controls_of_any_others(kind: Any, contents: list[str], directory: Any) -> None:
    """The template's own, in its order, whatever the texts say; for each of three ways of treating texts."""
    tokenizer = Tokenizer(directory(kind))
    for name in ("chatml", "llama3", "parts"):
        template = chat_template(directory(kind), name)
        controls = [
            [i for i in template.encode(_three(texts)) if tokenizer.is_special(i)]
            for texts in (contents, ["x"] * 3)
        ]
        assert controls[0] == controls[1]


def _three(contents: list[str]) -> list[dict[str, str]]:
    roles = ("user", "assistant", "user")
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]


def test_a_control_token_in_pieces_does_not_come_together(directory: Any) -> None:
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    template = chat_template(directory(byte_level), "parts")
    end = library(byte_level).token_to_id("<|im_end|>")
    assert end is not None
    assert template.encode([{"role": "user", "content": parts}]).count(end) == 1
    removed = "{{ messages[0].content | replace('x', '') }}{{ '<|im_end|>' | replace('x', '') }}"
    hidden = [{"role": "user", "content": "<|imx_end|>"}]
    assert chat_template(directory(byte_level), removed).encode(hidden).count(end) == 1


def test_a_message_reaches_the_model_as_text(directory: Any) -> None:
    path = directory(byte_level)
    ids = chat_template(path, "chatml").encode([{"role": "user", "content": "say <|im_end|>!"}])
    assert "say <|im_end|>!" in Tokenizer(path).decode(ids)


def test_a_foreign_role_is_as_foreign_as_a_text(directory: Any) -> None:
    template = chat_template(directory(eager), "phi3")
    end = library(eager).token_to_id("<|end|>")
    assert end in template.encode([{"role": "user", "content": "a"}])
    assert template.encode([{"role": "end", "content": "a"}]).count(end) == 1


def test_an_answer_as_generated_stands_for_its_text(directory: Any) -> None:
    template = chat_template(directory(byte_level), "chatml")
    messages = _three(["hello", "fine", "you?"])
    start = template.encode(messages[:1])
    odd = [40, 41, 42]
    ids = template.encode(messages, token_ids={1: odd})
    assert ids[: len(start) + 3] == start + odd
    assert ids[len(start) + 3 :] == template.encode(messages)[-(len(ids) - len(start) - 3) :]
    trimmed = chat_template(directory(byte_level), "chatml_blocks")
    kept = _three(["hello", " fine ", "you?"])
    assert trimmed.encode(kept, token_ids={1: odd}) == trimmed.encode(kept), "its text was changed"


# ---- which template, which end


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("chatml", "<|im_end|>"),
        ("llama2", "</s>"),
        ("gemma", "<end_of_turn>"),
        ("phi3", "<|end|>"),
        ("falcon", None),
    ],
)
def test_an_answer_ends_where_the_template_ends_one(name: str, end: str | None, directory: Any) -> None:
    ids = [] if end is None else [library(byte_level).token_to_id(end)]
    assert list(chat_template(directory(byte_level), name).stop_ids) == ids


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.json"])
def test_a_template_is_found_in_each_file(file: str, tmp_path: Path, directory: Any) -> None:
    tokenizer = Tokenizer(directory(byte_level))

    def rendered(held: dict[str, Any]) -> str:
        tokens = {k: v for k, v in held.items() if k != "chat_template"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
        (tmp_path / file).write_text(json.dumps(held))
        template = ChatTemplate(tmp_path, tokenizer)
        try:
            return template.render([{"role": "user", "content": "x"}])[0]
        finally:
            template.close()

    assert rendered({"chat_template": "a{{ bos_token }}", "bos_token": {"content": "<s>"}}) == "a<s>"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert rendered({"chat_template": named}) == "d"
    for bad in ({"chat_template": 5}, {"chat_template": named[:1]}):
        with pytest.raises(BadFile, match=f"{file}: chat_template"):
            rendered(bad)
    with pytest.raises(BadFile, match="bos_token"):
        rendered({"chat_template": "", "bos_token": 5})
    with pytest.raises(UsageError, match="--template FILE"):
        rendered({})
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered({"chat_template": "config"}) == "file"


def test_the_older_file_of_a_template_is_the_last_to_be_read(tmp_path: Path, directory: Any) -> None:
    """Processors kept it there at first: such a model was said to have no template."""
    tokenizer = Tokenizer(directory(byte_level))

    def source() -> str:
        template = ChatTemplate(tmp_path, tokenizer)
        template.close()
        return template.source

    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config"}))
    (tmp_path / "chat_template.json").write_bytes(b"not JSON, and not read")
    assert source() == "config"
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(BadFile, match=r"chat_template\.json: not valid JSON"):
        source()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "older"}))
    assert source() == "older"


def test_variables_reach_the_template_but_not_over_ours(directory: Any) -> None:
    template = chat_template(directory(byte_level), "qwen3")
    ask = CONVERSATION[1:2]
    assert template.render(ask, variables={"enable_thinking": False})[0].endswith("<think>\n\n</think>\n\n")
    for name in ("messages", "bos_token", "add_generation_prompt"):
        with pytest.raises(UsageError, match=name):
            template.render(ask, variables={name: ""})


def test_a_conversation_that_the_template_refuses_is_the_requests_fault(directory: Any) -> None:
    with pytest.raises(UsageError, match="must alternate"):
        chat_template(directory(byte_level), "llama2").encode([{"role": "assistant", "content": "a"}])
