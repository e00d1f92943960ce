"""Planted activity has the statistics of the trained model it was fitted to, and they are counted rightly."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import thermocline
from thermocline.cli.commands import synth
from thermocline.convert import synthetic
from thermocline.convert.random_weights.source import RandomWeights
from thermocline.convert.synthetic_activity import VISITS, AttentionColumns
from thermocline.convert.synthetic_weights import ACTIVITIES, HOT_SHARE, normal_activities
from thermocline.errors import UsageError
from thermocline.model import quant
from thermocline.ops.interface import F32
from thermocline.pack.pack import Pack

Run = Callable[..., Any]
ENGINE = str(Path(__file__).parents[2] / "bench" / "engine")
BUNDLED = Path(thermocline.__file__).parent / "bundled"
# The bundled model, trained: bench/engine/activity_statistics.py over 6 passages each of TinyStories,
# Sherlock Holmes and War and Peace.
TRAINED: dict[str, Any] = {
    "active": 0.050, "skew": 0.614, "varies": 0.699,
    "hits": {"10%": 0.267, "30%": 0.561, "60%": 0.829},
    "overlap": {"1": 0.150, "8": 0.101, "32": 0.095},
    "lasting": 0.544, "early": 0.732, "ahead": 0.677, "named": 5.25,
}  # fmt: skip
TEXTS = (
    "tinystories/tinystories_valid_sample.txt",
    "books/sherlock_holmes_adventures.txt",
    "books/war_and_peace.txt",
)
POINTS, RATIO = 0.03, 0.10  # the last of figures that are no shares
RATIOS = ("varies", "named")
PREDICTOR = 64 + 32 + 3  # columns of `--rank`, of attention, of moods and offsets
SMALL = {
    "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 4096,
}  # fmt: skip


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, ENGINE)
    yield importlib.import_module("activity_statistics")
    sys.path.remove(ENGINE)


def model_of(
    directory: Path, activity: str = "trained", shape: str = "llama-2-7b", **changes: Any
) -> synthetic.SyntheticModel:
    config = directory / "config.json"
    config.write_text(json.dumps(synthetic.shapes()[shape] | SMALL | changes))
    active, skew = synthetic.sparsity_of("", activity, None if activity == "trained" else 0.1, None)
    return synthetic.SyntheticModel.of(str(config), 0, active, skew, 64).planted(activity=activity)


def planted(directory: Path, activity: str = "trained", **changes: Any) -> Pack:
    model_of(directory, activity, **changes).write(directory / "pack", "q8_0")
    return Pack.open(directory / "pack")


def said(script: ModuleType, pack: Pack, passages: int) -> dict[str, Any]:
    model = script.Watched(pack, 1)
    found = script.measure(model, *script.of_random_tokens(model, passages), PREDICTOR)
    return asdict(found)


def apart(told: dict[str, Any], wanted: dict[str, Any] = TRAINED) -> dict[str, float]:
    """Return each figure's distance from the trained model's, as a share of what is allowed."""

    def flat(figures: dict[str, Any]) -> dict[str, float]:
        parts = {k: v if isinstance(v, dict) else {"": v} for k, v in figures.items()}
        return {f"{k} {held}".strip(): v for k, part in parts.items() for held, v in part.items()}

    found, limits = flat(told), {k: RATIO * TRAINED[k] for k in RATIOS}
    return {k: (found[k] - v) / limits.get(k, POINTS) for k, v in flat(wanted).items()}


def test_neurons_planted_as_trained_are_within_3_points_of_the_trained_model(
    script: ModuleType, tmp_path: Path
) -> None:
    """Hotness, hits, overlap with tokens before, drift, early reads; of random tokens."""
    found = apart(said(script, planted(tmp_path), 1))
    del found["named"]  # a model so narrow has few columns of noise, which a predictor learns
    assert max(map(abs, found.values())) <= 1, found


def test_a_predictor_names_as_many_neurons_for_an_active_one(script: ModuleType, tmp_path: Path) -> None:
    pack = planted(tmp_path, hidden_size=1024, intermediate_size=2048, num_hidden_layers=1)
    model = script.Watched(pack, 1)
    measured, fitted, _ = script.of_random_tokens(model, 4)
    inputs = np.concatenate([model.read(ids)[0].read for ids in fitted])
    found = script.named(model, 0, inputs, [model.read(ids)[0] for ids in measured[:2]], PREDICTOR)
    assert found == pytest.approx(TRAINED["named"], rel=RATIO)


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "wide"), [(8, 1024), (12, 512), (32, 512)])
def test_so_it_is_in_larger_models_over_more_text(
    script: ModuleType, layers: int, wide: int, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        "hidden_size": wide,
        "intermediate_size": 2 * wide,
        "num_hidden_layers": layers,
    }
    found = apart(said(script, planted(tmp_path, **changes), 6))
    if wide == 512:
        del found["named"]
    if layers == 32:  # each FFN adds less: .71 is known a layer ahead, and .8 of published models as deep
        assert 0 < found.pop("ahead") < 2
    assert max(map(abs, found.values())) <= 1, found


def test_neurons_planted_easy_are_far_from_it(script: ModuleType, tmp_path: Path) -> None:
    found = apart(said(script, planted(tmp_path, "easy"), 1))
    kind = {k: v for k, v in found.items() if k not in ("active", "skew", "varies")}
    assert min(map(abs, kind.values())) > 1, found
    assert found["hits 30%"] > 5 and found["early"] > 5 and found["named"] < -5


@pytest.mark.slow
@pytest.mark.shared
def test_the_table_is_what_the_trained_model_says(script: ModuleType, shared_data: Path) -> None:
    model = script.Watched(Pack.open(BUNDLED), 1)
    texts = [shared_data / "text" / name for name in TEXTS]
    found = asdict(script.measure(model, *script.of_texts(model, texts, 6), 64))
    assert max(map(abs, apart(found).values())) < 0.2, found  # instruction sets round differently


# ---- every kind of model


# of all neurons, the share that is active: a mixture's are those of 2 of 8 and of 4 of 8 experts
@pytest.mark.parametrize(
    ("shape", "active"),
    [
        ("bamboo-7b", 0.05),
        pytest.param("turbosparse-mixtral", 0.05 * 2 / 8, marks=pytest.mark.slow),
        pytest.param("smallthinker-4b", 0.05 * 4 / 8, marks=pytest.mark.slow),
    ],
)
def test_every_kind_of_relu_model_can_be_planted_as_trained(
    shape: str, active: float, tmp_path: Path, thermocline: Run
) -> None:
    known = synthetic.shapes()[shape]
    more = {"head_dim": 64, "moe_num_primary_experts": 8, "moe_ffn_hidden_size": 256}
    more |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = known | {k: v for k, v in (SMALL | more).items() if k in known}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = ("--layers", 4, "--activity", "trained", "-o", tmp_path / "pack", "-q")
    assert thermocline("synth", tmp_path / "config.json", *given).code == 0
    ran = thermocline("bench", "-m", tmp_path / "pack", "-p", 0, "-n", 32, "-d", 128, "-o", "json", "-q")
    (row,) = json.loads(ran.out)
    assert row["planted"] == "random weights; neurons planted as trained"
    assert row["active_fraction"] == pytest.approx(active, rel=0.35)


REFUSED: dict[str, tuple[str, tuple[str, ...], str]] = {
    "a gate bias": ("opt-6.7b", (), "without biases"),
    "one norm for both halves": ("falcon-40b", (), "RMS norm"),
    "recurrent layers": ("qwen3.6-27b", ("--active", "0.1"), "every layer"),
    "latents": ("deepseek-v2-lite", ("--active", "0.1"), "latents"),
    "planted routers": ("olmoe-1b-7b", ("--routing", "qwen3-30b"), "--routing"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_cannot_be_planted_as_trained_is_refused(case: str, tmp_path: Path, thermocline: Run) -> None:
    shape, more, why = REFUSED[case]
    ran = thermocline("synth", shape, "--activity", "trained", "-o", tmp_path / "x", *more)
    assert ran.code == 6 and why in ran.err and not (tmp_path / "x").exists(), ran.err


def test_every_activity_has_an_option() -> None:
    assert tuple(ACTIVITIES) == synth.ACTIVITIES


def test_figures_that_are_given_go_before_the_trained_models() -> None:
    assert synthetic.sparsity_of("llama-2-7b", "trained", None, None) == (0.05, 0.614)
    assert synthetic.sparsity_of("llama-2-7b", "trained", 0.11, 0.43) == (0.11, 0.43)
    assert synthetic.sparsity_of("smallthinker-4b", "trained", None, None) == (None, None)  # its makers' own
    assert synthetic.sparsity_of("llama-2-7b", "easy", None, None) == (None, None)


# ---- the columns


@pytest.mark.parametrize("format", ["f32", "q8_0", "q4_0"])
def test_attention_has_columns_that_nothing_else_writes_to(format: str, tmp_path: Path) -> None:
    """Two blocks of 12 layers, in turn; gates read the one just written to."""
    source = RandomWeights(model_of(tmp_path, num_hidden_layers=12).stats)

    def rows(name: str) -> F32:
        return quant.decode(format, source.encoded(name, format, 0, 512), 512)

    even, odd = rows("layers.4.attn_out.weight"), rows("layers.3.attn_out.weight")
    assert odd[-32:].any(axis=1).all() and not odd[:-32].any()
    assert even[-64:-32].any(axis=1).all() and not even[:-64].any() and not even[-32:].any()
    down, gate = rows("layers.3.down"), rows("layers.3.gate.weight")
    assert not down[:, -64:].any() and not down[:, :32].any() and down[:, 32:-64].any()
    assert gate[:, -32:].any() and not gate[:, -64:-32].any()


@pytest.mark.parametrize("layers", [1, 8, 12, 80])
def test_each_layer_adds_the_same_share_of_what_its_block_then_holds(layers: int) -> None:
    columns = AttentionColumns(layers, 0.3, 2.0)
    for layer in range(layers):
        before, after = columns.deviations(layer) ** 2, columns.deviations(layer + 1) ** 2
        block = columns.block(layer)
        assert after[block] - before[block] == pytest.approx(0.3 * after[block])
        assert columns.added(layer) ** 2 == pytest.approx(0.3 * after[block])
        assert np.delete(after, block) == pytest.approx(np.delete(before, block))
    assert columns.deviations(layers) == pytest.approx([2.0] * columns.blocks)
    assert columns.deviations(0).min() >= 2 * 0.7 ** (VISITS / 2) * 0.999


# ---- the figures


@pytest.mark.parametrize(("active", "skew"), [(0.05, 0.614), (0.11, 0.614), (0.1, 0.26), (0.3, 0.7)])
def test_activities_of_normal_offsets_are_as_asked(active: float, skew: float) -> None:
    p = normal_activities(4096, active, skew)
    assert p.mean() == pytest.approx(active, rel=0.01)
    assert p[: int(skew * 4096)].sum() / p.sum() == pytest.approx(HOT_SHARE, rel=0.01)
    assert (np.diff(p) <= 0).all()
    with pytest.raises(UsageError, match="larger --skew"):
        normal_activities(4096, 0.6, 0.1)


def test_figures_of_activity_that_one_can_count(script: ModuleType) -> None:
    """Every second token needs neurons 0 and 1, the others 2 and 3; then two tokens need 0 and 2."""
    active = np.zeros((12, 10), bool)
    active[0:10:2, :2] = active[1:10:2, 2:4] = True
    assert script.overlap([active[:10]], 1) == 0 and script.overlap([active[:10]], 2) == 1
    assert script.lasting([active[:8]], 0.4) == 1 and script.lasting([active[:8]], 0.2) == 0.5
    assert script.skew(np.array([4.0, 1, 1, 1, 1])) == 0.6
    active[10:, [0, 2]] = True
    frequency = active.mean(axis=0)
    assert script.hits([active], frequency, 0.4) == 1
    guess = np.where(active, 1.0, 0.0).astype(np.float32)
    guess[0, 0], guess[0, 9] = 0.0, 2.0
    assert script.right(guess, active) == pytest.approx(1 - 1 / active.sum())
