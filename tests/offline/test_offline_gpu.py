"""Commands that prepare and measure, with a GPU: what the CPU says, but for the order of sums.

The GPU is a stand-in.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kept_twins
import numpy as np
import pytest
import test_synth
import tiny
from test_two_devices import scores
from test_within_ram import TEXT, packs, wide

from thermocline.convert import importer
from thermocline.engine.decoder import bind
from thermocline.errors import Unsupported, UsageError
from thermocline.model.spec import ModelSpec
from thermocline.offline import evaluate
from thermocline.offline.corpus import random_corpus
from thermocline.offline.routing.route_profiler import RouteJob, profile_routes
from thermocline.offline.training import fit_mlp
from thermocline.offline.training.trial import Judge, TrialJob
from thermocline.ops.gpu import GpuOps
from thermocline.ops.interface import CPU
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import LayerPredictor, Predictors, write_stored
from thermocline.pack.route_profile import RouteProfile, open_routes
from thermocline.plan.memory import GIB
from thermocline.plan.placement import NeuronRange, Placement
from thermocline.session import gpu as gpu_session
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session

__all__ = ["packs"]  # fixtures
pytestmark = pytest.mark.oracle
Run = Callable[..., Any]
GPU = ("--gpu", "stand-in")
ORDER = 2e-5  # relative, of figures whose sums are added up in another order, in f32


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (path := tmp_path / "text.txt").write_text(TEXT)
    return path


def figures(thermocline: Run, *argv: str | Path, gpu: str | None = "1.0") -> dict[str, Any]:
    """`gpu`: GiB of it; None: there is none."""
    ran = thermocline(*argv, *(() if gpu is None else (*GPU, "--vram", gpu)), "--json")
    assert ran.code == 0, ran.err
    assert ("stand-in: " in ran.err) == (gpu is not None), ran.err
    found: dict[str, Any] = json.loads(ran.out)
    return {k: v for k, v in found.items() if k not in ("seconds", "tokens_per_s")}


def near(found: Any, wanted: Any) -> bool:
    """Whether all figures are the same, but for rounding."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(near(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, float):
        return bool(np.isclose(found, wanted, rtol=ORDER, atol=1e-9))
    return bool(found == wanted)


def divided(path: Path, context: int = 64) -> str:
    """Return GiB of VRAM for about half of a model's FFNs."""
    options = EngineOptions(gpu="stand-in", vram=1.0, context=context, max_batch=8, kv_tokens=context)
    with Session.open(Pack.open(path), options) as session:
        plan = session.plan
        assert plan is not None
        return f"{(plan.used('gpu') - plan.bytes['gpu']['neurons'] // 2) / GIB:.6f}"


def mistral(path: Path) -> Path:
    return tiny.hf_directory(
        path, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=16
    )


# ---- eval


@pytest.mark.parametrize("kind", ["neurons", "experts", "rows", "windows"])
def test_eval_gives_the_cpus_figures(
    kind: str, packs: dict[str, Path], text: Path, tmp_path: Path, thermocline: Run
) -> None:
    """Windows pass blocks of a cache that has no room for whole texts of two readers."""
    path = packs.get(kind)
    if path is None:
        path, hf = tmp_path / "pack", mistral(tmp_path / "hf")
        packed = thermocline("pack", hf, "-o", path, "--format", "f32", "--activation", "relu")
        assert packed.code == 0, packed.err
    ctx = "340" if kind == "windows" else "64"
    asked = ("eval", path, "--text", text, "--ctx", ctx, "-t", "2")
    more = ("--against", "off") if kind in ("neurons", "windows") else ()
    wanted = figures(thermocline, *asked, *more, gpu=None)
    assert near(figures(thermocline, *asked, *more), wanted)


