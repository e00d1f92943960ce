"""Models with layers that have no FFN: neurons are counted, traced and predicted in the others."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_twins import Model, in_numpy

from thermocline.convert import synthetic
from thermocline.model.activations import route
from thermocline.offline.activity import ProfileWorker, down_norms
from thermocline.offline.need_trace import read_trace
from thermocline.offline.training import fits
from thermocline.ops import reference
from thermocline.ops.interface import FFNStats
from thermocline.pack.activity_profile import open_profile, open_samples, summary
from thermocline.pack.pack import Pack, read_tensor
from thermocline.pack.predictor import open_predictors
from thermocline.session import weights

Run = Callable[..., Any]
FED = (1, 3, 6, 8, 10)
SMALL = {
    "hidden_size": 256, "n_routed_experts": 8, "moe_intermediate_size": 64, "vocab_size": 256,
    "moe_shared_expert_intermediate_size": 128, "mamba_num_heads": 4, "n_groups": 2, "ssm_state_size": 32,
    "num_attention_heads": 4, "head_dim": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small Nemotron-3-Nano."""
    directory = tmp_path_factory.mktemp("half")
    shape = synthetic.shapes()["nemotron-3-nano-30b"] | SMALL
    (directory / "config.json").write_text(json.dumps(shape))
    synthetic.SyntheticModel.of(str(directory / "config.json"), 0, 0.2, 0.26, 64, layers=12).write(
        directory / "pack", "f32"
    )
    return directory / "pack"


def model_of(pack: Pack) -> Model:
    got = weights.load(pack, threads=2)
    return Model(pack.spec, got.weights, got.ops)


@pytest.fixture
def profiled(made: Path, tmp_path: Path, thermocline: Run) -> Pack:
    path = tmp_path / "profiled"
    more = "--tokens", 400, "--ctx", 64, "--samples", 200, "-t", 2, "-q"
    ran = thermocline("profile", made, "-o", path, *more)
    assert ran.code == 0, ran.err
    return Pack.open(path)


def test_counts_are_those_of_the_reference(made: Path) -> None:
    pack = Pack.open(made)
    assert pack.spec.ffn_layers == FED
    got = model_of(pack)
    ids = np.random.default_rng(0).integers(3, 250, 33).astype(np.int32)
    norms = down_norms(pack)
    worker = ProfileWorker.on_cpu(pack.spec, got.weights, ids[:1], 64, 1, norms)
    counted = worker.count(ids[1:], np.arange(32), threading.Event())
    seen = []

    class Ops:
        def __getattr__(self, name: str) -> Any:
            return getattr(reference, name)

        def ffn_add(self, x: Any, h: Any, bound: Any, sparsity: str, stats: FFNStats, shares: Any) -> None:
            record = np.empty((len(x), pack.spec.n_experts * pack.spec.ffn_dim), np.float32)
            reference.ffn_add(x, h, bound, sparsity, stats, record, shares=shares)
            seen.append(record[1:] != 0)

    replace(in_numpy(got), ops=Ops()).logits(ids.tolist(), 33)
    assert len(seen) == len(counted.counts) == len(FED)
    for active, counts in zip(seen, counted.counts, strict=True):
        assert abs(active.sum(axis=0) - counts[0]).sum() <= 1e-3 * counts[0].sum()  # close to zero


def test_a_profile_has_neurons_where_there_are_some(profiled: Pack) -> None:
    found, n = open_profile(profiled), profiled.spec.n_experts * profiled.spec.ffn_dim
    assert found is not None
    assert [c[0].size for c in found.counts] == [n if i in FED else 0 for i in range(12)]
    about = summary(found)
    assert about["neurons"] == n * len(FED) and {about["hottest_layer"], about["coldest_layer"]} <= set(FED)
    assert [i for i, x in enumerate(about["active_per_layer"]) if x is not None] == list(FED)
    assert about["active_fraction"] == pytest.approx(0.2 * 6 / 8, rel=0.4)
    for i in FED:
        ordered = found.counts[i][0]
        assert (np.diff(ordered, axis=1) <= 0).all(), "hottest first, in each expert"
    with open_samples(profiled) or pytest.fail("none") as samples:
        assert all(len(samples.layer(i)[0]) == 200 for i in FED)


def test_zeros_are_skipped_as_before(made: Path, profiled: Pack) -> None:
    """The order of neurons changes nothing but rounding, and exact is off bit for bit."""
    ids, rows = np.arange(3, 35).tolist(), []
    for pack in (Pack.open(made), profiled):
        got = model_of(pack)
        rows.append(got.logits(ids, 32))
        assert np.array_equal(rows[-1], got.logits(ids, 32, sparsity="off"))
    assert np.abs(rows[0] - rows[1]).max() < 1e-3 * rows[0].std()


def test_a_trace_is_recorded_and_replayed(profiled: Pack, tmp_path: Path, thermocline: Run) -> None:
    path, model = tmp_path / "a.trace", ("-m", profiled.path)
    ran = thermocline("bench", *model, "--trace", path, "-n", 12, "-d", 4, "-t", 1, "-q")
    assert ran.code == 0, ran.err
    found = read_trace(path, profiled)
    assert [found.layer(i).shape[1] > 0 for i in range(12)] == [i in FED for i in range(12)]
    assert all(0 < found.layer(i).mean() < 1 for i in FED)
    ran = thermocline(
        "bench", *model, "--replay", path, "-o", "json", "-q", "--hardware", "rtx4090-i9-13900k"
    )
    assert ran.code == 0, ran.err
    rows = json.loads(ran.out)
    assert all(0 < r["hit_rate"] <= 1 for r in rows) and rows[0]["disk_bytes_per_token"] > 0


def test_predictors_are_trained_where_there_are_neurons(profiled: Pack, thermocline: Run) -> None:
    """A token's experts are those that the router chose, with its bias."""
    more = "-t", 2, "--minutes", 0.1, "-c", 32, "--limit", 1, "--max-kld", 9, "--max-ppl", 1e6
    ran = thermocline("train", profiled.path, "--kind", "sign", *more, "--json", "-q")
    assert ran.code == 0, ran.err
    assert [x["layer"] for x in json.loads(ran.out)["layers"]] == list(FED)
    with open_predictors(profiled) or pytest.fail("none") as found:
        assert {i for i in range(12) if found.stored(i) is not None} <= set(FED)
    done = thermocline("bench", "-m", profiled.path, "--sparsity", "predict", "-n", 4, "-p", 0, "-r", 1, "-q")
    assert done.code == 0, done.err
    with open_samples(profiled) or pytest.fail("none") as samples:
        rows = samples.layer(6)
    router = read_tensor(profiled, "layers.6.router.weight").view("<f4")
    bias = read_tensor(profiled, "layers.6.router.selection_bias").view("<f4").reshape(-1)
    s, logits = profiled.spec, rows[0].astype(np.float32) @ router.T
    wanted = route(logits, s.n_experts_active, s.router, bias) != 0
    got = fits.layer_samples(profiled, 6, rows)
    assert got.chosen is not None and (got.chosen == wanted).mean() > 0.98
