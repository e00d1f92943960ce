"""Profiles: counts are the reference's, however the work is split; a pack in another order is the same."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kept_twins
import numpy as np
import pytest
import tiny
from conftest import Ran
from test_synth import config_file
from test_twins import Model, in_numpy

from thermocline import LLM, SamplingParams
from thermocline.cli.table import finite
from thermocline.convert import synthetic
from thermocline.convert.importer import pack as pack_model
from thermocline.engine.decoder import bind, forward
from thermocline.engine.kv_cache import KVCache, blocks_for
from thermocline.errors import BadFile, IOFailure, NumericalError, Unsupported, UsageError
from thermocline.llm import BUNDLED
from thermocline.offline import profile_plot, profiler
from thermocline.offline.activity import STEP, UNIT, ProfileWorker, add_windows, count_passages, down_norms
from thermocline.offline.corpus import Corpus, random_corpus, read_corpus
from thermocline.ops import reference
from thermocline.ops.interface import F32, Batch, FFNStats
from thermocline.pack import sidecar
from thermocline.pack.activity_profile import (
    BUCKETS,
    HOT_SHARE,
    I64,
    PROFILE,
    SAMPLES,
    Profile,
    concentration,
    hot_share,
    open_profile,
    open_samples,
    summary,
)
from thermocline.pack.manifest import Predictor
from thermocline.pack.pack import Pack, read_tensor
from thermocline.pack.reorder import Reordered, hottest_first, write_reordered
from thermocline.pack.writer import PackExtras, write_pack
from thermocline.session import weights
from thermocline.text.tokenizer import Tokenizer

CONTEXT = 97  # a beginning-of-text token and three windows
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. "
NMSE = 1e-10  # of logits in f32, in another order of neurons: other chunks, so other partial sums


def nmse(got: F32, truth: F32) -> float:
    return float(((got - truth) ** 2).sum() / (truth**2).sum())


@pytest.fixture
def own(tiny_pack: Path, tmp_path: Path) -> Pack:
    """A tiny pack that a test may change."""
    shutil.copytree(tiny_pack, tmp_path / "pack")
    return Pack.open(tmp_path / "pack")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT * 12)
    return path


def corpus_of(pack: Pack, text: Path, tokens: int = 700) -> Corpus:
    """The tiny tokenizer says nothing of a beginning of text: as if it did."""
    corpus = read_corpus(pack, [str(text)], tokens, CONTEXT, UNIT)
    return replace(corpus, prefix=np.array([tiny.BYTES], np.int32))


def request_for(pack: Pack, text: Path, **changes: Any) -> profiler.ProfileJob:
    r = profiler.ProfileJob(pack, corpus_of(pack, text), pack.path, CONTEXT, samples=50, threads=2, workers=1)
    return replace(r, **changes)


def quietly(*_: Any) -> None:
    pass


def run(r: profiler.ProfileJob) -> profiler.ProfileResult:
    return profiler.profile(r, quietly)


# ---- counting


def truth(pack: Pack, corpus: Corpus) -> tuple[I64, list[list[F32]], list[list[F32]]]:
    """By the numpy reference, of the same stored weights: counts; each passage's h and inputs by layer."""
    loaded = weights.load(pack, threads=1)
    dense = in_numpy(Model(pack.spec, loaded.weights, loaded.ops)).weights
    counts = np.zeros((pack.spec.n_layers, len(BUCKETS), pack.spec.ffn_dim), np.int64)
    hidden: list[list[F32]] = []
    inputs: list[list[F32]] = []

    class Ops:
        def __getattr__(self, name: str) -> Any:
            return getattr(reference, name)

        def ffn_add(self, x: F32, h: F32, bound: Any, sparsity: str, stats: FFNStats, shares: Any) -> None:
            norm = bound.layer.ffn_norm
            inputs[-1].append(reference.norm(h, norm.weight, norm.bias, pack.spec.norm_eps, pack.spec.norm))
            hidden[-1].append(np.empty((len(x), pack.spec.ffn_dim), np.float32))
            reference.ffn_add(x, h, bound, sparsity, stats, hidden[-1][-1])

    model, skip = bind(pack.spec, dense, Ops()), len(corpus.prefix)
    for passage in corpus.passages:
        hidden.append([])
        inputs.append([])
        ids = np.concatenate([corpus.prefix, passage])
        rows = np.arange(len(ids), dtype=np.int32)
        table = np.arange(blocks_for(len(ids)), dtype=np.int32)[None]
        batch = Batch(ids, rows, np.zeros_like(rows), table, rows[-1:])
        kv = KVCache(pack.spec, blocks_for(len(ids)))
        forward(model, kv, batch, Ops(), sparsity="exact", stats=FFNStats())
        for layer, h in enumerate(hidden[-1]):
            for b, size in enumerate(BUCKETS):
                for at in range(skip, len(ids) - size + 1, size):
                    counts[layer, b] += (h[at : at + size] != 0).any(axis=0)
    return counts, hidden, inputs