def test_eval_of_a_divided_model_and_one_with_weights_in_blocks(
    packs: dict[str, Path], text: Path, thermocline: Run
) -> None:
    """A prompt's weights meet f32 on a GPU, int8 on the CPU: the figures are near."""
    for name, vram in (("neurons", divided(packs["neurons"])), ("neurons-q8_0", "1.0")):
        asked = ("eval", packs[name], "--text", text, "--ctx", "64", "-t", "2")
        wanted, found = figures(thermocline, *asked, gpu=None), figures(thermocline, *asked, gpu=vram)
        rounding = ORDER if name == "neurons" else 5e-3
        assert np.isclose(found["perplexity"]["value"], wanted["perplexity"]["value"], rtol=rounding)


def test_eval_compares_predictions_on_a_gpu(tmp_path: Path, text: Path, thermocline: Run) -> None:
    """Token by token, replayed from one recording while the exact side's prompts come between."""
    made = test_synth.make(
        tmp_path, "bamboo-7b", "f32", active=0.15, rank=32, hidden_size=256, intermediate_size=512,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
        max_position_embeddings=64, sliding_window=64,
    )  # fmt: skip
    write_stored(made, scores(made.spec), {})
    texts = np.random.default_rng(2).integers(0, 500, (3, 32)).astype(np.int32)
    found = []
    for gpu in ("off", "stand-in"):
        positions = evaluate.positions_for(2, 32)
        options = EngineOptions("predict", context=32, max_batch=8, threads=2, gpu=gpu, kv_tokens=positions)
        with Session.open(made, options) as session:
            ops, spec = session.loaded.ops, made.spec
            assert isinstance(ops, GpuOps) == (gpu != "off")
            cache = evaluate.cache_for(spec, 32, readers=2, storage=session.storage)
            model = bind(spec, session.loaded.weights, ops)
            own, base = (
                evaluate.Reader(model, ops, context=32, sparsity=s, step=n, cache=cache)
                for s, n in (("predict", 1), ("exact", 8))
            )
            found.append(evaluate.divergence(own, base, texts))
            assert 0 < own.stats.predicted < own.stats.gates_dense
            if isinstance(ops, GpuOps):
                assert {key.tokens for key in ops.recorded} == {1, 7, 8, 16}
    cpu, gpu_s = found
    assert np.isclose(gpu_s.base.nll.value, cpu.base.nll.value, rtol=1e-5)
    assert cpu.kld.value > 0 and np.isclose(gpu_s.kld.value, cpu.kld.value, rtol=0.1)  # predictors' int8


@pytest.mark.parametrize("twin", ["qwen3_5_moe", "nemotron_h"])
def test_recurrent_layers_have_their_states_on_the_gpu(twin: str, tmp_path: Path) -> None:
    importer.pack(kept_twins.write(twin, tmp_path / "hf"), tmp_path / "pack", "f32")
    made, context = Pack.open(tmp_path / "pack"), 24
    texts = np.random.default_rng(2).integers(0, made.spec.vocab_size, (2, context)).astype(np.int32)
    found = []
    for gpu in ("off", "stand-in"):
        options = EngineOptions(context=context, max_batch=8, threads=2, gpu=gpu, kv_tokens=context)
        with Session.open(made, options) as session:
            model = bind(made.spec, session.loaded.weights, session.loaded.ops)
            cache = evaluate.cache_for(made.spec, context, storage=session.storage)
            reader = evaluate.Reader(model, session.loaded.ops, context=context, step=8, cache=cache)
            found.append(evaluate.perplexity(reader, texts).nll.value)
    assert np.isclose(found[1], found[0], rtol=1e-5)


def test_two_models_and_cache_types_are_refused_with_a_gpu(
    packs: dict[str, Path], text: Path, thermocline: Run
) -> None:
    asked = ("eval", packs["neurons"], "--text", text, "--ctx", "64", *GPU)
    ran = thermocline(*asked, "--against", packs["rows"])
    assert (ran.code, ran.err.count("\n")) == (2, 1) and "two models do not share a GPU" in ran.err
    ran = thermocline(*asked, "-ctk", "q8_0")
    assert (ran.code, ran.err.count("\n")) == (2, 1) and "a GPU keeps them as f16" in ran.err


