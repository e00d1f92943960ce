"""Layers of one half, and recurrent ones, on a device and the CPU beside it: the same answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import placements
import pytest
from recurrent_toy import weights_of
from test_gpu import gpu_ops, logits, placed, stand_in
from test_options import nmse
from toy import SPEC

from thermocline.convert.random_weights.source import RandomWeights
from thermocline.convert.synthetic_weights import WeightStatistics
from thermocline.model.spec import Latent, ModelSpec, check_spec
from thermocline.ops import reference
from thermocline.ops.device import StandIn
from thermocline.pack.pack import Pack
from thermocline.pack.writer import PackExtras, write_pack
from thermocline.plan.problem import without_gpu_ops
from thermocline.session import gpu_weights, weights

pytestmark = pytest.mark.oracle
__all__ = ["stand_in"]  # a fixture
HALVES = replace(SPEC, n_layers=4, mixers=("attention", "none", "attention", "none"), no_ffn=(0, 2))
SPECS: dict[str, ModelSpec] = {
    "halves": HALVES,
    "halves, dense": replace(HALVES, activation="silu"),
    "some whole": replace(HALVES, mixers=("none", "attention", "attention", "none"), no_ffn=(2,)),
    "in a window": replace(HALVES, sliding_window=9),
}
LATENT = replace(
    SPEC,
    activation="silu",
    n_layers=3,
    n_kv_heads=1,
    head_dim=40,
    rotary_dim=8,
    attention_scale=0.2,
    latent=Latent(kv_rank=32, nope=32, rope=8, value=16, q_rank=32),
)


def pack_of(path: Path, spec: ModelSpec, format: str) -> Pack:
    made = RandomWeights(WeightStatistics.of(spec, 0, None, False))
    write_pack(path / "pack", spec, format, made, PackExtras(origin=("random", "test", "0" * 32)))
    return Pack.open(path / "pack")


@pytest.mark.parametrize("name", SPECS)
def test_layers_of_one_half_are_the_same_wherever_they_are(name: str, stand_in: StandIn) -> None:
    """Chunks of 5 and 1 are recorded and replayed, of 40 not."""
    spec = SPECS[name]
    check_spec(spec, name)
    assert without_gpu_ops(spec) is None
    random = weights_of(spec)
    truth = logits(spec, random, reference)
    for seed, chunk in enumerate((40, 5, 1)):
        places = placements.some(spec, seed) if seed else placements.whole(spec)
        y = logits(spec, placed(random, places), gpu_ops(stand_in, spec), places, chunk)
        assert nmse(y, truth) < 1e-6, places


@pytest.mark.parametrize("format", ["f32", "q8_0"])
@pytest.mark.parametrize("name", ["halves", "halves, dense", "latent", "latent, without q_b"])
def test_a_pack_is_loaded_to_where_its_places_say(
    name: str, format: str, tmp_path: Path, stand_in: StandIn
) -> None:
    assert LATENT.latent is not None
    plain = replace(LATENT, latent=replace(LATENT.latent, q_rank=None))
    spec = (SPECS | {"latent": LATENT, "latent, without q_b": plain})[name]
    pack = pack_of(tmp_path, spec, format)
    whole = weights.load(pack, threads=2)
    truth = logits(spec, whole.weights, whole.ops)
    for seed, chunk in enumerate((40, 5, 1)):
        places = placements.some(spec, seed) if seed else placements.whole(spec)
        ops = gpu_ops(stand_in, spec)
        made = gpu_weights.load(pack, places, (stand_in,), ops.cpu)
        y = logits(spec, made, ops, places, chunk)
        assert nmse(y, truth) < (1e-9 if format == "f32" else 2e-4), places  # the CPU's int8 activations
