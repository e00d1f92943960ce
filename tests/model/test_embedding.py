"""Embedding models against transformers: vectors of whole texts, however they are batched and cached."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_twins
import kept_twins
import numpy as np
import pytest
import twins
from test_twins import in_numpy, loaded, nmse

from thermocline.convert.importer import pack
from thermocline.engine.engine import Engine, EngineSettings
from thermocline.engine.request import PoolingParams, check_embeds, request_for
from thermocline.engine.sampler import SamplingParams
from thermocline.engine.vectors import check_dimensions, shortened
from thermocline.errors import BadFile, Unsupported, UsageError
from thermocline.model import families
from thermocline.ops.interface import F32
from thermocline.pack.pack import Pack
from thermocline.session import weights

ENCODERS = ("bert_cls", "bert_mean", "xlm_roberta")


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(name, id=f"{name}, kept") for name in twins.EMBEDDERS),
        *(pytest.param(make, id=name, marks=pytest.mark.oracle) for name, make in twins.EMBEDDERS.items()),
    ],
)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, F32]:
    """A twin, and transformers' vectors of the first tokens."""
    if isinstance(request.param, str):
        path = kept_twins.write(request.param, tmp_path_factory.mktemp("twin") / request.param)
        return path, kept_twins.vectors(request.param)
    path = request.param(tmp_path_factory.mktemp("twin") / request.param.__name__)
    return path, twins.hf_vectors(path, kept_twins.ids())


def engine(path: Path, *, numpy: bool = False, **settings: Any) -> Engine:
    made = in_numpy(loaded(path)) if numpy else loaded(path)
    return Engine(made.spec, made.weights, made.ops, EngineSettings(twins.CONTEXT, **settings))


def opened(path: Path) -> Engine:
    made = Pack.open(path)
    got = weights.load(made, threads=2)
    return Engine(made.spec, got.weights, got.ops, EngineSettings(twins.CONTEXT))


def vectors(e: Engine, texts: list[list[int]]) -> list[F32]:
    """The texts' vectors, all of them asked for at once."""
    asked = [e.read(ids, PoolingParams()) for ids in texts]
    while e.step():
        pass
    e.check_integrity()
    assert [r.finish_reason for r in asked] == ["length"] * len(texts)
    return [r.vector for r in asked if r.vector is not None]


@pytest.mark.parametrize("numpy", [False, True], ids=["native", "reference"])
def test_vectors_are_those_of_transformers(twin: tuple[Path, F32], numpy: bool) -> None:
    """Keys and values in f16 cost up to 4e-8 of a vector's power; a wrong token pooled costs all of it."""
    path, truth = twin
    got = vectors(engine(path, numpy=numpy), [kept_twins.ids()[:n] for n in twins.LENGTHS])
    for want, v in zip(truth, got, strict=True):
        assert v.dtype == np.float32 and nmse(v, want) < 1e-6


def texts_of_all_lengths() -> list[list[int]]:
    """Some begin alike."""
    rng, first = np.random.default_rng(1), kept_twins.ids()
    alone = [rng.integers(3, twins.VOCAB, n).tolist() for n in (1, 2, 5, 16, 17, 33, 64)]
    return [*alone, first, first[:33], [*first[:33], 5, 6], first]


@pytest.mark.parametrize("name", twins.EMBEDDERS)
def test_a_vector_has_the_same_bits_in_any_batch(name: str, tmp_path: Path) -> None:
    path = kept_twins.write(name, tmp_path / name)
    texts = texts_of_all_lengths()
    fresh = [vectors(engine(path, max_batch=1), [ids])[0] for ids in texts]
    batches: list[dict[str, Any]] = [{"max_batch": 1}, {"max_batch": 4}, {"max_batch": 11, "kv_tokens": 704}]
    for settings in batches:
        e = engine(path, **settings)
        for order in (1, -1):
            got = vectors(e, texts[::order])[::order]
            assert all(a.tobytes() == b.tobytes() for a, b in zip(fresh, got, strict=True)), settings


@pytest.mark.parametrize("name", ["qwen3_embedding", "qwen3_mean"])
def test_chunks_of_a_prompt_do_not_change_a_vector(name: str, tmp_path: Path) -> None:
    path = kept_twins.write(name, tmp_path / name)
    texts = texts_of_all_lengths()
    want = vectors(engine(path), texts)
    for chunk in (1, 7, 16):
        got = vectors(engine(path, prefill_chunk=chunk), texts)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("name", ENCODERS)
