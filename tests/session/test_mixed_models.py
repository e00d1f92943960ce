"""Models whose tensors have formats of their own: the reference's logits, wherever the weights lie.

The numpy reference multiplies the decoded weights with activations that are not rounded, so a model of
blocks differs from it by int8's error. Everything else is a claim about bits.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import mixed
import numpy as np
import pytest
from test_disk_tier import small_buffers
from test_twins import Model, in_numpy, nmse

from thermocline import _native
from thermocline.engine.traffic import Traffic
from thermocline.machine import tiers
from thermocline.pack.checksums import open_checksums
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import LayerPredictor, Predictors
from thermocline.plan.contents import contents_of, pack_sizes
from thermocline.plan.cost import Speeds
from thermocline.plan.disk import disk_split
from thermocline.plan.disk.disk_split import Arrangement
from thermocline.session import store, weights

__all__ = ["small_buffers"]  # a fixture
IDS = np.random.default_rng(0).integers(1, 90, 40).tolist()
SPARSE = [kind for kind, spec in mixed.SPECS.items() if spec.sparse]


def model_of(pack: Pack, threads: int = 2) -> Model:
    got = weights.load(pack, threads=threads)
    return Model(pack.spec, got.weights, got.ops)


@pytest.mark.parametrize("kind", mixed.SPECS)
def test_logits_are_the_references_and_no_chunk_changes_a_bit(kind: str, tmp_path: Path) -> None:
    model = model_of(mixed.pack_of(tmp_path / "p", kind))
    whole = model.logits(IDS, len(IDS))
    truth = in_numpy(model).logits(IDS, len(IDS))
    each = [nmse(y, t) for y, t in zip(whole, truth, strict=True)]
    # A router's close choice may turn out differently: most tokens of a mixture are as close as all others.
    assert (np.median(each) if "mixture" in kind else max(each)) <= 2e-3
    for chunk, threads in itertools.product((1, 3, 7), (1, 3)):
        assert np.array_equal(model_of(Pack.open(tmp_path / "p"), threads).logits(IDS, chunk), whole), chunk


@pytest.mark.parametrize("kind", mixed.SPECS)
def test_rows_are_interleaved_where_a_matrix_is_multiplied_as_a_whole(kind: str, tmp_path: Path) -> None:
    """The rows of neurons that may be skipped are not. No bit of an answer changes."""
    pack = mixed.pack_of(tmp_path / "p", kind)
    ops = weights.new_ops(2)
    begun = weights.BegunLoad.of(pack, ops)
    begun.read()
    in_turn = weights.PackInMemory(pack.spec, pack.tensors, begun.arena, ops)
    planar = Model(pack.spec, weights.assemble(in_turn, "a test"), ops)
    loaded = model_of(pack)
    assert np.array_equal(loaded.logits(IDS, 1), planar.logits(IDS, 1))
    assert np.array_equal(loaded.logits(IDS, 40), planar.logits(IDS, 1))
    for layer, other in zip(loaded.weights.layers, planar.weights.layers, strict=True):
        neurons = layer.experts[0].parts[0]
        assert layer.attn_out is not None and other.attn_out is not None
        for w, before in ((layer.attn_out.weight, other.attn_out.weight),
                          (neurons.down, other.experts[0].parts[0].down)):  # fmt: skip
            assert isinstance(w, _native.Matrix) and isinstance(before, _native.Matrix)
            whole = w is layer.attn_out.weight or not pack.spec.sparse
            assert w.interleaved == (whole and ops.native.interleaves(before)), w.shape


def test_floats_of_several_widths_are_the_references(tmp_path: Path) -> None:
    """They share one input: nothing is rounded, and the bound is that of f32."""
    formats = {"layers.0.q.weight": "f32", "layers.0.k.weight": "bf16", "layers.1.gate.weight": "f32",
               "layers.1.up": "bf16", "layers.1.down": "f32", "layers.2.down": "bf16"}  # fmt: skip
    model = model_of(mixed.pack_of(tmp_path / "p", "relu", formats, "f16"))
    assert nmse(model.logits(IDS, 40), in_numpy(model).logits(IDS, 40)) <= 1e-6
    assert np.array_equal(model.logits(IDS, 1), model.logits(IDS, 40))


def sure(pack: Pack) -> Predictors:
    """Of three kinds, in formats of their own; they name half of the neurons."""
    s, rng = pack.spec, np.random.default_rng(3)
    n = s.n_experts * s.ffn_dim
    zero = np.zeros(n, np.float32)
    first, second = (rng.standard_normal((r, c), dtype=np.float32) for r, c in ((32, s.dim), (n, 32)))
    bits = rng.integers(0, 256, (n, s.dim // 8), dtype=np.uint8)
    named = {"svd": (first, second, None), "mlp": (first, second, None), "sign": (None, None, bits)}
    return Predictors.of(s, [LayerPredictor(k, *m, zero, 40, s.n_experts) for k, m in named.items()])


@pytest.mark.parametrize("kind", SPARSE)
def test_neither_skipping_nor_a_disk_changes_a_bit(kind: str, tmp_path: Path) -> None:
    """Layers' records differ in formats and in length; two are of one length, and not of one format."""
    same_length = {"layers.1.gate.weight": "q4_1", "layers.1.up": "q4_1", "layers.1.down": "iq4_xs"}
    pack = mixed.pack_of(tmp_path / "p", kind, mixed.k_mix(mixed.SPECS[kind]) | same_length)
    found = sure(pack)
    for sparsity in ("exact", "predict"):
        predictors = found if sparsity == "predict" else None
        whole = weights.load(pack, threads=2, predictors=predictors)
        a = arranged(pack, predictors)
        some, disk = store.load(pack, a, open_checksums(pack), threads=2, predictors=predictors)
        for chunk in (4, 40) if "mixture" in kind else (1, 4, 40):
            truth = mixed.logits(pack.spec, whole, IDS, chunk, sparsity)
            assert np.array_equal(mixed.logits(pack.spec, some, IDS, chunk, sparsity), truth), chunk
            if sparsity == "exact":
                assert np.array_equal(mixed.logits(pack.spec, whole, IDS, chunk, "off"), truth)
        assert disk.counts().missed > 0


