"""Predictors: the native core computes what numpy says, a guess changes only which neurons are computed,
and a file that is damaged or foreign is refused.
"""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_kernels as kernels
import tiny
import twins
from numpy.typing import NDArray
from test_gguf_import import powerinfer_model
from test_kernels import INT8_NMSE, ISAS, as_the_kernel_sees, cpu, ffn, nmse, normal, same_bits

from thermocline import LLM, SamplingParams
from thermocline.convert.importer import pack as pack_model
from thermocline.errors import BadFile, IOFailure, ThermoclineError, UsageError
from thermocline.model import quant
from thermocline.model.spec import ModelSpec
from thermocline.ops import reference
from thermocline.ops.interface import F32, FEW, FFNStats, Layer, Linear, Weights
from thermocline.pack import blocks, sidecar
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import (
    FILE,
    KINDS,
    LayerPredictor,
    Predictors,
    open_predictors,
    scores,
    stored,
    write_predictors,
)
from thermocline.session import weights

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def predictor(
    kind: str, neurons: int, dim: int, hot: int = 0, rank: int = 40, seed: int = 11
) -> LayerPredictor:
    """Random, with thresholds that half of the neurons reach; as it is when it has been stored."""
    first, second, signs = None, None, None
    if kind == "sign":
        signs = np.packbits(normal(seed, neurons, dim) > 0, axis=1, bitorder="little")
    else:
        first = normal(seed, rank, dim) / np.float32(np.sqrt(dim))
        second = normal(seed + 1, neurons, rank)
    made = LayerPredictor(kind, first, second, signs, np.zeros(neurons, np.float32), hot)
    return stored(made, spec_of(neurons, dim)).decoded()


def spec_of(neurons: int, dim: int) -> ModelSpec:
    return replace(kernels.SPEC, dim=dim, ffn_dim=neurons, n_layers=1)


def clear(p: LayerPredictor, x: F32) -> LayerPredictor:
    """Thresholds so far from every score of x that no rounding decides."""
    s = scores(p, x)
    middle = np.median(s)
    for distance in np.linspace(0, 1, 101):
        threshold = (middle + distance * np.arange(s.shape[1]) / s.shape[1]).astype(np.float32)
        near = np.abs(s - threshold) < 1e-3 * (1 + np.abs(s))
        if not near.any():
            return replace(p, threshold=threshold)
    return replace(p, threshold=np.where(near.any(axis=0), np.float32(-np.inf), threshold))