def test_a_token_of_an_encoder_sees_those_after_it(name: str, tmp_path: Path) -> None:
    e, ids = engine(kept_twins.write(name, tmp_path / name)), kept_twins.ids()
    a, b = vectors(e, [ids[:20], [*ids[:19], 3]])
    assert nmse(a, b) > 1e-4


def test_a_model_that_embeds_writes_nothing_and_others_do_not_embed(tmp_path: Path) -> None:
    embeds = engine(kept_twins.write("qwen3_embedding", tmp_path / "a"))
    with pytest.raises(UsageError, match="embeds texts and writes none"):
        embeds.submit([5], SamplingParams(max_tokens=0))
    with pytest.raises(UsageError, match="embeds texts and writes none"):
        embeds.read([5], PoolingParams((1, 2)))
    writes = engine(kept_twins.write("qwen3", tmp_path / "b"))
    with pytest.raises(UsageError, match="has no pooling"):
        writes.read([5], PoolingParams())
    assert request_for(writes.spec, 64, None, [5], SamplingParams()).vector is None


@pytest.mark.parametrize(
    ("ids", "why"), [([], "is empty"), ([131], "131"), ([-1], "-1"), ([5] * 65, "65 tokens")]
)
def test_a_bad_prompt_is_refused_at_once(ids: list[int], why: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=why):
        engine(kept_twins.write("bert_cls", tmp_path / "a")).read(ids, PoolingParams())


def test_logits_of_some_tokens_are_those_that_a_model_writes_with(tmp_path: Path) -> None:
    """What a reranker's score is made of."""
    path, ids = kept_twins.write("qwen3", tmp_path / "a"), kept_twins.ids()
    e = engine(path)
    asked = [e.read(ids[:n], PoolingParams((7, 100))) for n in (1, 20, 40)]
    while e.step():
        pass
    want = loaded(path).logits(ids, 40)[[0, 19, 39]][:, [7, 100]]
    got = np.stack([r.vector for r in asked if r.vector is not None])
    assert got.tobytes() == want.tobytes()


# ---- cross-encoders


@pytest.mark.parametrize("name", twins.RANKERS)
@pytest.mark.parametrize("numpy", [False, True], ids=["native", "reference"])
def test_scores_of_pairs_are_those_of_transformers(name: str, numpy: bool, tmp_path: Path) -> None:
    e = engine(kept_twins.write(name, tmp_path / name), numpy=numpy)
    rank(e, kept_twins.vectors(name), same_bits=not numpy)


@pytest.mark.oracle
@pytest.mark.parametrize("name", twins.RANKERS)
def test_scores_of_pairs_are_those_that_transformers_has_now(name: str, tmp_path: Path) -> None:
    path = twins.RANKERS[name](tmp_path / name)
    rank(engine(path), twins.hf_scores(path, kept_twins.ids()))


def rank(e: Engine, truth: F32, *, same_bits: bool = True) -> None:
    """Pairs alone and together, their scores as wanted; of the same bits, but for numpy's products."""
    ids = kept_twins.ids()
    alone = [pairs(e, [(ids[:end], second)])[0] for second, end in twins.PAIRS]
    assert nmse(np.stack(alone), truth) < 1e-6
    together = pairs(e, [(ids[:end], second) for second, end in twins.PAIRS])
    assert not same_bits or [a.tobytes() for a in alone] == [b.tobytes() for b in together]
    assert nmse(np.stack(together), truth) < 1e-6
    one_text = pairs(e, [(ids, 0)])[0]
    assert (nmse(one_text, truth[0]) > 1e-4) == (e.spec.token_types > 1), "types tell the texts apart"


def pairs(e: Engine, asked: list[tuple[list[int], int]]) -> list[F32]:
    made = [e.read(ids, PoolingParams(second=second)) for ids, second in asked]
    while e.step():
        pass
    return [r.vector for r in made if r.vector is not None]


