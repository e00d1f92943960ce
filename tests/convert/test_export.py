"""Packs as GGUF files and back: the bundled model, PowerInfer's parts, tokenizers GGUF can say or not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kept_twins
import numpy as np
import pytest
import twins
from test_gguf_import import powerinfer_model
from test_twins import Model

from thermocline.convert.importer import pack
from thermocline.convert.pretokenizers import PRE_TOKENIZERS
from thermocline.convert.tokenizer_to_gguf import to_gguf
from thermocline.convert.tokenizers import WHOLE, from_gguf
from thermocline.errors import BadFile
from thermocline.files.gguf import GGUF
from thermocline.llm import BUNDLED
from thermocline.pack.pack import Pack
from thermocline.session import weights
from thermocline.text.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf")
Run = Callable[..., Any]


def logits(path: Path, ids: list[int]) -> Any:
    opened = Pack.open(path)
    got = weights.load(opened, threads=2)
    return Model(opened.spec, got.weights, got.ops).logits(ids, len(ids))


@pytest.mark.parametrize("format", ["f16", "q8_0"])
def test_the_bundled_model_comes_back_from_a_gguf_the_same(
    format: str, tmp_path: Path, thermocline: Run
) -> None:
    first = BUNDLED
    if format != "q8_0":
        assert thermocline("pack", BUNDLED, "-o", tmp_path / "q.gguf", "-q").code == 0
        first = tmp_path / "first"
        pack(tmp_path / "q.gguf", first, format)
    ran = thermocline("pack", first, "-o", tmp_path / "m.gguf")
    assert ran.code == 0 and "PowerInfer's layout" in ran.err
    assert (tmp_path / "m.gguf").read_bytes()[:4] == b"PWRI"
    cost = pack(tmp_path / "m.gguf", tmp_path / "again")
    assert cost is not None and cost.converted == 0
    a, b = Pack.open(first), Pack.open(tmp_path / "again")
    assert a.weight_format == b.weight_format == format and a.spec == b.spec
    assert a.weights_path.read_bytes() == b.weights_path.read_bytes()
    texts = ["Once upon a time, there was a dragon.", "héllo\t 12345  <|endoftext|>\n\n x", "日本語 🐉"]
    before, after = Tokenizer(first, a.spec), Tokenizer(tmp_path / "again", b.spec)
    for text in texts:
        for special in (False, True):
            ids = before.encode(text, parse_special=special)
            assert after.encode(text, parse_special=special) == ids
            assert after.decode(ids) == before.decode(ids)
    ids = before.encode(texts[0])
    assert np.array_equal(logits(first, ids), logits(tmp_path / "again", ids))
    assert json.loads(thermocline("inspect", tmp_path / "m.gguf", "--json").out)["tokenizer"] == "gpt2"


@pytest.mark.oracle
def test_powerinfers_predictors_go_out_as_they_came(tmp_path: Path, thermocline: Run) -> None:
    hf = kept_twins.llama(tmp_path / "hf", 1, hidden_act="relu")
    pack(powerinfer_model(hf, tmp_path / "src"), tmp_path / "a")
    assert thermocline("pack", tmp_path / "a", "-o", tmp_path / "m.gguf").code == 0
    pack(tmp_path / "m.gguf", tmp_path / "b")
    a, b = Pack.open(tmp_path / "a"), Pack.open(tmp_path / "b")
    assert a.predictor == b.predictor and a.predictor is not None
    assert a.spec == b.spec
    for name, t in b.tensors.items():
        mine = np.fromfile(a.weights_path, np.uint8, t.bytes, offset=a.tensors[name].offset)
        assert np.array_equal(mine, np.fromfile(b.weights_path, np.uint8, t.bytes, offset=t.offset)), name
    assert {n.rpartition(".")[2] for n in a.tensors.keys() - b.tensors.keys()} == {"activation_count"}


def test_drelu_and_a_dense_model_keep_their_logits(tmp_path: Path, thermocline: Run) -> None:
    ids = np.random.default_rng(0).integers(3, twins.VOCAB, 24).tolist()
    recipes: dict[str, Callable[[Path], Path]] = {
        "bamboo": kept_twins.TWINS["bamboo"],
        "dense": lambda p: kept_twins.llama(p, 3, eos_token_id=[2, 5]),
    }
    for name, recipe in recipes.items():
        hf = recipe(tmp_path / name)
        twins._edit_config(hf, lambda c: c.update(sliding_window=None) if "sliding_window" in c else None)
        pack(hf, tmp_path / f"{name}-a", "f16")
        assert thermocline("pack", tmp_path / f"{name}-a", "-o", tmp_path / f"{name}.gguf").code == 0
        pack(tmp_path / f"{name}.gguf", tmp_path / f"{name}-b")
        assert np.array_equal(logits(tmp_path / f"{name}-a", ids), logits(tmp_path / f"{name}-b", ids))
        assert Pack.open(tmp_path / f"{name}-b").spec == Pack.open(tmp_path / f"{name}-a").spec


def test_what_is_no_pack_or_has_other_weights_is_refused(tmp_path: Path, thermocline: Run) -> None:
    hf = kept_twins.llama(tmp_path / "hf", 1)
    ran = thermocline("pack", hf, "-o", tmp_path / "m.gguf")
    assert ran.code == 2 and "not a pack; make one with" in ran.err
    ran = thermocline("pack", BUNDLED, "-o", tmp_path / "m.gguf", "--format", "f16")
    assert ran.code == 2 and "has q8_0 weights" in ran.err
    pack(kept_twins.write("opt", tmp_path / "opt"), tmp_path / "p")
    ran = thermocline("pack", tmp_path / "p", "-o", tmp_path / "m.gguf")
    assert ran.code == 6 and ran.err.count("\n") == 1
    (tmp_path / "m.gguf").write_bytes(b"mine")
    ran = thermocline("pack", BUNDLED, "-o", tmp_path / "m.gguf")
    assert ran.code == 2 and "--force" in ran.err and (tmp_path / "m.gguf").read_bytes() == b"mine"
    assert thermocline("pack", BUNDLED, "-o", tmp_path / "m.gguf", "--force").code == 0


def test_the_chat_template_goes_along(tmp_path: Path) -> None:
    from thermocline.convert.to_gguf import write_gguf

    hf = kept_twins.llama(tmp_path / "hf", 1)
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    for i, (name, text, template) in enumerate(
        (
            ("tokenizer_config.json", '{"chat_template": "A"}', "A"),
            ("tokenizer_config.json", json.dumps({"chat_template": named}), "D"),
            ("chat_template.json", '{"chat_template": "older"}', "D"),
            ("tokenizer_config.json", "{}", "older"),
            ("chat_template.jinja", "{{ B }}", "{{ B }}"),
        )
    ):
        (hf / name).write_text(text)
        pack(hf, tmp_path / f"{i}.p")
        write_gguf(Pack.open(tmp_path / f"{i}.p"), tmp_path / f"{i}.gguf")
        pack(tmp_path / f"{i}.gguf", tmp_path / f"{i}.again")
        about = json.loads((tmp_path / f"{i}.again" / "tokenizer_config.json").read_text())
        assert about["chat_template"] == template


# ---- tokenizers


def test_tokens_that_only_the_model_has_are_written_as_unused(tmp_path: Path, thermocline: Run) -> None:
    hf = kept_twins.llama(tmp_path / "hf", 3, vocab_size=4101, bos_token_id=0, eos_token_id=0)
    (hf / "tokenizer.json").write_bytes((BUNDLED / "tokenizer.json").read_bytes())
    pack(hf, tmp_path / "a")
    assert thermocline("pack", tmp_path / "a", "-o", tmp_path / "m.gguf").code == 0
    with GGUF(tmp_path / "m.gguf") as written:
        assert written.metadata["tokenizer.ggml.tokens"][4094:] == [*tokens()[4094:], *PADS]
        assert list(written.metadata["tokenizer.ggml.token_type"][4095:]) == [1, *[5] * 5]
    pack(tmp_path / "m.gguf", tmp_path / "b")
    text = "Once upon a [PAD4096] time"
    ids = [Tokenizer(tmp_path / x, Pack.open(tmp_path / x).spec).encode(text) for x in "ab"]
    assert ids[0] == ids[1]


def test_a_line_says_that_others_find_no_tokenizer(tmp_path: Path, thermocline: Run) -> None:
    hf = kept_twins.llama(tmp_path / "hf", 3, vocab_size=4096, bos_token_id=0, eos_token_id=0)
    for name in ("said", "unsaid"):
        t = bundled_tokenizer()
        if name == "unsaid":
            UNSAID["a cut"](t)
        (hf / "tokenizer.json").write_text(json.dumps(t))
        pack(hf, tmp_path / name)
        ran = thermocline("pack", tmp_path / name, "-o", tmp_path / f"{name}.gguf")
        assert ran.code == 0 and ("llama.cpp finds no tokenizer in the file" in ran.err) == (name == "unsaid")


PADS = [f"[PAD{i}]" for i in range(4096, 4101)]


def tokens() -> list[str]:
    vocab: dict[str, int] = bundled_tokenizer()["model"]["vocab"]
    return sorted(vocab, key=lambda t: vocab[t])


def bundled_tokenizer() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((BUNDLED / "tokenizer.json").read_text())
    return found


UNSAID: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a normalizer": lambda t: t.update(normalizer={"type": "Lowercase"}),
    "a cut": lambda t: t.update(pre_tokenizer={"type": "Whitespace"}),
    "a prefix space": lambda t: t["pre_tokenizer"].update(add_prefix_space=True),
    "no merges": lambda t: t["model"].update(merges=[]),
    "two tokens first": lambda t: t["post_processor"]["single"].insert(0, t["post_processor"]["single"][0]),
    "a word of its own": lambda t: t["added_tokens"][0].update(single_word=True),
    "left stripping": lambda t: t["added_tokens"][0].update(lstrip=True),
    "dropout": lambda t: t["model"].update(dropout=0.5),
    "a suffix": lambda t: t["model"].update(end_of_word_suffix="</w>"),
}


@pytest.mark.parametrize("case", UNSAID)
def test_a_tokenizer_that_gguf_cannot_say_is_kept_whole(case: str, tmp_path: Path) -> None:
    t, path = bundled_tokenizer(), tmp_path / "tokenizer.json"
    UNSAID[case](t)
    data = json.dumps(t).encode()
    path.write_bytes(data)
    keys = to_gguf(path, 0, 0, 4096)
    assert keys == {"tokenizer.ggml.model": "none", WHOLE: data.decode()}
    assert from_gguf(keys, "m.gguf") == data
    with pytest.raises(BadFile, match=WHOLE):
        from_gguf(keys | {WHOLE: 5}, "m.gguf")


DIGITS = {"type": "Digits", "individual_digits": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    ("pre", "steps"),
    [("starcoder", [DIGITS, BYTES]), ("gpt-4o", PRE_TOKENIZERS["gpt-4o"].steps())],
)
def test_cuts_have_the_name_that_models_with_them_have(pre: str, steps: list[Any], tmp_path: Path) -> None:
    import tokenizers

    t = bundled_tokenizer() | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    (path := tmp_path / "tokenizer.json").write_text(json.dumps(t))
    keys = to_gguf(path, 0, 0, 4096)
    assert keys["tokenizer.ggml.pre"] == pre
    a, b = (tokenizers.Tokenizer.from_str(s) for s in (json.dumps(t), from_gguf(keys, "").decode()))
    text = "In 2024, x2 was ½ of ٣٤ and Ⅻ"
    assert a.pre_tokenizer.pre_tokenize_str(text) == b.pre_tokenizer.pre_tokenize_str(text)


@pytest.mark.parametrize("ids", [(1, 0), (None, 0)])
def test_another_begin_token_than_the_models_is_kept_whole(ids: tuple[int | None, int]) -> None:
    assert WHOLE in to_gguf(BUNDLED / "tokenizer.json", *ids, 4096)


@pytest.mark.shared
@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", "neox"])
def test_real_tokenizers_cut_text_as_before(name: str, shared_data: Path, tmp_path: Path) -> None:
    import tokenizers

    path = shared_data / "tokenizers" / "gpt_neox_20B" / "tokenizer.json"
    if name != "neox":
        path = tmp_path / "tokenizer.json"
        with GGUF(shared_data / "gguf_vocab" / f"ggml-vocab-{name}.gguf") as vocab:
            path.write_bytes(from_gguf(vocab.metadata, name))
    a = tokenizers.Tokenizer.from_file(str(path))
    first = a.encode("x").ids[0] if len(a.encode("x").ids) > 1 else None
    keys = to_gguf(path, first, None, a.get_vocab_size() + 3)
    assert (WHOLE in keys) == (name == "neox")  # which looks for some of its tokens in normalised text
    b = tokenizers.Tokenizer.from_buffer(from_gguf(keys, name))
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choice(" \n\t'.,!09azéßñ日本🐉▁<>sAZ") for _ in range(rng.randrange(40)))
        assert a.encode(text).ids == b.encode(text).ids, text