def test_memory_of_scores_is_counted_beside_a_gpu(
    packs: dict[str, Path], text: Path, thermocline: Run
) -> None:
    """RAM that has no room for them is refused."""
    asked = ("eval", packs["rows"], "--text", text, "--ctx", "64", "-t", "2", *GPU, "--vram", "1.0")
    ran = thermocline(*asked, "--ram", "0.001")
    assert ran.code == 5 and ran.err.count("\n") == 1, ran.err
    beside = evaluate.scoring_bytes(Pack.open(packs["rows"]).spec)
    with Session.open(Pack.open(packs["rows"]), EngineOptions(gpu="stand-in", vram=1.0)) as session:
        least = session.memory_bytes
    with Session.open(
        Pack.open(packs["rows"]), EngineOptions(gpu="stand-in", vram=1.0), beside=beside
    ) as session:
        assert session.memory_bytes == least + beside


# ---- profile


def shares_alike(found: RouteProfile, wanted: RouteProfile) -> float:
    """The share of traced choices that are the same."""
    each = [(found.traced[i], wanted.traced[i]) for i in wanted.traced]
    return float(np.mean([(np.sort(a, axis=1) == np.sort(b, axis=1)).mean() for a, b in each]))


@pytest.mark.parametrize("place", ["whole", "divided", "windows", "windows and none"])
def test_a_mixture_is_profiled_on_a_gpu(
    place: str, packs: dict[str, Path], tmp_path: Path, thermocline: Run
) -> None:
    """Experts on the card and in RAM: the GPU asks the routers. Passages pass windows."""
    path = tmp_path / "pack"
    (corpus := tmp_path / "corpus.txt").write_text(2 * TEXT)
    over: tuple[str | Path, ...] = ("--corpus", corpus)
    windowed = place.startswith("windows")
    if windowed:
        if alike := place == "windows":
            made = wide("experts", tmp_path / "hf")
        else:
            made, over = kept_twins.write("gpt_oss", tmp_path / "hf"), ()  # random tokens
        config = json.loads((hf := made / "config.json").read_text())
        window = 16 if alike else config["sliding_window"]
        hf.write_text(json.dumps(config | {"sliding_window": window, "max_position_embeddings": 1024}))
        importer.pack(hf.parent, path, "f32")
    else:
        shutil.copytree(packs["experts"], path)
    model = Pack.open(path)
    ctx = 560 if windowed else 64
    assert (model.spec.sliding_window is not None) == windowed
    asked = ("profile", path, "--tokens", "600", "--ctx", str(ctx), "-t", "2", *over)
    assert thermocline(*asked).code == 0
    wanted = open_routes(model)
    vram = divided(path, ctx) if place == "divided" else "1.0"
    ran = thermocline(*asked, *GPU, "--vram", vram)
    assert ran.code == 0 and "stand-in: " in ran.err, ran.err
    found = open_routes(model)
    assert wanted is not None and found is not None and found.tokens == wanted.tokens == 600
    assert shares_alike(found, wanted) > 0.999  # but for two experts that are nearly as good
    for i, counts in wanted.counts.items():
        assert np.abs(found.counts[i] - counts).sum() <= 0.002 * counts.sum()


@pytest.mark.parametrize("place", ["whole", "divided"])
def test_a_mixtures_choices_are_traced_on_a_gpu(place: str, tmp_path: Path, thermocline: Run) -> None:
    """Of the text that is fed, also where the card could choose tokens itself: the head is the embedding."""
    hf = wide("experts", tmp_path / "hf")
    config = json.loads((hf / "config.json").read_text()) | {"tie_word_embeddings": True}
    (hf / "config.json").write_text(json.dumps(config))
    importer.pack(hf, path := tmp_path / "pack", "f32")
    assert Pack.open(path).spec.tied_head
    found = []
    for gpu in ("off", "stand-in"):
        vram = divided(path) if place == "divided" else "1.0"
        more = () if gpu == "off" else (*GPU, "--vram", vram)
        for command in ("trace", "routes"):
            ran = thermocline(command, path, "-n", "48", "-d", "8", "-t", "2", "--json", *more)
            assert ran.code == 0 and ("stand-in: " in ran.err) == bool(more), ran.err
            found.append(json.loads(ran.out))
    trace, routes, trace_there, routes_there = found
    assert trace["tokens"] == 48 and trace["new_share"] > 0
    assert near(trace_there, trace) and near(routes_there, routes)