def test_a_cross_encoder_does_not_embed_or_write(tmp_path: Path) -> None:
    e = engine(kept_twins.write("bert_ranker", tmp_path / "a"))
    for refuse in (lambda: check_embeds(e.spec), lambda: e.submit([5], SamplingParams())):
        with pytest.raises(UsageError, match="ranks documents, and neither writes"):
            refuse()


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    path = kept_twins.write("bert_ranker", tmp_path / "a")
    changed(path / "config.json", lambda c: c.update(id2label={"0": "no", "1": "yes"}))
    with pytest.raises(Unsupported, match="is not one label"):
        families.read_config(path)


# ---- shorter vectors


def test_vectors_are_cut_where_the_model_says_so(tmp_path: Path) -> None:
    made = {n: Pack.open(packed(n, tmp_path)).spec for n in ("qwen3_embedding", "qwen3_mean", "bert_cls")}
    v = np.arange(1, 65, dtype=np.float32)
    any_length, some, none = made.values()
    for spec in made.values():
        check_dimensions(spec, 64)
        assert shortened(spec, v, 64) is v and shortened(spec, v, None) is v
    check_dimensions(any_length, 5)
    unit = shortened(any_length, v, 5)
    assert len(unit) == 5 and abs(float(unit @ unit) - 1) < 1e-6
    check_dimensions(some, 16)
    assert shortened(some, v, 16).tolist() == v[:16].tolist()
    for spec, n, why in (
        (some, 17, "cut to 16, 32"),
        (any_length, 65, "1 to 64"),
        (none, 32, "does not say"),
    ):
        with pytest.raises(UsageError, match=why):
            check_dimensions(spec, n)


def packed(name: str, tmp_path: Path) -> Path:
    pack(kept_twins.write(name, tmp_path / name), tmp_path / f"{name} packed", "f32")
    return tmp_path / f"{name} packed"


# ---- files


def changed(path: Path, change: Callable[[Any], Any]) -> None:
    value = json.loads(path.read_text())
    path.write_text(json.dumps(change(value) or value))


MODULES, POOLING = "modules.json", "1_Pooling/config.json"


def _dense(modules: list[Any]) -> None:
    modules.append({"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"})


def _outside(modules: list[Any]) -> None:
    modules[1]["path"] = "../1_Pooling"


@pytest.mark.parametrize(
    ("file", "change", "error", "why"),
    [
        (
            POOLING,
            lambda c: c.update(pooling_mode_max_tokens=True),
            Unsupported,
            "pooling .* is not supported",
        ),
        (
            POOLING,
            lambda c: c.update(pooling_mode_cls_token=False),
            Unsupported,
            "pooling .* is not supported",
        ),
        (POOLING, lambda c: c.update(include_prompt=False), Unsupported, "include_prompt"),
        (POOLING, lambda c: c.update(temperature=1), Unsupported, "'temperature' is unknown"),
        (MODULES, _dense, Unsupported, "'Dense' is not supported"),
        (MODULES, _outside, BadFile, "is not a folder beside it"),
        (MODULES, lambda m: m.reverse(), Unsupported, "are not a Transformer"),
        (MODULES, lambda m: m.clear(), Unsupported, "are not a Transformer"),
        (MODULES, lambda m: {"modules": 1}, BadFile, "is not a list of modules"),
        ("config.json", lambda c: c.update(auto_map={}), Unsupported, "code of its own"),
        ("config.json", lambda c: c.update(is_matryoshka=1), BadFile, "is_matryoshka"),
        ("config.json", lambda c: c.update(matryoshka_dimensions=[65]), BadFile, "from 1 to 64"),
        ("config.json", lambda c: c.update(matryoshka_dimensions="all"), BadFile, "a list of lengths"),
        (
            "config.json",
            lambda c: c.update(position_embedding_type="relative_key"),
            Unsupported,
            "position_emb",
        ),
        ("config.json", lambda c: c.update(is_decoder=True), Unsupported, "is_decoder"),
    ],
)
def test_what_would_give_other_vectors_is_refused(
    file: str, change: Callable[[Any], Any], error: type[Exception], why: str, tmp_path: Path
) -> None:
    path = kept_twins.write("bert_cls", tmp_path / "a")
    changed(path / file, change)
    with pytest.raises(error, match=why):
        families.read_config(path)


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    path = kept_twins.write("bert_cls", tmp_path / "a")
    (path / POOLING).unlink()
    with pytest.raises(Exception, match=r"1_Pooling/config.json: no such file"):
        families.read_config(path)
    (path / MODULES).unlink()
    with pytest.raises(Unsupported, match=r"no modules.json beside it says how"):
        families.read_config(path)