def found(pack: Pack, corpus: Corpus, threads: int = 2, workers: int = 1) -> tuple[I64, list[Any]]:
    loaded = weights.load(pack, threads=1)
    norms = down_norms(pack)
    made = [
        ProfileWorker.on_cpu(pack.spec, loaded.weights, corpus.prefix, CONTEXT, threads, norms)
        for _ in range(workers)
    ]
    all_rows = [np.arange(len(p), dtype=np.int64) for p in corpus.passages]
    counted = list(count_passages(made, corpus.passages, all_rows))
    return np.sum([c.counts for c in counted], axis=0), [c.samples for c in counted]


def test_counts_are_the_references(tiny_pack: Path, text: Path) -> None:
    """Neurons within rounding of zero may differ: a few in a hundred thousand."""
    pack = Pack.open(tiny_pack)
    corpus = corpus_of(pack, text)
    (want, _, _), (got, _) = truth(pack, corpus), found(pack, corpus)
    assert np.abs(got - want).sum() <= want.sum() * 1e-4
    assert 0.3 < want[:, 0].mean() / corpus.tokens < 0.7


def test_samples_are_what_the_gate_saw_and_what_came_of_it(tiny_pack: Path, text: Path) -> None:
    pack = Pack.open(tiny_pack)
    corpus = corpus_of(pack, text, 200)
    _, hidden, inputs = truth(pack, corpus)
    skip = len(corpus.prefix)
    loaded = weights.load(pack, threads=1)
    for passage, samples in enumerate(found(pack, corpus)[1]):
        assert [s.layer for s in samples] == list(range(pack.spec.n_layers))
        for s in samples:
            h, x = hidden[passage][s.layer][skip:], inputs[passage][s.layer][skip:]
            down = loaded.weights.layers[s.layer].experts[0].part.down
            norms = np.linalg.norm(
                loaded.ops.embed(down, np.arange(pack.spec.ffn_dim, dtype=np.int32)), axis=1
            )
            mass = np.zeros_like(h)
            mass[np.repeat(np.arange(len(h)), s.sizes), s.index] = s.mass
            assert nmse(s.input.astype(np.float32), x) < 1e-6
            assert nmse(mass, np.abs(h) * norms) < 1e-6