def given(p: LayerPredictor | None, f: kernels.Ffn) -> kernels.Ffn:
    """The FFN with this predictor, natively and in numpy."""
    spec = replace(f.spec, n_layers=1)
    none = Linear(np.empty((0, 0), np.float32), None)
    layer = Layer(None, none, none, None, (f.native,))
    some = Weights(none.weight, None, (layer,), None, none)
    native = weights.with_predictors(some, Predictors.of(spec, [p])).layers[0].experts[0]
    return replace(f, native=native, numpy=f.numpy.with_part(replace(f.numpy.part, predictor=p)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", ["f32", "f16", "bf16", "q8_0", "q4_0"])  # what predictors are stored in
def test_the_native_core_predicts_as_the_specification_says(isa: str, kind: str, format: str) -> None:
    dims = (96, 544) if format in kernels.QUANTISED else (33, 129, 544)
    for dim, shape, tokens in zip(dims, ("gated", "ungated", "dReLU"), (1, 3, FEW), strict=False):
        f = ffn(format, 517, dim, shape, "relu", -0.5)
        x = normal(5, tokens, dim)
        h = as_the_kernel_sees(format, normal(6, tokens, dim))
        p = clear(predictor(kind, 517, dim, hot=100), h)
        guessing = given(p, f)
        y, stats = guessing.run(cpu(isa), x, h, sparsity="predict")
        truth, counted = guessing.run(reference, x, h, sparsity="predict")
        assert nmse(y - x, truth - x) <= 3 * INT8_NMSE, (dim, shape)
        assert stats.predicted == counted.predicted == int(p.predicted(h).any(axis=0).sum())
        assert 100 < stats.predicted < 517 and stats.gates_dense == 517
        assert abs(stats.rows - counted.rows) <= 4
        for threads in (2, 3):
            again, said = guessing.run(cpu(isa, threads), x, h, sparsity="predict")
            assert same_bits(again, y) and said == stats


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", kernels.KINDS)
def test_predicting_every_neuron_changes_no_bit(isa: str, kind: str, shape: str) -> None:
    for format, tokens in itertools.product(("f32", "q4_0"), range(1, FEW + 1)):
        f = ffn(format, 600, 96, shape, "relu")
        x, h = normal(5, tokens, 96), normal(6, tokens, 96)
        exact, counted = f.run(cpu(isa), x, h)
        p = predictor(kind, 600, 96)
        yes = replace(p, threshold=np.full(600, -np.inf, np.float32))
        for all_of_it in (yes, replace(p, hot=600), replace(yes, hot=300)):
            y, stats = given(all_of_it, f).run(cpu(isa), x, h, sparsity="predict")
            assert same_bits(y, exact)
            assert (stats.rows, stats.active, stats.predicted) == (counted.rows, counted.active, 600)
        no = replace(p, threshold=np.full(600, np.inf, np.float32))
        y, stats = given(no, f).run(cpu(isa), x, h, sparsity="predict")
        assert f.native.down_bias is not None
        assert same_bits(y, x + f.native.down_bias) and (stats.predicted, stats.rows) == (0, 0)


def test_many_tokens_are_computed_exactly() -> None:
    """259 are more than one native pass: its last three tokens are not few."""
    f = ffn("f32", 300, 64, "gated", "relu")
    no = replace(predictor("svd", 300, 64), threshold=np.full(300, np.inf, np.float32))
    for tokens in (FEW + 1, 259):
        x, h = normal(5, tokens, 64), normal(6, tokens, 64)
        y, stats = given(no, f).run(cpu(ISAS[0]), x, h, sparsity="predict")
        assert same_bits(y, f.run(cpu(ISAS[0]), x, h)[0]) and stats.predictor_bytes == 0


@pytest.mark.parametrize("kind", ("mlp", "svd"))
def test_a_damaged_input_is_not_predicted_away(kind: str) -> None:
    f = ffn("q8_0", 64, 96, "gated", "relu")
    no = replace(predictor(kind, 64, 96), threshold=np.full(64, np.inf, np.float32))
    h = normal(6, 1, 96)
    h[0, 5] = np.nan
    y, stats = given(no, f).run(cpu(ISAS[0]), normal(5, 1, 96), h, sparsity="predict")
    assert np.isnan(y).all() and stats.predicted == 64
    assert no.predicted(h).all()


def test_neurons_that_up_kills_do_not_have_their_down_rows_read() -> None:
    f = ffn("q8_0", 512, 96, "dReLU", "relu", 0.0)
    x, h = normal(5, 1, 96), normal(6, 1, 96)
    y, stats = f.run(cpu(ISAS[0]), x, h)
    dense, _ = f.run(cpu(ISAS[0]), x, h, sparsity="off")
    gate = f.numpy.part.gate
    gates = int((reference.matmul(gate.weight, h, gate.bias) > 0).sum())
    assert same_bits(y, dense) and abs(stats.rows - (gates + stats.active)) <= 2
    assert stats.active < 0.7 * gates


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_what_the_words_say(kind: str) -> None:
    p, x = predictor(kind, 50, 96), as_the_kernel_sees("q8_0", normal(3, 2, 96))
    if kind == "sign":
        assert p.signs is not None
        agree = (np.unpackbits(p.signs, axis=1, bitorder="little")[None, :, :96] == (x > 0)[:, None, :]).sum(
            axis=2
        )
        assert np.array_equal(scores(p, x), 2 * agree - 96)
        return
    assert p.first is not None and p.second is not None
    code = x @ p.first.T
    wanted: F32 = np.asarray((np.maximum(code, 0) if kind == "mlp" else code) @ p.second.T, np.float32)
    assert nmse(scores(p, x), wanted) < 1e-4


# ---- the file


@pytest.fixture
def pack(tiny_pack: Path, tmp_path: Path) -> Pack:
    shutil.copytree(tiny_pack, tmp_path / "pack")
    return Pack.open(tmp_path / "pack")


def some(pack: Pack, **changes: Any) -> list[LayerPredictor | None]:
    n, dim = pack.spec.ffn_dim, pack.spec.dim
    return [
        replace(predictor("svd", n, dim), **changes),
        replace(predictor("sign", n, dim, hot=7), **changes),
    ]


def as_read(pack: Pack) -> list[LayerPredictor | None]:
    found = open_predictors(pack)
    assert found is not None
    with found:
        return [found.layer(i) for i in range(found.count)]


def same(a: LayerPredictor | None, b: LayerPredictor | None) -> bool:
    if a is None or b is None:
        return a is b
    arrays = zip(
        (a.first, a.second, a.signs, a.threshold), (b.first, b.second, b.signs, b.threshold), strict=True
    )
    return (a.kind, a.hot) == (b.kind, b.hot) and all(np.array_equal(x, y) for x, y in arrays)  # type: ignore[arg-type]


def test_what_is_written_is_read(pack: Pack) -> None:
    assert open_predictors(pack) is None
    for layers in (
        some(pack),
        [None, predictor("mlp", pack.spec.ffn_dim, pack.spec.dim, rank=32)],
        [None, None],
    ):
        write_predictors(pack, layers, {"kld": 0.001})
        assert all(map(same, as_read(pack), layers))
        found, made = open_predictors(pack), Predictors.of(pack.spec, layers)
        assert found is not None and found.report == {"kld": 0.001} and found.nbytes == made.nbytes
        found.close()
    assert sorted(p.name for p in pack.path.iterdir() if "tmp" in p.name) == []


def test_a_rank_that_is_no_whole_block_is_filled_up(pack: Pack) -> None:
    p = some(pack)[0]
    assert p is not None and p.first is not None and p.second is not None and len(p.first) == 64
    assert not p.first[40:].any() and not p.second[:, 40:].any()


def test_another_packs_predictors_are_refused(pack: Pack) -> None:
    write_predictors(pack, some(pack), {})
    manifest = pack.path / "pack.json"
    manifest.write_bytes(manifest.read_bytes() + b"\n")
    with pytest.raises(BadFile, match=r"made for another pack; run `thermocline train .*` again"):
        open_predictors(pack)


def test_a_failed_write_leaves_what_was_there(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    write_predictors(pack, some(pack), {})
    before = as_read(pack)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sidecar, "write", full)
    with pytest.raises(IOFailure, match="No space left"):
        write_predictors(pack, [None, None], {})
    assert all(map(same, as_read(pack), before))


def rewritten(pack: Pack, facts: Any, tensors: dict[str, NDArray[Any]]) -> None:
    layout = {name: (a.dtype, a.shape) for name, a in tensors.items()}
    stamp = sidecar.stamp(pack.path)
    sidecar.write(pack.path / FILE, "predictors", stamp, facts, layout, tensors.values())


def test_hostile_descriptions_are_refused(pack: Pack) -> None:
    n = pack.spec.ffn_dim
    signs: dict[str, NDArray[Any]] = {
        "layers.1.signs": np.zeros((n, 8), np.uint8),
        "layers.1.threshold": np.zeros(n, np.float32),
    }
    good = {"kind": "sign", "rank": 0, "hot": 0, "crc32c": 0}
    for layers in (
        None,
        [None],
        [None, None, None],
        [None, 3],
        [None, good | {"kind": "oracle"}],
        [None, good | {"hot": n + 1}],
        [None, good | {"hot": True}],
        [None, good | {"rank": 32}],
        [None, good | {"kind": "mlp"}],
        [None, good | {"kind": "mlp", "rank": 33}],
        [None, good | {"kind": "mlp", "rank": 1 << 20}],
        [None, good | {"extra": 1}],
        [good, None],
        [None, None],
    ):
        rewritten(pack, {"layers": layers, "report": {}}, signs)
        with pytest.raises(BadFile):
            open_predictors(pack)
    rewritten(pack, {"layers": [None, good], "report": {}}, signs)
    found = open_predictors(pack)
    assert found is not None
    with found, pytest.raises(BadFile, match="checksum"):
        found.stored(1)
    nan = replace(predictor("sign", n, pack.spec.dim), threshold=np.full(n, np.nan, np.float32))
    write_predictors(pack, [None, nan], {})
    with pytest.raises(BadFile, match="not a number"):
        as_read(pack)
    short = {name: a[:-1] for name, a in signs.items()}
    rewritten(pack, {"layers": [None, good], "report": {}}, short)
    with pytest.raises(BadFile, match="is F32"):
        as_read(pack)


def test_every_damaged_byte_is_noticed_or_harmless(pack: Pack) -> None:
    write_predictors(pack, some(pack), {})
    path, right = pack.path / FILE, as_read(pack)
    good, rng = path.read_bytes(), np.random.default_rng(3)
    places = {*rng.integers(0, len(good), 150).tolist(), *range(0, 1500, 5)}
    for at in sorted(places):
        bad = bytearray(good)
        bad[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        try:
            assert all(map(same, as_read(pack), right)), at
        except ThermoclineError as error:
            assert str(path) in str(error)
    for size in (0, 7, 100, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(ThermoclineError):
            as_read(pack)


# ---- in a run


def answer(path: Path, sparsity: str) -> Any:
    with LLM(path, context=128, threads=2, sparsity=sparsity) as llm:
        return llm.generate("Once upon a time there was", GREEDY)


def test_a_run_predicts_from_the_first_generated_token_on(pack: Pack) -> None:
    exact = answer(pack.path, "exact").figures
    write_predictors(pack, some(pack, threshold=np.full(pack.spec.ffn_dim, -np.inf, np.float32)), {})
    asked = answer(pack.path, "predict").figures
    assert asked.logits_hash == exact.logits_hash and asked.predicted_fraction == 1
    found = open_predictors(pack)
    assert found is not None
    first, second = (found.stored(i) for i in range(2))
    assert first is not None and second is not None
    read = first.nbytes + second.nbytes - 7 * (second.second.rows.shape[1] + 4)  # layer 1 has 7 hot neurons
    assert asked.bytes_per_token == exact.bytes_per_token + read
    write_predictors(pack, some(pack, threshold=np.full(pack.spec.ffn_dim, np.inf, np.float32)), {})
    none = answer(pack.path, "predict").figures
    assert none.logits_hash != exact.logits_hash
    assert none.predicted_fraction == pytest.approx(7 / (2 * pack.spec.ffn_dim))
    gate = quant.row_bytes("f32", pack.spec.dim)
    fewer = (2 * pack.spec.ffn_dim - 7) * gate
    assert none.bytes_per_token < asked.bytes_per_token - fewer


def test_the_line_and_json_say_what_was_predicted(pack: Pack, thermocline: Any) -> None:
    write_predictors(pack, some(pack), {})
    run = ("run", "-m", pack.path, "-n", "5", "--temp", "0", "-c", "64", "--sparsity", "predict", "hello")
    said = thermocline(*run)
    assert said.code == 0 and "% predicted, " in said.err and " · predict · " in said.err
    figures = json.loads(thermocline(*run, "--json").out)
    assert figures["sparsity"] == "predict" and 0.2 < figures["predicted_fraction"] < 0.8
    rows = json.loads(
        thermocline("bench", "-m", pack.path, "-p", "0", "-n", "4", "--sparsity", "predict", "-o", "json").out
    )
    assert rows[0]["sparsity"] == "predict" and 0 < rows[0]["predicted_fraction"] < 1


def test_a_pack_without_predictors_says_how_to_make_them(pack: Pack, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no predictors; make them with `thermocline train "):
        LLM(pack.path, sparsity="predict", lazy=True)

    pack_model(tiny.hf_directory(tmp_path / "silu", hidden_act="silu"), tmp_path / "dense", "f32")
    with pytest.raises(UsageError, match="silu neurons are never zero"):
        LLM(tmp_path / "dense", sparsity="predict", lazy=True)


@pytest.mark.oracle
def test_powerinfers_predictors_work_and_are_read_only_then(tmp_path: Path) -> None:
    twins.TWINS["llama_relu_tied"](tmp_path / "hf")
    source = powerinfer_model(tmp_path / "hf", tmp_path / "src", rank=256)  # blocks of their own
    pack_model(source, tmp_path / "p", "f32")
    pack = Pack.open(tmp_path / "p")
    found = open_predictors(pack)
    assert found is not None and pack.predictor is not None
    layers = [found.layer(i) for i in range(found.count)]
    assert [p.kind for p in layers if p] == ["mlp"] * 3
    held = [blocks.memory_bytes(pack, p) for p in (None, found)]
    assert held[0] < pack.weights_bytes and held[1] - held[0] == found.nbytes
    loaded = weights.load(pack, threads=1, predictors=found)
    for i, (layer, p) in enumerate(zip(loaded.weights.layers, layers, strict=True)):
        assert p is not None and layer.experts[0].part.predictor is not None
        x, h = normal(i, 2, pack.spec.dim), normal(i + 9, 2, pack.spec.dim)
        stats = FFNStats()
        bound = loaded.ops.bind_ffn(pack.spec, replace(layer, ffn_norm=None))
        loaded.ops.ffn_add(x, h, bound, "predict", stats)
        assert abs(stats.predicted - int(p.predicted(h).any(axis=0).sum())) <= 1
    fc2 = pack.tensors["layers.1.predictor.fc2.weight"]
    damaged = fc2.offset + fc2.bytes // 2
    with pack.weights_path.open("r+b") as f:
        f.seek(damaged)
        f.write(b"\xff")
    weights.load(pack, threads=1)  # never looks there
    with pytest.raises(BadFile, match="predictor"):
        found.stored(1)
