"""Every kind of model we read, against transformers: the logits agree, in f32 and in every smaller format.

The chain under test is the whole one: config and tensors read, packed, loaded into the arena, run by the
decoder,
with native ops and with the reference. Keys and values are kept in f16; that is where the f32 error comes
from.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kept_twins
import numpy as np
import pytest
import twins

from thermocline._native import Matrix
from thermocline.convert.importer import pack
from thermocline.engine.decoder import bind, for_context, forward
from thermocline.engine.engine import Engine, EngineSettings
from thermocline.engine.kv_cache import KVCache, block_counts
from thermocline.engine.sampler import SamplingParams
from thermocline.model import quant
from thermocline.model.spec import ModelSpec
from thermocline.ops import reference
from thermocline.ops.interface import F32, Batch, FFNStats, Weights
from thermocline.pack.pack import Pack
from thermocline.session import weights

# Of the power of the logits. f32: measured 7e-9 to 4e-8, from keys and values in f16; 1e-6 is the contract.
# The others are the formats' own errors through three layers, measured at most 2.4e-7, 1.7e-5, 2.4e-4 and
# 0.039,
# with room for 2.5x: half a bit of precision lost somewhere shows.
NMSE = {"f32": 1e-6, "f16": 6e-7, "bf16": 4e-5, "q8_0": 6e-4, "q4_0": 0.1}
NMSE |= {"q4_1": 0.1, "q5_0": 0.03, "q5_1": 0.03, "iq4_nl": 0.1, "mxfp4": 0.2}
MARGIN = 0.01  # logits closer than this may change places
PROMPT = 40


@dataclass(frozen=True)
class Twin:
    path: Path
    ids: list[int]
    truth: F32  # transformers' logits of `ids`


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(name, id=f"{name}, kept") for name in kept_twins.LOGITS),
        *(pytest.param(make, id=name, marks=pytest.mark.oracle) for name, make in twins.TWINS.items()),
    ],
)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    if isinstance(request.param, str):
        path = kept_twins.write(request.param, tmp_path_factory.mktemp("twin") / request.param)
        return Twin(path, kept_twins.ids(), kept_twins.logits(request.param))
    path = request.param(tmp_path_factory.mktemp("twin") / request.param.__name__)
    ids = np.random.default_rng(0).integers(3, twins.VOCAB, PROMPT).tolist()
    return Twin(path, ids, twins.hf_logits(path, ids))


@dataclass(frozen=True)
class Model:
    spec: ModelSpec
    weights: Weights
    ops: Any

    def logits(
        self, ids: list[int], chunk: int, *, sparsity: str = "exact", stats: FFNStats | None = None
    ) -> F32:
        """Of every position, the prompt given `chunk` tokens at a time."""
        stats = stats or FFNStats()
        kv = KVCache(self.spec, *block_counts(self.spec, len(ids), len(ids), chunk), chunk=chunk)
        table = kv.open(ids)
        assert kv.grow(table, len(ids))
        model, out = bind(for_context(self.spec, twins.CONTEXT), self.weights, self.ops), []
        states = new_states(self.spec)
        for step, start in enumerate(range(0, len(ids), chunk)):
            positions = np.arange(start, min(start + chunk, len(ids)), dtype=np.int32)
            rows = np.arange(len(positions), dtype=np.int32)
            part = np.array(ids, np.int32)[positions]
            tables = kv.tables([table], [start + len(positions)])
            slots = [np.array([n], np.int32) for n in (step % 2 if step else -1, (step + 1) % 2)]
            batch = Batch(part, positions, np.zeros_like(rows), tables[0], rows, tables[-1], *slots)
            out.append(forward(model, kv, batch, self.ops, sparsity=sparsity, stats=stats, states=states))
            kv.seal(table, ids, start + len(positions))
        return np.concatenate(out)


def new_states(spec: ModelSpec, slots: int = 2) -> dict[int, F32]:
    """Slots for the states of recurrent layers; nothing may be read of them before it was written."""
    sizes = {i: spec.state_floats(i) for i in range(spec.n_layers)}
    return {i: np.full((slots, n), np.nan, np.float32) for i, n in sizes.items() if n}


def loaded(path: Path, format: str = "f32", isa: str = "") -> Model:
    packed = path.with_name(f"{path.name}-{format}")
    if not packed.exists():
        pack(path, packed, format, activation=twins.ASKED.get(path.name))
    made = Pack.open(packed)
    got = weights.load(made, threads=2, isa=isa)
    return Model(made.spec, got.weights, got.ops)


def in_numpy(model: Model) -> Model:
    """The same weights for the reference ops: every native matrix becomes its float32 values."""

    def values(part: Any) -> Any:
        if isinstance(part, Matrix):
            return model.ops.embed(part, np.arange(part.shape[0], dtype=np.int32))
        if isinstance(part, tuple):
            return tuple(map(values, part))
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            return type(part)(*(values(getattr(part, f.name)) for f in dataclasses.fields(part)))
        return part

    return Model(model.spec, values(model.weights), reference)


def nmse(y: F32, truth: F32) -> float:
    return float(((y.astype(np.float64) - truth) ** 2).sum() / (truth.astype(np.float64) ** 2).sum())


def test_native_logits_are_transformers(twin: Twin) -> None:
    model = loaded(twin.path)
    whole = model.logits(twin.ids, PROMPT)
    assert nmse(whole, twin.truth) <= NMSE["f32"]
    # The arithmetic of a token does not depend on its company, so the chunking changes no bit.
    for chunk in (1, 7):
        assert np.array_equal(model.logits(twin.ids, chunk), whole), chunk


def test_reference_logits_are_transformers(twin: Twin) -> None:
    model = in_numpy(loaded(twin.path))
    for chunk in (PROMPT, 7, 1):
        assert nmse(model.logits(twin.ids, chunk), twin.truth) <= NMSE["f32"], chunk


@pytest.mark.parametrize("format", [f for f in NMSE if f != "f32"])  # rows of 64: no blocks of 256
def test_smaller_formats_stay_close(twin: Twin, format: str) -> None:
    model = loaded(twin.path, format)
    y = model.logits(twin.ids, PROMPT)
    room = 3 if model.spec.activation == "relu2" else 1  # the square doubles an error, and layers add up
    room = 3 if model.spec.norm_order == "after" else room  # small halves count as large ones do
    room = room if model.spec.latent is None else 2  # so do four products behind each other, of two
    for kind in set(model.spec.mixers):  # products of what is quantised: q, k, v and z; B, C and x
        room *= {"deltanet": 8, "conv": 2}.get(kind, 1)
        if kind == "deltanet" and model.spec.n_experts > 1:
            room *= 5  # near ties of experts: a state remembers the other one's answer
    assert nmse(y, twin.truth) <= room * NMSE[format]
    if quant.FORMATS[format].block == 1:  # the reference does not quantise activations
        assert nmse(y, in_numpy(model).logits(twin.ids, PROMPT)) <= NMSE["f32"]
    assert np.array_equal(model.logits(twin.ids, 7), y)


@pytest.mark.oracle
def test_greedy_tokens_are_transformers_where_the_margin_allows(twin: Twin) -> None:
    model = loaded(twin.path)
    settings = EngineSettings(context=twins.CONTEXT, max_batch=1, prefill_chunk=16)
    engine = Engine(model.spec, model.weights, model.ops, settings)
    request = engine.submit(twin.ids, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    while engine.step():
        pass
    assert len(request.token_ids) == 20
    logits = twins.hf_logits(twin.path, request.ids)[PROMPT - 1 : -1]
    logits[:, list(model.spec.eos_ids)] = -np.inf  # `ignore_eos` bans them
    chosen = logits[np.arange(20), request.token_ids]
    assert (chosen >= logits.max(axis=1) - MARGIN).all()
    best_two = np.sort(logits, axis=1)[:, -2:]
    clear = best_two[:, 1] - best_two[:, 0] > MARGIN
    assert clear.sum() >= 15, "the twin's logits are too flat to test anything"
    assert np.array_equal(logits.argmax(axis=1)[clear], np.array(request.token_ids)[clear])