@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 63, 64, 128, 129, 256])
def test_windows_are_those_of_a_plain_count(tokens: int) -> None:
    active = (np.random.default_rng(tokens).random((tokens, 40)) < 0.2).astype(np.uint8)
    counts = np.zeros((len(BUCKETS), 40), np.int64)
    add_windows(active, counts)
    for b, size in enumerate(BUCKETS):
        whole = active[: tokens // size * size].reshape(-1, size, 40)
        assert (counts[b] == whole.any(axis=1).sum(axis=0)).all()


def test_windows_of_steps_add_up_to_those_of_a_passage() -> None:
    """A step begins at a multiple of the largest window; only a passage's last one may end elsewhere."""
    active = (np.random.default_rng(0).random((3 * STEP + 45, 17)) < 0.1).astype(np.uint8)
    whole, parts = (np.zeros((len(BUCKETS), 17), np.int64) for _ in range(2))
    add_windows(active, whole)
    for begin, end in ((0, STEP - UNIT), (STEP - UNIT, 2 * STEP), (2 * STEP, len(active))):
        add_windows(active[begin:end], parts)
    assert (whole == parts).all()


def test_threads_and_workers_do_not_change_a_count(tiny_pack: Path, text: Path) -> None:
    pack = Pack.open(tiny_pack)
    corpus = corpus_of(pack, text)
    alone, samples = found(pack, corpus, 1, 1)
    for threads, workers in ((3, 1), (1, 2), (2, 3)):
        got, others = found(pack, corpus, threads, workers)
        assert (got == alone).all()
        for a, b in zip(samples, others, strict=True):
            for x, y in zip(a, b, strict=True):
                assert all(np.array_equal(getattr(x, f), getattr(y, f)) for f in ("input", "index", "mass"))


def test_splitting_a_corpus_anywhere_between_passages_adds_up(tiny_pack: Path, text: Path) -> None:
    pack = Pack.open(tiny_pack)
    corpus = corpus_of(pack, text)
    whole, _ = found(pack, corpus)
    for cut in (1, 3):
        parts = (corpus.passages[:cut], corpus.passages[cut:])
        each = [found(pack, replace(corpus, passages=p))[0] for p in parts]
        assert np.array_equal(np.sum(each, axis=0), whole)


def test_the_active_fraction_is_the_one_a_run_reports(own: Pack, text: Path) -> None:
    """A run reports the tokens it decodes: those of a passage that begins where its prompt ends."""
    with LLM(own.path, threads=1, context=CONTEXT) as llm:
        params = SamplingParams(temperature=0, max_tokens=65, ignore_eos=True)
        done = llm.generate("", params)
    prompt = np.array([tiny.BYTES], np.int32)
    decoded = np.array(done.token_ids[:64], np.int32)
    corpus = Corpus("a run", prompt, (decoded,), "0")
    counts, _ = found(own, corpus)
    assert counts[:, 0].mean() / 64 == pytest.approx(done.figures.active_fraction, abs=1e-12)


def test_a_model_that_gives_nan_is_refused(own: Pack, text: Path) -> None:
    def broken(name: str, first: int, last: int) -> F32:
        layout = own.tensors.get(name)
        if layout is not None and len(layout.shape) == 1:
            return np.full(last - first, np.nan, np.float32)
        return np.ones((last - first, own.spec.dim), np.float32)

    write_pack(own.path.with_name("nan"), own.spec, "f32", broken)
    pack = replace(Pack.open(own.path.with_name("nan")))
    shutil.copy(own.path / "tokenizer.json", pack.path)
    with pytest.raises(NumericalError):
        run(request_for(pack, text))


# ---- the text


def text_of(pack: Pack, corpus: Corpus) -> str:
    return Tokenizer(pack.path, pack.spec).decode(i for p in corpus.passages for i in p.tolist())


def test_a_corpus_is_every_token_once_in_passages_of_whole_windows(own: Pack, text: Path) -> None:
    corpus = read_corpus(own, [str(text)], -1, CONTEXT, UNIT)
    assert text_of(own, corpus) == text.read_text()
    assert {len(p) for p in corpus.passages[:-1]} == {96} and corpus.prefix.tolist() == []
    assert corpus.tokens == len(text.read_text())


def test_a_passage_begins_as_a_prompt_does(text: Path) -> None:
    bundled = Pack.open(BUNDLED)
    prompt = Tokenizer(bundled.path, bundled.spec).encode("It")
    corpus = read_corpus(bundled, [str(text)], -1, CONTEXT, UNIT)
    assert corpus.prefix.tolist() == prompt[:1] == [bundled.spec.bos_id]
    assert corpus.passages[0][0] == prompt[1]


def test_files_longer_than_wanted_are_read_in_turn(own: Pack, tmp_path: Path) -> None:
    files = []
    for letter in "ab":
        (tmp_path / letter).write_text(letter * 1000)
        files.append(str(tmp_path / letter))
    corpus = read_corpus(own, files, 300, CONTEXT, UNIT)
    assert [text_of(own, replace(corpus, passages=(p,)))[0] for p in corpus.passages] == ["a", "b", "a", "b"]
    assert corpus.tokens == 300 and len(corpus.passages[-1]) == 12


def test_a_text_longer_than_a_piece_is_cut_at_a_line_and_loses_nothing(
    own: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thermocline.offline.corpus.PIECE_BYTES", 100)
    written = "\ufeff" + "".join(f"line {i}: {'é' * (i % 7)}\n" for i in range(60)) + "ü" * 400
    (tmp_path / "t").write_text(written)
    corpus = read_corpus(own, [str(tmp_path / "t")], -1, CONTEXT, UNIT)
    assert text_of(own, corpus) == written[1:]


def test_a_corpus_has_the_hash_of_its_tokens(own: Pack, text: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere.txt"
    copy.write_bytes(text.read_bytes())
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[1:])
    same, different = corpus_of(own, copy), corpus_of(own, other)
    assert corpus_of(own, text).sha256 == same.sha256 != different.sha256


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        (b"", UsageError, "no text"),
        (b"too short", UsageError, "too short"),
        (b"\x7fELF\x02\x01\x01\0\0\0\0" * 20, BadFile, "zero byte"),
        (b"text " * 50 + b"\xff\xfe", BadFile, "not UTF-8 text: 0xff at about byte 250"),
        (b"text " * 50 + b"\xc3", BadFile, "not UTF-8"),
    ],
)
def test_what_is_no_text_is_refused(
    own: Pack, tmp_path: Path, data: bytes, error: type[Exception], says: str
) -> None:
    (tmp_path / "bad").write_bytes(data)
    with pytest.raises(error, match=says):
        corpus_of(own, tmp_path / "bad")