def test_a_trace_that_is_played_needs_no_gpu(tmp_path: Path, thermocline: Run) -> None:
    rows = [f"0,1,{step},0,0,{step % 3}" for step in range(4)]
    head = "# route_trace v1 n_expert=4\nturn,phase,step,layer,slot,expert\n"
    (path := tmp_path / "a.csv").write_text(head + "\n".join(rows) + "\n")
    for asked in (("trace", "--routes", path), ("routes", path)):
        ran = thermocline(*asked, *GPU)
        assert (ran.code, ran.err.count("\n")) == (2, 1) and "no model computes" in ran.err


@pytest.mark.parametrize("place", ["whole", "divided"])
def test_neurons_are_profiled_on_a_gpu(
    place: str, packs: dict[str, Path], tmp_path: Path, thermocline: Run
) -> None:
    """The same text, counted on either side; an interrupted profile of the CPU's does not go on here."""
    path = packs["neurons"]
    (corpus := tmp_path / "corpus.txt").write_text(2 * TEXT)
    asked = (
        "profile", path, "--corpus", corpus, "--tokens", "500", "--ctx", "64", "--samples", "40", "-t", "2",
    )  # fmt: skip
    wanted = figures(thermocline, *asked, "-o", tmp_path / "cpu", gpu=None)
    vram = divided(path) if place == "divided" else "1.0"
    found = figures(thermocline, *asked, "-o", tmp_path / "gpu", gpu=vram)
    assert found["tokens"] == wanted["tokens"] == 500 and found["samples"] == 40
    for key in ("active_fraction", "hot_share", "active_per_layer", "never_active"):
        assert np.allclose(found[key], wanted[key], rtol=1e-4), key


def test_two_workers_do_not_share_a_gpu(packs: dict[str, Path], thermocline: Run) -> None:
    ran = thermocline("profile", packs["neurons"], *GPU, "--workers", "2", "--corpus", Path(__file__))
    assert ran.code == 2 and "one passage at a time" in ran.err


# ---- train


@pytest.mark.parametrize("place", ["whole", "divided"])
def test_predictors_are_judged_on_a_gpu(place: str, tmp_path: Path) -> None:
    """Two after each other, on texts of two sizes: each is that of recordings of its own."""
    made = test_synth.make(
        tmp_path, "bamboo-7b", "f32", active=0.15, rank=32, hidden_size=256, intermediate_size=512,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
        max_position_embeddings=64, sliding_window=64,
    )  # fmt: skip
    rng = np.random.default_rng(2)
    texts = tuple((str(n), rng.integers(0, 500, (2, n)).astype(np.int32)) for n in (32, 20))
    job = TrialJob(made, 2, texts, False, 32, 2, 0)
    all_of_it, verdicts = scores(made.spec), []
    none = Predictors.of(made.spec, [naming_few(made.spec, 1e9)] * made.spec.n_layers)
    vram = float(divided(made.path, 32)) if place == "divided" else 1.0
    for gpu in ("off", "stand-in"):
        job = replace(job, gpu=gpu, vram=vram if gpu != "off" else None)
        nbytes = sum(p.nbytes for i in range(all_of_it.count) if (p := all_of_it.stored(i)) is not None)
        judge = Judge.of(job, nbytes, math.inf, lambda *_: None)
        with judge.session as session:
            assert (session.gpus is not None) == (gpu != "off")
            verdicts.append([judge(all_of_it), judge(none)])
            if session.gpus is not None:
                assert session.load().kv.used == 0  # readers gave back what they took
    for cpu, there in zip(*verdicts, strict=True):
        assert cpu.divergence.kld.value > 1e-5
        assert np.isclose(there.divergence.kld.value, cpu.divergence.kld.value, rtol=0.1)  # predictors' int8
        assert np.isclose(there.divergence.base.nll.value, cpu.divergence.base.nll.value, rtol=1e-5)
        assert np.isclose(there.active, cpu.active, rtol=1e-3)
        assert np.isclose(there.predicted, cpu.predicted, rtol=0.02, atol=1e-4)
        assert np.isclose(there.bytes, cpu.bytes, rtol=0.02)
    assert verdicts[1][0].predicted > 2 * verdicts[1][1].predicted


