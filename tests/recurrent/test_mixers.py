"""Native recurrent layers equal the reference; no bit depends on batch, chunks, threads or slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_kernels import F32_NMSE, INT8_NMSE, ISAS, cpu, nmse, normal, same_bits, stored

from thermocline import _native
from thermocline.model.spec import ModelSpec, Recurrent
from thermocline.ops import reference
from thermocline.ops.interface import F32, I32, Batch, DeltaNet, Layer, Mamba2, Mixer, Norm, ShortConv

SPEC = ModelSpec(
    architecture="test",
    dim=64,
    ffn_dim=32,
    n_layers=1,
    n_heads=1,
    n_kv_heads=1,
    head_dim=32,
    vocab_size=7,
    max_context=1024,
    norm="rms",
    norm_eps=1e-5,
    activation="relu",
    residual_scale=0.5,
)


def spec_of(kind: str, **sizes: Any) -> ModelSpec:
    return replace(SPEC, mixers=(kind,), recurrent=Recurrent(**sizes))


# Heads in groups, tiled and not; columns and rows that fill no vector, or more than a block of columns.
SPECS = {
    "deltanet": spec_of("deltanet", conv=4, heads=4, head_dim=32, groups=2, state=32),
    "deltanet tiled": spec_of("deltanet", conv=4, heads=4, head_dim=16, groups=2, state=8, tiled=True),
    "deltanet wide": spec_of("deltanet", conv=3, heads=2, head_dim=80, groups=1, state=160),
    "deltanet odd": spec_of("deltanet", conv=2, heads=3, head_dim=13, groups=3, state=7),
    "mamba2": spec_of("mamba2", conv=4, heads=4, head_dim=64, groups=2, state=16, conv_bias=True),
    "mamba2 odd": spec_of("mamba2", conv=4, heads=6, head_dim=5, groups=3, state=9),
    "conv": spec_of("conv", conv=3),
    "conv long": spec_of("conv", conv=9),
}


def vectors(r: Recurrent, channels: int) -> tuple[F32, F32, F32]:
    """conv, decay, dt_bias"""
    conv = normal(20, channels, r.conv) / np.float32(np.sqrt(r.conv))
    return conv, -np.abs(normal(21, r.heads)), normal(22, r.heads)


def mixer(spec: ModelSpec, matrix: Any) -> Mixer:
    """Random weights; `matrix(seed, rows, cols)`"""
    r, dim = spec.recurrent, spec.dim
    assert r is not None
    kind = spec.mixer(0)
    if kind == "conv":
        return ShortConv(matrix(1, 3 * dim, dim), vectors(r, dim)[0], matrix(2, dim, dim))
    conv, decay, dt_bias = vectors(r, r.channels)
    out = matrix(2, dim, r.inner)
    if kind == "mamba2":
        bias = normal(23, r.channels) if r.conv_bias else None
        into = matrix(1, r.inner + r.channels + r.heads, dim)
        return Mamba2(into, conv, bias, decay, dt_bias, normal(24, r.heads), normal(25, r.inner), out)
    qkv, z = matrix(1, r.channels, dim), matrix(3, r.inner, dim)
    beta, alpha, norm = matrix(4, r.heads, dim), matrix(5, r.heads, dim), normal(25, r.head_dim)
    return DeltaNet(qkv, z, beta, alpha, conv, decay, dt_bias, norm, out)


def layer_of(m: Mixer) -> Layer:
    weight = (1 + normal(9, SPEC.dim) / 8).astype(np.float32)
    return Layer(Norm(weight, None), None, None, None, (), mixer=m)


def batch(lengths: list[int], before: list[int], after: list[int]) -> Batch:
    sequence = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    table = np.zeros((len(lengths), 64), np.int32)
    slots = (np.array(before, np.int32), np.array(after, np.int32))
    return Batch(positions, positions, sequence, table, np.zeros(0, np.int32), None, *slots)


class Lab:
    """One layer, natively and as the reference."""

    def __init__(self, name: str, isa: str = "", threads: int = 1, format: str = "f32") -> None:
        self.spec, self.ops = SPECS[name], cpu(isa, threads)
        kept: dict[int, F32] = {}

        def native(seed: int, rows: int, cols: int) -> Any:
            matrix, kept[seed] = stored(format, normal(seed, rows, cols) / np.float32(np.sqrt(cols)))
            return matrix

        self.bound = self.ops.bind_mixer(self.spec, layer_of(mixer(self.spec, native)))
        plain = mixer(self.spec, lambda seed, rows, cols: kept[seed])
        self.plain = reference.bind_mixer(self.spec, layer_of(plain))

    def states(self, slots: int) -> F32:
        return np.full((slots, self.spec.state_floats(0)), np.nan, np.float32)

    def run(self, x: F32, b: Batch, states: F32) -> F32:
        y = x.copy()
        self.ops.mixer_add(y, y, self.bound, self.ops.step(b, 16, None, None), states)
        return y

    def truth(self, x: F32, b: Batch, states: F32) -> F32:
        y = x.copy()
        reference.mixer_add(y, y, self.plain, reference.step(b, 16, None, None), states)
        return y


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SPECS)
def test_a_native_mixer_equals_the_reference(name: str, isa: str) -> None:
    """Two steps of three sequences, of which one begins with the second step."""
    lab, x = Lab(name, isa), normal(7, 24, SPEC.dim)
    ours, theirs = lab.states(8), lab.states(8)
    steps = [(batch([9, 1], [-1, -1], [0, 5]), x[:10]), (batch([2, 9, 3], [5, 0, -1], [1, 2, 3]), x[10:])]
    for b, part in steps:
        truth = lab.truth(part, b, theirs)
        assert nmse(lab.run(part, b, ours) - part, truth - part) <= 10 * F32_NMSE
    written = [0, 5, 1, 2, 3]
    assert np.isfinite(ours[written]).all() and np.isnan(ours[[4, 6, 7]]).all()
    ours_2, theirs_2 = ((s[written].astype(np.float64) ** 2).sum(axis=1) for s in (ours, theirs))
    np.testing.assert_allclose(ours_2, theirs_2, rtol=1e-5)  # slots may be arranged otherwise


@pytest.mark.parametrize("name", ["deltanet", "mamba2", "conv"])
def test_quantised_projections_are_those_of_any_matrix(name: str) -> None:
    spec = SPECS[name]
    lab, x = Lab(name, format="q8_0"), normal(7, 12, spec.dim)
    b = batch([12], [-1], [0])
    truth = lab.truth(x, b, lab.states(1)) - x
    assert nmse(lab.run(x, b, lab.states(1)) - x, truth) <= 10 * INT8_NMSE


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SPECS)
def test_batches_chunks_threads_and_slots_change_no_bit(name: str, isa: str) -> None:
    lab, x = Lab(name, isa), normal(3, 41, SPEC.dim)
    states = lab.states(3)
    whole = lab.run(x, batch([41], [-1], [1]), states)
    end = states[1].copy()
    for threads, chunk in ((1, 1), (2, 7), (3, 16), (4, 41)):
        other, at, slot = Lab(name, isa, threads), 0, -1
        slots = other.states(3)
        while at < len(x):
            n, to = min(chunk, len(x) - at), (slot + 1) % 3
            before = slots[slot].copy()
            assert same_bits(other.run(x[at : at + n], batch([n], [slot], [to]), slots), whole[at : at + n])
            assert slot < 0 or same_bits(slots[slot], before), "a state is never changed"
            at, slot = at + n, to
        assert same_bits(slots[slot], end)
    mixed = lab.states(4)
    beside = lab.run(np.concatenate([x[:5], x, x[:1]]), batch([5, 41, 1], [-1, -1, -1], [2, 0, 3]), mixed)
    assert same_bits(beside[5:46], whole) and same_bits(mixed[0], end)
    assert same_bits(beside[:5], whole[:5]) and same_bits(beside[46:], whole[:1])


def test_two_sequences_may_continue_one_state() -> None:
    lab, x = Lab("deltanet"), normal(3, 6, SPEC.dim)
    states = lab.states(4)
    lab.run(x[:4], batch([4], [-1], [0]), states)
    both = lab.run(np.concatenate([x[4:5], x[5:6]]), batch([1, 1], [0, 0], [1, 2]), states)
    assert same_bits(both[:1], lab.run(x[4:5], batch([1], [0], [3]), states))
    assert same_bits(states[1], states[3]) and not same_bits(states[1], states[2])


@pytest.mark.parametrize("name", ["deltanet", "mamba2", "conv"])
def test_a_nan_is_not_swallowed(name: str) -> None:
    lab, x = Lab(name), normal(3, 4, SPEC.dim)
    x[2, 3] = np.nan
    y = lab.run(x, batch([4], [-1], [0]), lab.states(1))
    assert np.isfinite(y[:2]).all() and np.isnan(y[2]).all() and np.isnan(y[3]).any()


def test_no_tokens_are_no_work() -> None:
    lab = Lab("deltanet")
    states = lab.states(1)
    none = np.zeros((0, SPEC.dim), np.float32)
    no_ids = np.zeros(0, np.int32)
    lab.run(none, replace(batch([1], [-1], [0]), positions=no_ids, sequence=no_ids), states)
    assert np.isnan(states).all()


def step_of(before: list[int], after: list[int], sequence: list[int] | None = None) -> Any:
    b = batch([1] * len(before), before, after)
    if sequence is not None:
        ids: I32 = np.array(sequence, np.int32)
        b = replace(b, sequence=ids, positions=np.arange(len(ids), dtype=np.int32))
    return cpu("").step(b, 16, None, None)


@pytest.mark.parametrize(
    ("before", "after", "sequence"),
    [
        ([-2], [0], None),
        ([0], [-1], None),
        ([0], [0], None),
        ([1, 0], [2, 1], None),
        ([-1, -1], [1, 1], None),
        ([-1, -1], [0, 1], [0, 1, 0]),
    ],
)
def test_states_that_would_be_mixed_up_are_refused(
    before: list[int], after: list[int], sequence: list[int] | None
) -> None:
    with pytest.raises(ValueError):
        step_of(before, after, sequence)


def test_states_that_are_not_there_or_of_another_shape_are_refused() -> None:
    lab, x = Lab("deltanet"), normal(3, 1, SPEC.dim)
    for states in (lab.states(1), lab.states(2)[:, :-1].copy()):
        with pytest.raises(ValueError):
            lab.run(x, batch([1], [-1], [1]), states)
    with pytest.raises(ValueError):
        lab.run(x, replace(batch([1], [-1], [0]), state_from=None, state_to=None), lab.states(1))


# ---- what the bindings refuse


def a_mixer(kind: str, **changes: Any) -> _native.Mixer:
    """A small mixer that is accepted; each bad call changes one argument."""
    rows = {"deltanet": 24 + 8 + 2 + 2, "mamba2": 8 + 24 + 2, "conv": 24}[kind]
    channels, inner, heads = (8, 8, 0) if kind == "conv" else (24, 8, 2)
    good: dict[str, Any] = {
        "kind": ("deltanet", "mamba2", "conv").index(kind),
        "norm": None,
        "proj": _native.Stack((stored("f32", normal(1, rows, 8))[0],), None),
        "out": _native.Linear(stored("f32", normal(2, 8, inner))[0], None),
        "join": _native.Join(None, 1.0),
        "conv": normal(3, 4, channels),
        "conv_bias": None,
    }
    if heads:
        good |= {"heads": heads, "groups": 2, "rows": 4, "cols": 4}
        good |= {"decay": -np.ones(2, np.float32), "step_bias": np.zeros(2, np.float32)}
        good |= {"gated_norm": np.ones(4 if kind == "deltanet" else 8, np.float32)}
    if kind == "mamba2":
        good["skip"] = np.ones(2, np.float32)
    return _native.Mixer(**(good | changes))


VECTOR = np.zeros(3, np.float32)
BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "of no kind": ("conv", {"kind": 3}),
    "of a negative kind": ("conv", {"kind": -1}),
    "of another kind's projection": ("mamba2", {"kind": 0}),
    "without a decay": ("deltanet", {"decay": None}),
    "with too short a decay": ("mamba2", {"decay": VECTOR[:1]}),
    "with too long a bias": ("mamba2", {"step_bias": VECTOR}),
    "with D where nothing is skipped": ("deltanet", {"skip": VECTOR[:2]}),
    "without D": ("mamba2", {"skip": None}),
    "with a short norm": ("mamba2", {"gated_norm": np.ones(4, np.float32)}),
    "with a long norm": ("deltanet", {"gated_norm": np.ones(8, np.float32)}),
    "with heads in a convolution": ("conv", {"heads": 2}),
    "with a norm in a convolution": ("conv", {"gated_norm": VECTOR}),
    "with groups that do not divide": ("deltanet", {"groups": 3}),
    "with no groups": ("mamba2", {"groups": 0}),
    "with no rows": ("mamba2", {"rows": 0}),
    "with more rows than memory": ("deltanet", {"rows": 1 << 60}),
    "with more rows than memory in a convolution": ("conv", {"rows": 1 << 60}),
    "with more columns": ("deltanet", {"cols": 8}),
    "with other channels": ("deltanet", {"conv": normal(3, 4, 25)}),
    "with no convolution": ("conv", {"conv": normal(3, 0, 8)}),
    "with a long convolution": ("conv", {"conv": normal(3, 65, 8)}),
    "with a short bias of the convolution": ("mamba2", {"conv_bias": VECTOR}),
    "with a convolution in f64": ("conv", {"conv": np.zeros((4, 8))}),
    "with a narrow output": ("conv", {"out": _native.Linear(stored("f32", normal(2, 8, 7))[0], None)}),
    "with a short output": ("conv", {"out": _native.Linear(stored("f32", normal(2, 7, 8))[0], None)}),
    "with a norm of another width": ("conv", {"norm": _native.Norm(VECTOR, None, 1e-5, False)}),
    "without matrices": ("conv", {"proj": None}),
}


@pytest.mark.parametrize("what", BAD)
def test_a_mixer_that_does_not_fit_is_refused(what: str) -> None:
    kind, changes = BAD[what]
    a_mixer(kind)
    with pytest.raises((ValueError, TypeError)):
        a_mixer(kind, **changes)


@pytest.mark.parametrize("kind", ["deltanet", "mamba2", "conv"])
def test_a_mixer_says_how_large_its_state_is(kind: str) -> None:
    assert a_mixer(kind).state_floats == {"conv": 3 * 8}.get(kind, 3 * 24 + 2 * 4 * 4)