def test_sampled_tokens_are_spread_over_the_whole_text() -> None:
    passages = [np.zeros(n, np.int32) for n in (480, 480, 33, 480, 1)]
    total = sum(map(len, passages))
    for n in (1, 7, 100, total):
        starts = np.cumsum([0, *map(len, passages[:-1])])
        rows = profiler.sampled_tokens(passages, n)
        at = np.concatenate([r + s for r, s in zip(rows, starts, strict=True)])
        assert all(((r >= 0) & (r < len(p))).all() for r, p in zip(rows, passages, strict=True))
        assert (at * n // total == np.arange(n)).mean() > 0.9 and len(np.unique(at)) == n
    assert sum(map(len, profiler.sampled_tokens(passages, 0))) == 0


# ---- the pack in its new order


@pytest.fixture(scope="module")
def logits() -> Callable[..., F32]:
    def of(pack: Pack, sparsity: str = "exact") -> F32:
        loaded = weights.load(pack, threads=2)
        ids = np.frombuffer(TEXT[:60].encode(), np.uint8).astype(np.int32) % pack.spec.vocab_size
        rows = np.arange(len(ids), dtype=np.int32)
        table = np.arange(blocks_for(len(ids)), dtype=np.int32)[None]
        batch = Batch(ids, rows, np.zeros_like(rows), table, rows)
        kv = KVCache(pack.spec, blocks_for(len(ids)))
        model = bind(pack.spec, loaded.weights, loaded.ops)
        return forward(model, kv, batch, loaded.ops, sparsity=sparsity, stats=FFNStats())

    return of


SPARSE_TWINS = ("opt", "bamboo", "bitnet", "nemotron")  # ungated with biases, dReLU, sub-norms, relu2


@pytest.mark.parametrize("name", SPARSE_TWINS)
def test_order_changes_nothing(name: str, tmp_path: Path, logits: Callable[..., F32]) -> None:
    """Summation order apart; `exact` is `off` bit for bit; and back again are the very bytes."""
    pack_model(kept_twins.write(name, tmp_path / "hf"), tmp_path / "pack", "f32")
    before = Pack.open(tmp_path / "pack")
    rng = np.random.default_rng(0)
    places = [rng.permutation(before.spec.ffn_dim) for _ in range(before.spec.n_layers)]
    shuffled = reordered(before, tmp_path / "shuffled", places)
    squared = 3 if before.spec.activation == "relu2" else 1  # the square doubles an error, and layers add up
    assert nmse(logits(shuffled), logits(before)) <= squared * NMSE
    assert np.array_equal(logits(shuffled), logits(shuffled, sparsity="off"))
    back = reordered(shuffled, tmp_path / "back", [np.argsort(p) for p in places])
    for tensor in before.tensors:
        assert np.array_equal(read_tensor(back, tensor), read_tensor(before, tensor)), tensor


def reordered(pack: Pack, dst: Path, places: list[I64]) -> Pack:
    write_reordered(pack, dst, places, lambda directory: None, drop=(), overwrite=False)
    return Pack.open(dst)


def order_of(pack: Pack, layer: int) -> I64:
    return Reordered(pack, [np.arange(pack.spec.ffn_dim)] * pack.spec.n_layers)(
        f"layers.{layer}.order", 0, pack.spec.ffn_dim
    )


@pytest.mark.parametrize("format", ["q8_0", "q4_0", "bf16"])
def test_rows_of_every_format_move_as_they_are(tiny_hf: Path, tmp_path: Path, format: str) -> None:
    pack_model(tiny_hf, tmp_path / "pack", format)
    before, turned = Pack.open(tmp_path / "pack"), np.arange(tiny.FFN)[::-1]
    after = reordered(before, tmp_path / "after", [turned] * tiny.LAYERS)
    for i in range(tiny.LAYERS):
        for tensor in ("gate.weight", "bundle"):
            rows = read_tensor(before, f"layers.{i}.{tensor}")
            assert np.array_equal(read_tensor(after, f"layers.{i}.{tensor}"), rows[::-1])
        assert np.array_equal(order_of(after, i), turned)


def test_predictors_and_counts_of_an_import_move_too(tiny_pack: Path, tmp_path: Path) -> None:
    """What PowerInfer's files bring: fc2 has a row a neuron, activation_count a value."""
    base, rank = Pack.open(tiny_pack), 32
    values = {"fc1": (rank, tiny.DIM), "fc2": (tiny.FFN, rank)}

    def source(name: str, first: int, last: int) -> Any:
        if name.endswith("activation_count"):
            return np.arange(first, last, dtype=np.float32)
        for part, (_, columns) in values.items():
            if f"predictor.{part}" in name:
                return np.arange(first, last, dtype=np.float32)[:, None] + np.zeros((1, columns), np.float32)
        vector = "norm" in name
        return np.ones(last - first if vector else (last - first, tiny.DIM), np.float32)

    optional = [f"layers.{i}.activation_count" for i in range(tiny.LAYERS)]
    predictor = Predictor((rank,) * tiny.LAYERS, 0.5)
    write_pack(
        tmp_path / "pack", base.spec, "f32", source, PackExtras(predictor=predictor, optional=optional)
    )
    pack = Pack.open(tmp_path / "pack")
    places = [np.random.default_rng(i).permutation(tiny.FFN) for i in range(tiny.LAYERS)]
    after = reordered(pack, tmp_path / "after", places)
    assert after.predictor == predictor
    for i in range(tiny.LAYERS):
        counts = read_tensor(after, f"layers.{i}.activation_count").reshape(-1).view("<f4")
        fc2 = read_tensor(after, f"layers.{i}.predictor.fc2.weight").view("<f4")
        assert np.array_equal(counts, places[i]) and np.array_equal(fc2[:, 0], places[i])
        fc1 = read_tensor(after, f"layers.{i}.predictor.fc1.weight").view("<f4")
        assert np.array_equal(fc1[:, 0], np.arange(rank))


def test_a_damaged_block_is_not_written_again_with_a_good_checksum(own: Pack, tmp_path: Path) -> None:
    at = own.tensors["layers.1.bundle"].offset + 100
    with open(own.weights_path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1]))
    with pytest.raises(BadFile, match=r"damaged: layers\.\d"):
        reordered(own, tmp_path / "after", [np.arange(tiny.FFN)] * tiny.LAYERS)
    assert not (tmp_path / "after").exists()