def test_the_words_of_newer_files_are_known(tmp_path: Path) -> None:
    path = kept_twins.write("bert_cls", tmp_path / "a")
    (path / POOLING).write_text(
        '{"embedding_dimension": 64, "pooling_mode": "lasttoken", "include_prompt": true}'
    )
    assert families.read_config(path)[0].pooling == "last"


def test_a_prompt_that_is_always_put_before_texts_is_refused(tmp_path: Path) -> None:
    path = kept_twins.write("bert_cls", tmp_path / "a")
    file = path / "config_sentence_transformers.json"
    file.write_text('{"prompts": {"query": "query: "}, "default_prompt_name": null}')
    families.read_config(path)
    file.write_text('{"prompts": {"query": "query: "}, "default_prompt_name": "query"}')
    with pytest.raises(Unsupported, match="default_prompt_name 'query' is not supported"):
        families.read_config(path)


def test_a_rerankers_tokens_come_from_its_files(tmp_path: Path) -> None:
    path = kept_twins.write("qwen3", tmp_path / "a")
    kinds = [("Transformer", ""), ("LogitScore", "1_LogitScore")]
    modules = [
        {"path": at, "type": f"sentence_transformers.cross_encoder.modules.{kind}"} for kind, at in kinds
    ]
    (path / MODULES).write_text(json.dumps(modules))
    (path / "1_LogitScore").mkdir()
    score = path / "1_LogitScore" / "config.json"
    score.write_text('{"true_token_id": 9, "false_token_id": 8, "module_input_name": "causal_logits"}')
    assert families.read_config(path)[0].score_tokens == (9, 8)
    pack(path, tmp_path / "p", "f32")
    assert Pack.open(tmp_path / "p").spec.score_tokens == (9, 8)
    score.write_text('{"true_token_id": 131, "false_token_id": 8}')
    with pytest.raises(BadFile, match="score_tokens"):
        families.read_config(path)
    score.write_text('{"true_token_id": 9}')
    with pytest.raises(Unsupported, match="not two tokens"):
        families.read_config(path)


# ---- GGUF


def modules(path: Path) -> Path:
    """Write that the last token is pooled."""
    kinds = ["Transformer", "Pooling", "Normalize"]
    (path / MODULES).write_text(
        json.dumps(
            [{"path": f"{i}_{kind}" if i else "", "type": f"x.{kind}"} for i, kind in enumerate(kinds)]
        )
    )
    (path / "1_Pooling").mkdir()
    (path / POOLING).write_text('{"pooling_mode": "lasttoken"}')
    return path


def test_a_gguf_says_how_it_pools(tmp_path: Path) -> None:
    """As Qwen3-Embedding's do. A head that is there is not used, and not read."""
    hf = kept_twins.write("qwen3", tmp_path / "hf")
    path = gguf_twins.write(
        hf, tmp_path / "m.gguf", arch="qwen3", more=lambda w: w.add_uint32("qwen3.pooling_type", 3)
    )
    pack(path, tmp_path / "packed", "f32")
    spec = Pack.open(tmp_path / "packed").spec
    assert (spec.pooling, spec.unit_vectors, spec.tied_head) == ("last", True, True)
    pack(modules(hf), tmp_path / "hf-f32", "f32")
    texts = texts_of_all_lengths()
    got, want = (vectors(opened(tmp_path / name), texts) for name in ("packed", "hf-f32"))
    assert all(nmse(a, b) < 1e-9 for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("kind", "causal"), [(4, True), (3, False)])
def test_a_gguf_that_pools_otherwise_is_refused(kind: int, causal: bool, tmp_path: Path) -> None:
    def more(w: Any) -> None:
        w.add_uint32("qwen3.pooling_type", kind)
        w.add_bool("qwen3.attention.causal", causal)

    path = gguf_twins.write(
        kept_twins.write("qwen3", tmp_path / "hf"), tmp_path / "m.gguf", arch="qwen3", more=more
    )
    with pytest.raises(Unsupported, match=r"pooling_type 4 is not|attention.causal is false"):
        pack(path, tmp_path / "packed", "f32")