def naming_few(spec: ModelSpec, threshold: float) -> LayerPredictor:
    """One that names its 40 hot neurons alone."""
    first, second = np.zeros((32, spec.dim), np.float32), np.zeros((spec.ffn_dim, 32), np.float32)
    return LayerPredictor("svd", first, second, None, np.full(spec.ffn_dim, threshold, np.float32), 40)


def test_training_goes_through_a_gpu(
    packs: dict[str, Path], tmp_path: Path, text: Path, thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text that passes, the fits and the trials: figures near the CPU's."""
    made = ("profile", packs["neurons"], "-o", tmp_path / "pack", "--corpus", text, "--samples", "0", "-q")
    assert thermocline(*made).code == 0
    devices, fit = list[str](), fit_mlp.fit

    def seen(*args: Any, **more: Any) -> Any:
        devices.append(more["device"])
        return fit(*args, **more)

    monkeypatch.setattr(fit_mlp, "fit", seen)
    monkeypatch.setattr(fit_mlp, "STEPS", 20)
    (other := tmp_path / "other.txt").write_text(TEXT)
    asked = (
        "train", tmp_path / "pack", "--kind", "mlp", "--corpus", text, "--text", other, "--ctx", "64",
        "--limit", "2", "--max-kld", "1000", "--max-ppl", "1e6", "-t", "2",
    )  # fmt: skip
    changing = ("fit_s", "predictor_us_at_memory_speed")
    wanted, found = (figures(thermocline, *asked, gpu=gpu) for gpu in (None, "1.0"))
    assert set(devices) == {"cpu"}  # the stand-in's
    for key in ("kld", "perplexity", "perplexity_exact", "active_fraction", "ffn_bytes_per_token"):
        a, b = found[key], wanted[key]
        value = (a["value"], b["value"]) if isinstance(a, dict) else (a, b)
        assert np.isclose(*value, rtol=0.1), (key, value)
    assert found["written"] and all(key in found for key in changing)


def test_a_card_trains_and_one_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for why, auto in ((None, "cuda:0"), ("no driver", "cpu")):
        monkeypatch.setattr(gpu_session, "unusable", lambda board, index, why=why: why)
        assert gpu_session.trainer("auto") == auto
        assert gpu_session.trainer("off") == gpu_session.trainer("stand-in") == "cpu"
        if why is None:
            assert gpu_session.trainer("1,0") == "cuda:1"
        else:
            with pytest.raises(Unsupported, match="--gpu 1: no driver"):
                gpu_session.trainer("1")
    with pytest.raises(UsageError, match="--gpu fast: it is off"):
        gpu_session.trainer("fast")


def test_what_a_gpu_cannot_show_is_refused(
    packs: dict[str, Path], tmp_path: Path, thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers that the CPU asks."""
    corpus = random_corpus(model := Pack.open(packs["experts"]), 64, 64, 1)

    def moved(session: Session) -> Placement:
        found = session.decision.placement
        first, *others = found.layers
        alone = NeuronRange(CPU, first.ranges[0].neurons)
        return replace(found, layers=(replace(first, attention=CPU, ranges=(alone,)), *others))

    monkeypatch.setattr(Session, "placement", property(moved))
    with pytest.raises(UsageError, match="the CPU computes 1 of 2 layers with experts"):
        profile_routes(
            RouteJob(model, corpus, EngineOptions(context=64, max_batch=1, gpu="stand-in", vram=1.0)),
            lambda *_: None,
        )