# ---- the whole of it


@pytest.fixture
def done(own: Pack, text: Path) -> tuple[Pack, Pack, profiler.ProfileResult]:
    """(the pack before, in a copy; after; what was done)."""
    before = own.path.with_name("before")
    shutil.copytree(own.path, before)
    result = run(request_for(own, text))
    return Pack.open(before), Pack.open(own.path), result


def test_a_profiled_pack_is_hottest_first_and_is_the_same_model(
    done: tuple[Pack, Pack, profiler.ProfileResult], text: Path, logits: Callable[..., F32]
) -> None:
    before, after, _ = done
    want, _ = found(before, corpus_of(before, text))
    made = open_profile(after)
    assert made is not None and made.tokens == corpus_of(before, text).tokens
    for i in range(tiny.LAYERS):
        one = made.counts[i][0, 0]
        assert (np.diff(one) <= 0).all()
        order = order_of(after, i)
        assert np.array_equal(order, np.argsort(-want[i, 0], kind="stable")), "ties by position"
        assert np.array_equal(made.counts[i].reshape(len(BUCKETS), -1), want[i][:, order])
        assert np.array_equal(made.hotness(i), one / made.tokens)
    assert nmse(logits(after), logits(before)) <= NMSE
    assert np.array_equal(logits(after), logits(after, sparsity="off"))
    assert sorted(p.name for p in after.path.parent.iterdir()) == ["before", "pack"], "nothing is left over"


def test_profiled_again_the_order_is_composed(
    done: tuple[Pack, Pack, profiler.ProfileResult], tmp_path: Path
) -> None:
    before, after, _ = done
    (tmp_path / "other.txt").write_text("".join(chr(33 + i * i % 90) for i in range(900)))
    run(request_for(after, tmp_path / "other.txt"))
    again = Pack.open(after.path)
    for i in range(tiny.LAYERS):
        order = order_of(again, i)
        for tensor in ("gate.weight", "bundle"):
            rows = read_tensor(before, f"layers.{i}.{tensor}")
            assert np.array_equal(read_tensor(again, f"layers.{i}.{tensor}"), rows[order])
    made = open_profile(again)
    assert made is not None and (np.diff(made.counts[0][0, 0]) <= 0).all()


def test_samples_are_kept_in_the_new_order(
    done: tuple[Pack, Pack, profiler.ProfileResult], text: Path
) -> None:
    before, after, result = done
    corpus = corpus_of(before, text)
    rows, per_passage = profiler.sampled_tokens(corpus.passages, 50), found(before, corpus)[1]
    samples = open_samples(after)
    assert samples is not None and samples.n == result.samples == 50
    for i in range(tiny.LAYERS):
        seen, indptr, index, mass = samples.layer(i)
        dense = np.zeros((50, tiny.FFN), np.float16)
        dense[np.repeat(np.arange(50), np.diff(indptr)), index] = mass
        want, inputs = [], []
        for picked, layers in zip(rows, per_passage, strict=True):
            s = layers[i]
            whole = np.zeros((len(s.sizes), tiny.FFN), np.float16)
            whole[np.repeat(np.arange(len(s.sizes)), s.sizes), s.index] = s.mass
            want.append(whole[picked])
            inputs.append(s.input[picked])
        assert np.array_equal(dense, np.concatenate(want)[:, order_of(after, i)])
        assert np.array_equal(seen, np.concatenate(inputs))
    samples.close()


def test_no_samples_is_no_file(own: Pack, text: Path) -> None:
    run(request_for(own, text, samples=0))
    assert not (own.path / SAMPLES).exists() and open_samples(Pack.open(own.path)) is None


