"""`thermocline eval`: windows, scores, statistics against independent arithmetic; what it refuses."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import toy
from tokenizers import processors

from thermocline.convert.importer import pack
from thermocline.engine.decoder import Model, bind
from thermocline.errors import NumericalError, UsageError
from thermocline.llm import BUNDLED
from thermocline.machine import hardware
from thermocline.offline import evaluate
from thermocline.offline.evaluate import Comparison, Divergence, Estimate, Perplexity, Reader
from thermocline.ops import reference
from thermocline.ops.cpu import CpuOps
from thermocline.ops.interface import F32, I32
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import LayerPredictor, open_predictors, write_predictors
from thermocline.session import weights
from thermocline.text.tokenizer import Tokenizer

Run = Callable[..., Any]
CONTEXT = 32
TEXT = "".join(chr(97 + i * i % 26) + " " * (i % 5 == 0) for i in range(400))


@pytest.fixture(scope="module")
def bundled() -> tuple[Model, CpuOps, I32]:
    """A really trained model, with the first windows of a text of its own making."""
    opened = Pack.open(BUNDLED)
    loaded = weights.load(opened, threads=1)
    text = "Once upon a time there was a little girl called Lily. She had a red ball. " * 40
    texts = evaluate.windows(Tokenizer(BUNDLED, opened.spec), text, 64)
    return bind(opened.spec, loaded.weights, loaded.ops), loaded.ops, texts[:3]


def toy_reader(**more: Any) -> Reader:
    model = bind(toy.SPEC, toy.WEIGHTS, reference)
    return Reader(model, reference, context=CONTEXT, **more)


def toy_texts(count: int = 3) -> I32:
    return np.random.default_rng(7).integers(0, toy.VOCAB, (count, CONTEXT)).astype(np.int32)


# ---- windows


def with_bos(path: Path) -> Tokenizer:
    made = tiny.tokenizer()
    made.post_processor = processors.TemplateProcessing(
        single=f"{tiny.BOS} $A", special_tokens=[(tiny.BOS, tiny.BYTES)]
    )
    path.mkdir()
    made.save(str(path / "tokenizer.json"))
    return Tokenizer(path)


def test_every_window_begins_as_a_text_does_and_the_rest_is_left_out(tmp_path: Path) -> None:
    """llama-perplexity: the text's tokens with its BOS, cut, then a BOS in each window's first place."""
    tokenizer = with_bos(tmp_path / "bos")
    found, ids = evaluate.windows(tokenizer, TEXT[:40], 16), tokenizer.encode(TEXT[:40])
    assert found.tolist() == [ids[:16], [tiny.BYTES, *ids[17:32]]]
    assert evaluate.windows(tokenizer, TEXT[:40], 16, limit=1).tolist() == [ids[:16]]


def test_a_model_without_a_beginning_loses_no_token(tiny_pack: Path) -> None:
    tokenizer = Tokenizer(tiny_pack)
    assert evaluate.windows(tokenizer, TEXT[:33], 16).ravel().tolist() == tokenizer.encode(TEXT[:32])


def test_a_text_shorter_than_a_window_says_what_it_has_and_needs(tiny_pack: Path) -> None:
    with pytest.raises(UsageError, match="has 15 tokens, a window needs 16"):
        evaluate.windows(Tokenizer(tiny_pack), TEXT[:15], 16)


# ---- scores


@pytest.mark.oracle
def test_scores_are_torchs() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    own, base = ((rng.standard_normal((40, 5000)) * s + 1e4).astype(np.float32) for s in (3, 20))
    targets = rng.integers(0, 5000, 40).astype(np.int32)
    q, p = (torch.log_softmax(torch.from_numpy(x).double(), dim=1) for x in (own, base))
    nll = torch.nn.functional.nll_loss(q, torch.from_numpy(targets).long(), reduction="none")
    kld = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(dim=1)
    found = evaluate.compare(own, base, targets)
    np.testing.assert_allclose(evaluate.nll(own, targets), nll, rtol=1e-13)
    np.testing.assert_array_equal(found.nll, evaluate.nll(own, targets))
    np.testing.assert_array_equal(found.base_nll, evaluate.nll(base, targets))
    np.testing.assert_allclose(found.kld, kld, rtol=1e-11)
    np.testing.assert_array_equal(found.same_top, own.argmax(axis=1) == base.argmax(axis=1))


def test_a_prediction_that_is_certain_has_a_finite_divergence() -> None:
    """Probabilities below the smallest double are 0, and 0 log 0 is 0."""
    base = np.array([[0, 3000, -3000]], np.float32)
    found = evaluate.compare(np.zeros((1, 3), np.float32), base, np.array([1], np.int32))
    assert found.kld[0] == pytest.approx(math.log(3), rel=1e-15)
    assert found.base_nll[0] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_numbers_are_an_error(bad: float) -> None:
    logits = np.zeros((3, 4), np.float32)
    logits[1, 2] = bad
    with pytest.raises(NumericalError, match="token 2"):
        evaluate.nll(logits, np.zeros(3, np.int32))
    with pytest.raises(NumericalError, match="token 2"):
        evaluate.compare(np.zeros_like(logits), logits, np.zeros(3, np.int32))


# ---- reading


def whole_window_nll(reader: Reader, texts: I32) -> list[float]:
    """By the book: all logits of each window at once, then the second half's tokens one by one."""
    found = []
    for window in texts:
        (logits,) = reader.read(window[None], 0, CONTEXT).astype(np.float64)
        for i in range(CONTEXT // 2, CONTEXT - 1):
            e = np.exp(logits[i] - logits[i].max())
            found.append(-math.log(e[window[i + 1]] / e.sum()))
    return found


@pytest.mark.parametrize(("sparsity", "side", "step"), [("exact", 1, None), ("off", 2, 5), ("exact", 4, 1)])
def test_the_second_half_of_each_window_is_scored(sparsity: str, side: int, step: int | None) -> None:
    """llama-perplexity scores context - 1 - context / 2 tokens of a window."""
    texts = toy_texts()
    found = evaluate.perplexity(toy_reader(sparsity=sparsity, side=side, step=step), texts)
    expected = whole_window_nll(toy_reader(), texts)
    assert found.tokens == len(expected) == 3 * (CONTEXT - 1 - CONTEXT // 2)
    assert found.nll.value == pytest.approx(np.mean(expected), rel=1e-6)
    error = np.std(expected) / math.sqrt(len(expected) - 1)
    assert found.nll.error == pytest.approx(error, rel=1e-5)
    assert found.perplexity.value == pytest.approx(math.exp(np.mean(expected)), rel=1e-5)
    assert found.perplexity.error == pytest.approx(error * math.exp(np.mean(expected)), rel=1e-4)


@pytest.mark.oracle
def test_perplexity_is_transformers(tiny_hf: Path, tiny_pack: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tiny_hf, dtype=torch.float32)
    opened = Pack.open(tiny_pack)
    texts = evaluate.windows(Tokenizer(tiny_pack, opened.spec), TEXT, CONTEXT)
    ids = torch.from_numpy(texts).long()
    with torch.no_grad():
        logits = oracle(ids).logits[:, CONTEXT // 2 : -1].double()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, CONTEXT // 2 + 1 :].flatten())
    loaded = weights.load(opened, threads=1)
    reader = Reader(bind(opened.spec, loaded.weights, loaded.ops), loaded.ops, context=CONTEXT)
    assert evaluate.perplexity(reader, texts).nll.value == pytest.approx(
        expected.item(), abs=2e-4
    )  # f16 cache


@pytest.mark.parametrize(
    ("sparsity", "side", "step"), [("exact", 1, 1), ("exact", 4, 1), ("exact", 4, None), ("off", 2, 2)]
)
def test_logits_are_the_same_however_they_are_read(
    bundled: tuple[Model, CpuOps, I32], sparsity: str, side: int, step: int | None
) -> None:
    """As prompts, as generated tokens, several windows together: bit for bit (docs/internals/csrc.md)."""
    model, ops, texts = bundled
    reader = Reader(model, ops, context=64, sparsity=sparsity, side=side, step=step)
    plain = Reader(model, ops, context=64)
    for first in range(0, len(texts), side):
        group = texts[first : first + side]
        expected = np.concatenate([plain.read(one[None], 0, 64) for one in group])
        np.testing.assert_array_equal(reader.read(group, 0, 64), expected)
        reader.prompt(group, 30)
        np.testing.assert_array_equal(reader.read(group, 30, 64), expected[:, 30:])


def test_layers_with_a_window_have_their_own_blocks() -> None:
    """Longer than two blocks of keys and values, in pieces that begin inside them, group after group."""
    spec = replace(toy.SPEC, sliding_window=9, window_layers=(1,))
    model = bind(spec, toy.WEIGHTS, reference)
    texts = np.random.default_rng(8).integers(0, toy.VOCAB, (4, 100)).astype(np.int32)
    parts, whole = (
        Reader(model, reference, context=100, side=2, step=7),
        Reader(model, reference, context=100),
    )
    for group in (texts[:2], texts[2:]):
        parts.prompt(group, 50)
        expected = np.concatenate([whole.read(one[None], 0, 100) for one in group])
        np.testing.assert_allclose(parts.read(group, 50, 100), expected[:, 50:], atol=5e-3)


def test_the_mode_is_what_is_asked_for(bundled: tuple[Model, CpuOps, I32]) -> None:
    """Its logits do not tell; the rows that are read do."""
    model, ops, texts = bundled
    exact, off = (Reader(model, ops, context=64, sparsity=s, step=1) for s in ("exact", "off"))
    for reader in (exact, off):
        reader.read(texts[:1], 0, 8)
    assert exact.stats.rows == 2 * exact.stats.active < 0.2 * exact.stats.rows_dense
    assert off.stats.rows == off.stats.rows_dense


def test_prediction_never_reads_more_tokens_than_its_path_takes() -> None:
    """More than 4 tokens at once would be computed exactly, and the mode would look perfect."""
    assert [toy_reader(sparsity="predict", side=side).step for side in (1, 4)] == [1, 1]
    with pytest.raises(AssertionError, match="read exactly"):
        toy_reader(sparsity="predict", side=2, step=4)


def test_few_logits_are_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, whole = toy_texts(), evaluate.perplexity(toy_reader(), toy_texts())
    monkeypatch.setattr(evaluate, "LOGITS", 3 * toy.VOCAB)
    lengths: list[int] = []
    reader = toy_reader()
    read = reader.read

    def counted(*args: Any, **more: Any) -> F32:
        logits = read(*args, **more)
        lengths.append(logits.shape[1])
        return logits

    monkeypatch.setattr(reader, "read", counted)
    assert evaluate.perplexity(reader, texts).nll.value == pytest.approx(whole.nll.value, rel=1e-6)
    assert lengths == 3 * [3, 3, 3, 3, 3]


def test_progress_counts_windows() -> None:
    seen: list[tuple[int, int]] = []
    evaluate.perplexity(toy_reader(side=2), toy_texts(5), lambda done, total: seen.append((done, total)))
    assert seen == [(2, 5), (4, 5), (5, 5)]


# ---- divergence


def test_a_model_does_not_diverge_from_itself(bundled: tuple[Model, CpuOps, I32]) -> None:
    """Exactly: `exact` and `off` have the same logits, and equal logits cancel."""
    model, ops, texts = bundled
    sides = [Reader(model, ops, context=64, sparsity=s) for s in ("exact", "off")]
    found = evaluate.divergence(sides[0], sides[1], texts)
    nothing = Estimate(0.0, 0.0)
    assert (found.kld, found.delta_p, found.delta_p_rms) == (nothing, nothing, nothing)
    assert (found.kld_p99, found.kld_max, found.same_top.value) == (0, 0, 1)
    assert found.ratio == Estimate(1.0, 0.0) and found.own == found.base
    assert found.own == evaluate.perplexity(Reader(model, ops, context=64), texts)


def test_statistics_are_llama_perplexitys() -> None:
    """From its formulas: sums, sums of squares, a covariance."""
    rng = np.random.default_rng(5)
    a, b = rng.exponential(2, 500), rng.exponential(2, 500)
    a = 0.9 * b + 0.1 * a
    same, n = rng.random(500) < 0.9, 500
    d = Divergence.of(Comparison(a, b, a + 1, same))

    def error(x: np.ndarray[Any, Any]) -> float:
        return math.sqrt((np.sum(x * x) / n - (np.sum(x) / n) ** 2) / (n - 1))

    covariance = (np.sum(a * b) / n - np.sum(a) / n * np.sum(b) / n) / (n - 1)
    ratio = math.exp(a.mean() - b.mean())
    paired = ratio * math.sqrt(error(a) ** 2 + error(b) ** 2 - 2 * covariance)
    p = np.exp(-a) - np.exp(-b)
    rms = math.sqrt(np.mean(p * p))
    ordered, at = np.sort(a + 1), 0.99 * (n - 1)
    p99 = ordered[int(at)] * (1 - at % 1) + ordered[int(at) + 1] * (at % 1)
    expected = {
        "ratio": (ratio, paired),
        "kld": (np.mean(a + 1), error(a)),
        "same_top": (same.mean(), math.sqrt(same.mean() * (1 - same.mean()) / (n - 1))),
        "delta_p": (p.mean(), error(p)),
        "delta_p_rms": (rms, 0.5 / rms * error(p * p)),
    }
    for name, (value, wrong) in expected.items():
        found = getattr(d, name)
        assert (found.value, found.error) == (pytest.approx(value), pytest.approx(wrong, rel=1e-9)), name
    assert d.kld_p99 == pytest.approx(p99) and d.kld_max == ordered[-1]
    assert d.own == Perplexity.of(a) and d.base == Perplexity.of(b)


def test_a_single_token_has_no_error() -> None:
    assert math.isnan(Perplexity.of(np.array([1.0])).perplexity.error)


# ---- types of keys and values

STORY = (
    "Once upon a time there was a little girl called Lily. She lived in a small house near the river with "
    "her mother and her brother Tom. One day she found an old key under a stone in the garden. It was brown "
    'and heavy. "What does it open?" she asked her brother. Tom did not know. They tried the door of the '
    "house, but the key was too big. They tried the box in the kitchen, but the key was too small. Then they "
    "walked to the forest, where a tall tree stood by the path. In the tree there was a tiny door. Lily put "
    'the key in the lock and turned it slowly. The door opened, and a grey cat looked out. "Thank you," '
    'said the cat. "I lost my key last winter, and since then I could not go out to play." Lily was very '
    "happy. She gave the cat some of her bread, and the cat showed them the way to a pond where ducks swam "
    'in the sun. They played until it was dark. Then their mother called them, and they ran home. "Where '
    'have you been?" she asked. Lily smiled and told her about the tree, the door and the cat. Her mother '
    'laughed. "Tomorrow," she said, "you must show me." And in the morning all of them went to the '
    "forest, and the cat was waiting for them on the stone, with a ball of red wool beside it. "
)


@pytest.mark.parametrize(("type", "most"), [("q8_0", 0.001), ("q4_0", 0.01)])
def test_quantised_keys_and_values_keep_the_bundled_models_predictions(
    thermocline: Run, tmp_path: Path, type: str, most: float
) -> None:
    """The mean divergence from f16 keys and values, in nats, in the same pack."""
    path = tmp_path / "story.txt"
    path.write_text(STORY)
    how = ("--cache-type-k", type, "--cache-type-v", type, "--against", "exact")
    ran = thermocline("eval", "--text", path, "-t", "1", "--ctx", "256", "--json", *how)
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(ran.out)
    assert (found["cache_type_k"], found["cache_type_v"], found["windows"]) == (type, type, 1)
    assert 0 < found["against"]["kld"]["value"] <= most


def test_the_same_types_are_nothing_to_compare(thermocline: Run, silu: Path, text: Path) -> None:
    ran = thermocline("eval", silu, "--text", text, "--against", "exact")
    assert ran.code == 2 and "is the same model" in ran.err


# ---- prediction


@pytest.fixture(scope="module")
def guessed(tiny_pack: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], Path]:
    """The tiny model with predictors of half its rank, which take gates above `threshold` for active."""
    made: dict[float, Path] = {}

    def at(threshold: float) -> Path:
        if threshold not in made:
            made[threshold] = tmp_path_factory.mktemp("guessed") / "pack"
            shutil.copytree(tiny_pack, made[threshold])
            opened = Pack.open(made[threshold])
            write_predictors(opened, [predictor_of(opened, i, threshold) for i in range(tiny.LAYERS)], {})
        return made[threshold]

    return at


def predictor_of(opened: Pack, layer: int, threshold: float) -> LayerPredictor:
    gate = tiny.tensors()[f"model.layers.{layer}.mlp.gate_proj.weight"]
    u, s, v = np.linalg.svd(gate, full_matrices=False)
    thresholds = np.full(tiny.FFN, threshold, np.float32)
    return LayerPredictor("svd", v[:32], np.ascontiguousarray(u[:, :32] * s[:32]), None, thresholds, hot=0)


def reader_of(path: Path, sparsity: str, **more: Any) -> Reader:
    opened = Pack.open(path)
    loaded = weights.load(opened, threads=1, predictors=open_predictors(opened))
    model = bind(opened.spec, loaded.weights, loaded.ops)
    return Reader(model, loaded.ops, context=CONTEXT, sparsity=sparsity, **more)


def tiny_texts(path: Path) -> I32:
    return evaluate.windows(Tokenizer(path), TEXT, CONTEXT)


def test_predicting_every_neuron_is_exact(guessed: Callable[[float], Path]) -> None:
    path = guessed(-math.inf)
    found = evaluate.divergence(reader_of(path, "predict"), reader_of(path, "exact"), tiny_texts(path))
    assert (found.kld_max, found.own) == (0, found.base)


def test_what_is_predicted_wrongly_shows(guessed: Callable[[float], Path]) -> None:
    path = guessed(0.3)
    some, most = (reader_of(path, "predict", side=side) for side in (1, 4))
    found, together = (
        evaluate.divergence(reader, reader_of(path, "exact", side=reader.side), tiny_texts(path))
        for reader in (some, most)
    )
    assert 0.01 < found.kld.value < 1 and found.same_top.value < 1
    assert 0.2 < some.stats.predicted / some.stats.gates_dense < 0.6
    # Four windows together compute what is predicted for any of them, and so less is missing.
    assert together.kld.value < found.kld.value
    assert most.stats.predicted / most.stats.gates_dense > some.stats.predicted / some.stats.gates_dense


def test_prompts_are_not_predicted(guessed: Callable[[float], Path]) -> None:
    """As in a run, where the prompt is read by `exact`: even one of few tokens."""
    path = guessed(math.inf)
    predict, exact = (reader_of(path, sparsity) for sparsity in ("predict", "exact"))
    texts = tiny_texts(path)[:1]
    for reader in (predict, exact):
        reader.prompt(texts, 3)
    last = tiny.LAYERS - 1
    (k,), (expected,) = ([reader._kv.layer(last).k] for reader in (predict, exact))
    assert np.array_equal(k, expected) and k.any()
    assert not np.array_equal(predict.read(texts, 3, 4), exact.read(texts, 3, 4))


def test_a_mode_is_compared_on_the_command_line(
    thermocline: Run, guessed: Callable[[float], Path], text: Path
) -> None:
    path = guessed(0.3)
    found = answer(thermocline, path, "--text", text, "--sparsity", "predict", "--against", "exact")
    expected = evaluate.divergence(reader_of(path, "predict"), reader_of(path, "exact"), tiny_texts(path))
    assert found["against"]["kld"]["value"] == expected.kld.value
    assert 0.2 < found["predicted_fraction"] < 0.6
    own = answer(thermocline, path, "--text", text, "--sparsity", "predict", "--against", path)
    assert own["against"]["kld"] == found["against"]["kld"]


# ---- the command


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def tiny_q8(tiny_hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("q8") / "pack"
    pack(tiny_hf, path, "q8_0")
    return path


@pytest.fixture(scope="module")
def silu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without an activation that skips anything."""
    path = tmp_path_factory.mktemp("silu")
    pack(tiny.hf_directory(path / "hf", hidden_act="silu"), path / "pack", "f32")
    return path / "pack"


def answer(thermocline: Run, *argv: str | Path) -> dict[str, Any]:
    ran = thermocline("eval", *argv, "-t", "1", "--ctx", "32", "--json")
    assert (ran.code, ran.err) == (0, "")
    found: dict[str, Any] = json.loads(ran.out)
    return found


def test_json_has_the_python_functions_figures(thermocline: Run, tiny_q8: Path, text: Path) -> None:
    found = answer(thermocline, tiny_q8, "--text", text, "--limit", "3")
    opened = Pack.open(tiny_q8)
    loaded = weights.load(opened, threads=1)
    reader = Reader(bind(opened.spec, loaded.weights, loaded.ops), loaded.ops, context=32)
    expected = evaluate.perplexity(
        reader, evaluate.windows(Tokenizer(tiny_q8, opened.spec), TEXT, 32, limit=3)
    )
    assert found["perplexity"] == {"value": expected.perplexity.value, "error": expected.perplexity.error}
    assert (found["windows"], found["tokens"], found["format"]) == (3, 45, "q8_0")
    assert 0 < found["active_fraction"] < 1 and "against" not in found


def test_against_another_pack_and_against_off(
    thermocline: Run, tiny_pack: Path, tiny_q8: Path, text: Path
) -> None:
    found = answer(thermocline, tiny_q8, "--text", text, "--against", tiny_pack)
    assert 1e-6 < found["against"]["kld"]["value"] < 0.01
    assert found["against"]["kld"]["value"] <= found["against"]["kld_p99"] <= found["against"]["kld_max"]
    assert found["against"]["perplexity"] == answer(thermocline, tiny_pack, "--text", text)["perplexity"]
    lossless = answer(thermocline, tiny_q8, "--text", text, "--against", "off")
    assert lossless["against"]["kld"] == {"value": 0, "error": 0}


def test_the_table_says_what_the_json_does(
    thermocline: Run, tiny_pack: Path, tiny_q8: Path, text: Path
) -> None:
    argv: list[str | Path] = [tiny_q8, "--text", text, "--against", tiny_pack]
    found, ran = answer(thermocline, *argv), thermocline("eval", *argv, "--ctx", "32")
    lines = dict(line.split("  ", 1) for line in ran.out.splitlines() if line)
    assert lines["perplexity"].split()[0] == f"{found['perplexity']['value']:.4f}"
    assert lines["mean KLD"].split()[0] == f"{found['against']['kld']['value']:.6f}"
    assert lines["change"].split()[0] == f"{100 * (found['against']['ratio']['value'] - 1):.3f}"
    assert "15 windows of 32" in lines["text"] and "225 tokens" in lines["text"]


def test_a_model_that_skips_nothing_says_nothing_of_active_neurons(
    thermocline: Run, silu: Path, text: Path
) -> None:
    assert answer(thermocline, silu, "--text", text)["active_fraction"] is None
    assert "active" not in thermocline("eval", silu, "--text", text, "--ctx", "32").out


def test_ctrl_c_prints_the_windows_that_are_done(
    thermocline: Run, tiny_pack: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = answer(thermocline, tiny_pack, "--text", text, "--limit", "2")
    read, calls = Reader.read, 0

    def interrupted(*args: Any, **more: Any) -> F32:
        nonlocal calls
        calls += 1
        if calls == limit:
            raise KeyboardInterrupt
        return read(*args, **more)

    monkeypatch.setattr(Reader, "read", interrupted)
    limit = 3  # a call for each window
    ran = thermocline("eval", tiny_pack, "--text", text, "--ctx", "32", "--json")
    assert ran.code == 130
    assert json.loads(ran.out)["perplexity"] == whole["perplexity"]
    limit, calls = 1, 0
    ran = thermocline("eval", tiny_pack, "--text", text, "--ctx", "32")
    assert (ran.code, ran.out, ran.err) == (130, "", "thermocline: interrupted\n")


def refused(thermocline: Run, code: int, words: str, *argv: str | Path) -> None:
    ran = thermocline("eval", *argv)
    assert (ran.code, ran.out) == (code, "")
    assert words in ran.err and ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"a\0b" * 99, "byte 1 is 0x00"),
        (b"abc\xff" * 99, "not UTF-8 text: byte 3 is 0xff"),
    ],
)
def test_a_text_that_is_none_is_refused(
    thermocline: Run, tiny_pack: Path, tmp_path: Path, data: bytes, words: str
) -> None:
    (tmp_path / "bad").write_bytes(data)
    refused(thermocline, 3, words, tiny_pack, "--text", tmp_path / "bad")


def test_what_cannot_be_measured_is_refused_before_weights_are_read(
    thermocline: Run, tiny_pack: Path, silu: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "load", lambda *args, **more: pytest.fail("weights were read"))
    more: list[str | Path] = ["--text", text, "--ctx", "32"]
    refused(thermocline, 4, "No such file", tiny_pack, "--text", tmp_path / "nothing.txt")
    refused(thermocline, 2, "missing FILE", tiny_pack)
    refused(thermocline, 2, "has 480 tokens, a window needs 512", tiny_pack, "--text", text)
    (tmp_path / "line").write_text("x" * 31 + "\n")  # the last line's end is no part of a text
    refused(thermocline, 2, "has 31 tokens", tiny_pack, "--text", tmp_path / "line", "--ctx", "32")
    refused(thermocline, 2, "reads 4 to 32768", tiny_pack, "--text", text, "--ctx", "32769")
    refused(thermocline, 2, "no predictors", tiny_pack, *more, "--sparsity", "predict")
    refused(thermocline, 2, "no predictors", tiny_pack, *more, "--against", "predict")
    refused(thermocline, 2, "both exact: nothing to compare", tiny_pack, *more, "--against", "exact")
    refused(thermocline, 2, "never zero", silu, *more, "--against", "exact")
    refused(thermocline, 2, "another tokenizer", tiny_pack, *more, "--against", BUNDLED)
    monkeypatch.setattr(hardware, "available_bytes", lambda: 1 << 20)
    monkeypatch.setattr(hardware, "own_bytes", lambda: 0)
    refused(thermocline, 5, "1.0 MiB is free", tiny_pack, *more)


def test_a_pack_with_another_tokenizer_of_the_same_size_is_refused(
    thermocline: Run, tiny_pack: Path, tiny_hf: Path, text: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_hf, tmp_path / "hf")
    path = tmp_path / "hf" / "tokenizer.json"
    made = json.loads(path.read_text())
    vocab = made["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(made))
    pack(tmp_path / "hf", tmp_path / "pack", "f32")
    argv: list[str | Path] = [tiny_pack, "--text", text, "--ctx", "32", "--against", tmp_path / "pack"]
    refused(thermocline, 2, "another tokenizer", *argv)


def test_a_pack_without_a_tokenizer_is_refused(thermocline: Run, text: Path, tmp_path: Path) -> None:
    (made := tmp_path / "config.json").write_text(json.dumps(tiny.config(hidden_act="silu")))
    assert thermocline("synth", made, "-o", tmp_path / "noise", "-q").code == 0
    refused(thermocline, 2, "has no tokenizer", tmp_path / "noise", "--text", text, "--ctx", "32")