def arranged(pack: Pack, predictors: Predictors | None) -> Arrangement:
    """The least memory that there can be, and a few records."""
    c = contents_of(pack, predictors, "exact" if predictors is None else "predict")
    return disk_split.arrange(c, disk_split.least_bytes(c, {}) + (100 << 10), {})


def test_layers_of_one_length_and_several_formats_share_a_pool(tmp_path: Path) -> None:
    formats = {"layers.0.up": "f16", "layers.0.down": "bf16", "layers.1.up": "bf16", "layers.1.down": "f16"}
    pack = mixed.pack_of(tmp_path / "p", "relu", formats, "f16")
    assert len({pack.tensors[f"layers.{i}.bundle"].stride for i in range(3)}) == 1
    whole = weights.load(pack, threads=2)
    some, _ = store.load(pack, arranged(pack, None), open_checksums(pack), threads=2)
    truth = mixed.logits(pack.spec, whole, IDS, 1, "exact")
    assert np.array_equal(mixed.logits(pack.spec, some, IDS, 1, "exact"), truth)


def test_a_tokens_traffic_is_the_bytes_of_its_tensors(tmp_path: Path) -> None:
    pack = mixed.pack_of(tmp_path / "p", "dense")
    made, s = weights.load(pack, threads=1).weights, pack.spec
    t = Traffic.of(s, made)
    specs = pack.tensor_specs()
    rows = sum(x.payload * x.rows for x in specs.values() if x.role in ("up", "down"))
    gates = sum(x.payload * x.rows for x in specs.values() if x.role == "gate")
    assert t.row_bytes * 2 * s.n_layers * s.ffn_dim == pytest.approx(rows)
    assert t.gate_bytes * s.n_layers * s.ffn_dim == pytest.approx(gates)
    rest = sum(x.payload * x.rows for x in specs.values() if x.role not in ("up", "down", "gate"))
    assert t.fixed_bytes == rest  # the head is the embeddings


# ---- plans


def test_each_format_is_read_at_its_own_speed(tmp_path: Path) -> None:
    pack = mixed.pack_of(tmp_path / "p", "dense")
    sizes = pack_sizes(pack, None)
    assert sizes.format == "q4_k" and set(sizes.formats) >= {"q4_k", "q6_k", "q5_k", "q3_k", "iq4_nl"}
    layer = sizes.layers[0]
    read = {r.format: r.bytes for r in layer.attention.reads}
    t = pack.tensors
    assert read["q6_k"] == t["layers.0.v.weight"].bytes
    assert read["q4_k"] == sum(t[f"layers.0.{n}.weight"].bytes for n in ("q", "k", "attn_out"))

    def token_us(**kernels: tiers.Kernel) -> float:
        cpu = tiers.CpuTier(1 << 40, 20.0, 1, 1, kernels)
        v = Speeds(tiers.Tiers("m", "a test", cpu, None, None), sizes.format, 1)
        return float(v.cpu(layer.bundle.reads, layer.neurons))

    fast, slow = tiers.Kernel(20.0, 1e9), tiers.Kernel(5.0, 1e9)
    ups, downs = (sum(r.bytes for r in layer.bundle.reads if r.format == f) for f in ("q4_k", "q6_k"))
    alike, apart = token_us(q4_k=fast), token_us(q4_k=fast, q6_k=slow)
    assert apart / alike == pytest.approx((ups + 4 * downs) / (ups + downs))
    assert token_us(q4_k=fast, q8_0=slow) == alike  # a format without figures is read like the model's


def test_a_plan_needs_the_bytes_that_the_pack_has(tmp_path: Path) -> None:
    for kind in mixed.SPECS:
        pack = mixed.pack_of(tmp_path / kind, kind)
        assert pack_sizes(pack, None).weights_bytes == pack.weights_bytes