def test_other_files_of_a_pack_stay_and_what_was_made_for_the_old_order_goes(own: Pack, text: Path) -> None:
    (own.path / "notes.txt").write_text("mine")
    (own.path / "predictors.safetensors").write_bytes(b"of the old order")
    result = run(request_for(own, text))
    assert result.dropped == ("predictors.safetensors",)
    assert (own.path / "notes.txt").read_text() == "mine"
    assert not (own.path / "predictors.safetensors").exists()


def contents(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(path.iterdir())}


def test_a_failure_while_writing_loses_neither_the_pack_nor_the_counts(
    own: Pack, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(own.path)
    with monkeypatch.context() as patch:
        patch.setattr(profiler, "write_samples", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
        with pytest.raises(IOFailure, match="disk full"):
            run(request_for(own, text))
    assert contents(own.path) == before
    result = run(request_for(own, text))
    assert result.resumed_tokens == corpus_of(own, text).tokens and result.tokens_per_s is None
    assert open_profile(Pack.open(own.path)) is not None


# ---- interruptions


@pytest.mark.parametrize("after", [1, 3])
def test_an_interrupted_profile_goes_on_and_ends_in_the_same_bytes(
    own: Pack, text: Path, tmp_path: Path, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(own.path, tmp_path / "alone")
    run(request_for(Pack.open(tmp_path / "alone"), text))
    seen = 0

    def ctrl_c(what: str, done: int, total: int, unit: str) -> None:
        nonlocal seen
        if what == "counting" and done and (seen := seen + 1) == after:
            raise KeyboardInterrupt

    for _ in range(2):
        seen = 0  # the second time the first call says where it goes on from
        with pytest.raises(KeyboardInterrupt):
            profiler.profile(request_for(own, text), ctrl_c)
    caplog.clear()
    caplog.set_level(logging.INFO, "thermocline")
    result = profiler.profile(request_for(own, text, threads=1, workers=2), quietly)
    assert result.resumed_tokens == (2 * after - 1) * 96 and "going on after" in caplog.messages[0]
    assert contents(own.path) == contents(tmp_path / "alone")


def test_kill_9_at_any_moment_is_gone_on_from(own: Pack, text: Path, tmp_path: Path) -> None:
    shutil.copytree(own.path, tmp_path / "alone")
    run(request_for(Pack.open(tmp_path / "alone"), text))
    code = f"""
import dataclasses
import numpy as np
from thermocline.offline import profiler, corpus
from thermocline.pack.pack import Pack, read_tensor
profiler.SAVE_S = -1.0
pack = Pack.open({str(own.path)!r})
text = corpus.read_corpus(pack, [{str(text)!r}], 700, {CONTEXT}, 32)
text = dataclasses.replace(text, prefix=np.array([{tiny.BYTES}], np.int32))
def progress(what, done, total, unit):
    if what == "counting": print(done, flush=True)
r = profiler.ProfileJob(pack, text, pack.path, {CONTEXT}, 50, 2, 1)
profiler.profile(r, progress)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    for lines in (2, 4):
        with subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, env=env) as child:
            assert child.stdout is not None
            for _ in range(lines):
                child.stdout.readline()
            child.send_signal(signal.SIGKILL)
    result = run(request_for(own, text))
    assert result.resumed_tokens >= 96
    assert contents(own.path) == contents(tmp_path / "alone")


@pytest.mark.parametrize("file", ["state.safetensors", "samples.bin"])
def test_a_damaged_unfinished_profile_is_begun_anew(
    own: Pack, text: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    def ctrl_c(what: str, done: int, total: int, unit: str) -> None:
        if what == "counting" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profiler.profile(request_for(own, text), ctrl_c)
    path = own.path.with_name("pack.profile-unfinished") / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data if file == "samples.bin" else data[:-9])
    caplog.clear()
    result = profiler.profile(request_for(own, text), quietly)
    assert result.resumed_tokens == 0 and "starting anew" in caplog.messages[0]


def test_an_unfinished_profile_of_another_text_is_not_gone_on_from(
    own: Pack, text: Path, tmp_path: Path
) -> None:
    def ctrl_c(what: str, done: int, total: int, unit: str) -> None:
        if what == "counting" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profiler.profile(request_for(own, text), ctrl_c)
    (tmp_path / "other.txt").write_text("Another text altogether. " * 10)
    assert run(request_for(own, tmp_path / "other.txt")).resumed_tokens == 0


def test_two_profiles_of_one_pack_at_once_are_refused(own: Pack, text: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    def wait(what: str, done: int, total: int, unit: str) -> None:
        if what == "counting":
            entered.set()
            leave.wait(10)

    first = threading.Thread(target=profiler.profile, args=(request_for(own, text), wait))
    first.start()
    try:
        assert entered.wait(10)
        with pytest.raises(UsageError, match="another process"):
            run(request_for(own, text))
    finally:
        leave.set()
        first.join()


def test_too_small_a_disk_is_said_before_anything_is_computed(
    own: Pack, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(own.path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 16))
    monkeypatch.setattr(weights, "load", lambda *_, **__: pytest.fail("too late"))
    with pytest.raises(IOFailure, match="fewer --samples"):
        run(request_for(own, text))


@pytest.mark.parametrize(("passages", "count"), [(1, 28), (5, 140), (128, 2715)])
def test_the_default_samples_of_a_7b_leave_memory_to_the_model(passages: int, count: int) -> None:
    """A short text was sampled whole: 512 tokens of a passage took 5 GiB, and --ram 8 was refused."""
    _, spec, _ = synthetic.read_shape("llama-2-7b")
    assert profiler.default_samples(spec, passages) == count
    of_passage = -(-count // passages)
    assert of_passage * profiler.sample_bytes(spec, active=1.0) <= profiler.SAVE_BYTES


# ---- planted activity


@pytest.mark.parametrize("shape", ["llama-2-7b", "opt-6.7b"])
def test_what_is_measured_is_what_was_planted(tmp_path: Path, shape: str) -> None:
    synthetic.SyntheticModel.of(str(config_file(tmp_path, shape)), 1, 0.11, 0.26, 64).write(
        tmp_path / "pack", "q8_0"
    )
    pack = Pack.open(tmp_path / "pack")
    corpus = random_corpus(pack, 4096, 512, UNIT)
    r = profiler.ProfileJob(pack, corpus, pack.path, 512, samples=0, threads=2, workers=1)
    truth = np.load(tmp_path / "pack" / "synth.npz")["activity"]
    result = run(r)
    after = Pack.open(pack.path)
    assert summary(result.profile)["active_fraction"] == pytest.approx(0.11, abs=0.02)
    for i in range(pack.spec.n_layers):
        planted = truth[i].reshape(-1)[order_of(after, i)]
        assert np.corrcoef(planted, result.profile.hotness(i))[0, 1] > 0.97
    assert summary(result.profile)["hot_share"] == pytest.approx(0.26, abs=0.05)


# ---- files that are not what they should be


def test_a_profile_or_samples_of_another_pack_are_refused(
    done: tuple[Pack, Pack, profiler.ProfileResult],
) -> None:
    before, after, _ = done
    for name, opened in ((PROFILE, open_profile), (SAMPLES, open_samples)):
        shutil.copy(after.path / name, before.path / name)
        with pytest.raises(BadFile, match="another pack; run `thermocline profile"):
            opened(before)
        assert opened(after) is not None


def test_a_damaged_sidecar_is_understood_or_refused_never_worse(
    done: tuple[Pack, Pack, profiler.ProfileResult],
) -> None:
    _, after, _ = done
    rng = np.random.default_rng(0)
    for name in (PROFILE, SAMPLES):
        path = after.path / name
        whole = path.read_bytes()
        for _ in range(150):
            data = bytearray(whole)
            header = 8 + int.from_bytes(whole[:8], "little")
            at = int(rng.integers(0, header if rng.random() < 0.7 else len(data)))
            data[at] = int(rng.integers(0, 256))
            path.write_bytes(data[: int(rng.integers(0, len(data)))] if rng.random() < 0.2 else data)
            try:
                open_profile(after)
                samples = open_samples(after)
                for i in range(tiny.LAYERS if samples is not None else 0):
                    assert samples is not None
                    samples.layer(i)
            except BadFile as e:
                assert name in str(e)
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("buckets", [1]),
        ("buckets", [2, 4, 8, 16, 32, 64]),
        ("windows", [700, 350, 175]),
        ("windows", [1, 1, 1, 1, 1, 1]),
        ("tokens", "many"),
        ("corpus", None),
    ],
)
def test_facts_that_cannot_be_are_refused(
    done: tuple[Pack, Pack, profiler.ProfileResult], key: str, value: object
) -> None:
    _, after, result = done
    p = result.profile
    facts: dict[str, Any] = {"buckets": list(p.buckets), "windows": list(p.windows)}
    facts |= {"tokens": p.tokens, "corpus": p.corpus, key: value}
    layout: Any = {f"layers.{i}.counts": ("i8", c.shape) for i, c in enumerate(p.counts)}
    stamp = sidecar.stamp(after.path)
    sidecar.write(after.path / PROFILE, "profile", stamp, facts, layout, p.counts)
    with pytest.raises(BadFile, match=PROFILE):
        open_profile(after)


# ---- what it says


def test_hotness_between_buckets_and_the_share_of_the_hot() -> None:
    counts = np.array([[[8, 4, 0, 0]], [[4, 3, 0, 0]]], np.int64)
    p = Profile((1, 2), (8, 4), 8, "", (counts,))
    assert p.hotness(0).tolist() == [1.0, 0.5, 0, 0]
    assert p.hotness(0, 2).tolist() == p.hotness(0, 9).tolist() == [1.0, 0.75, 0, 0]
    assert p.hotness(0, 1)[1] < 0.5 + 1e-12
    wide = Profile((1, 4), (8, 4), 8, "", (counts,))
    assert wide.hotness(0, 2).tolist() == [1.0, 0.625, 0, 0]
    assert hot_share(np.array([80, 10, 10, 0], np.int64)) == 0.25
    assert hot_share(np.array([50, 29, 21, 0], np.int64)) == 0.75
    assert hot_share(np.zeros(4, np.int64)) == 0.0
    x, y = concentration(np.array([1, 3], np.int64))
    assert x.tolist() == [0, 0.5, 1] and y.tolist() == [0, 0.75, 1]
    assert HOT_SHARE == 0.8


def test_hottest_first_keeps_experts_apart() -> None:
    counts = np.array([[1, 3, 3], [0, 5, 9]], np.int64)
    assert hottest_first(counts).tolist() == [1, 2, 0, 5, 4, 3]


def test_the_command_profiles_a_pack_and_says_what_it_found(
    thermocline: Callable[..., Ran], own: Pack, text: Path, tmp_path: Path
) -> None:
    ran = thermocline("profile", own.path, "--corpus", text, text, "--tokens", 700, "--ctx", 97)
    assert ran.code == 0 and "700" in ran.out and "in order of hotness" in ran.out
    assert "make 80% of activations" in ran.out and "samples for training" in ran.err
    out = tmp_path / "out"
    ran = thermocline("profile", own.path, "-o", out, "--corpus", text, "--json", "-q", "--samples", 0)
    about = json.loads(ran.out)
    made = open_profile(Pack.open(out))
    assert ran.code == 0 and ran.err == "" and made is not None
    assert {k: about[k] for k in summary(made)} == finite(summary(made))
    assert about["samples"] == 0 and about["path"] == str(out)
    ran = thermocline("profile", own.path, "-o", out, "--corpus", text)
    assert ran.code == 2 and "exists already" in ran.err


def test_what_cannot_be_profiled_is_refused_in_one_line(
    thermocline: Callable[..., Ran], own: Pack, text: Path, tmp_path: Path
) -> None:
    silu = tmp_path / "silu"
    pack_model(tiny.hf_directory(tmp_path / "hf", hidden_act="silu"), silu, "f32")
    (tmp_path / "nul").write_bytes(b"\0" * 99)
    out = tmp_path / "out"
    for code, says, argv in (
        (2, "missing the text", [own.path]),
        (2, "part of the program", ["--corpus", text]),
        (6, "ReLU-family", [silu, "--corpus", text]),
        (4, "no such file", [own.path, "--corpus", tmp_path / "absent"]),
        (3, "a directory", [own.path, "--corpus", tmp_path]),
        (3, "zero byte", [own.path, "--corpus", tmp_path / "nul"]),
        (2, "thermocline pack", [tmp_path / "hf", "--corpus", text]),
        (4, "no such directory", [tmp_path / "absent", "--corpus", text]),
        (2, "the model's limit", [own.path, "--corpus", text, "--ctx", 10**6]),
        (2, "too short", [own.path, "--corpus", text, "--ctx", 9]),
        (2, ".png, .svg, .pdf", [own.path, "--corpus", text, "--plot", out]),
        (4, "no such directory", [own.path, "--corpus", text, "--plot", out / "p.png"]),
    ):
        ran = thermocline("profile", *argv)
        assert (ran.code, ran.out) == (code, "") and says in ran.err, (argv, ran)
        assert ran.err.count("\n") == 1 and "Traceback" not in ran.err
    assert not list(tmp_path.glob("*unfinished*"))
    with pytest.raises(Unsupported):
        profiler.check_sparse(Pack.open(silu).spec)


def test_ctrl_c_is_130_and_says_how_to_go_on(
    thermocline: Callable[..., Ran], own: Pack, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(profiler, "profile", interrupted)
    ran = thermocline("profile", own.path, "--corpus", text)
    assert ran.code == 130 and "the same command goes on" in ran.err


# ---- the picture


@pytest.mark.oracle
@pytest.mark.parametrize("kind", profile_plot.KINDS)
def test_a_picture_is_drawn(
    done: tuple[Pack, Pack, profiler.ProfileResult], tmp_path: Path, kind: str
) -> None:
    path = tmp_path / f"picture{kind}"
    profile_plot.check(path)
    profile_plot.draw(done[2].profile, path, "tiny")
    magic = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[kind]
    assert path.read_bytes().startswith(magic) and path.stat().st_size > 4000


def test_without_matplotlib_the_extra_is_named_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"thermocline\[plot\]"):
        profile_plot.check(tmp_path / "p.png")


def test_nothing_else_imports_matplotlib() -> None:
    code = "import sys, thermocline.cli.main, thermocline.offline.profiler, thermocline.offline.profile_plot;"
    code += "print('matplotlib' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "False"
