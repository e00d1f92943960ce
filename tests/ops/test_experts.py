"""Experts as plain matrices, all of a call's at once, and the FFN that every token takes beside them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from test_kernels import (
    F32_NMSE,
    FFN_PAIRS,
    ISAS,
    SPEC,
    cpu,
    in_arena,
    nmse,
    normal,
    same_bits,
    stored_bundle,
    whole,
)

from thermocline import _native
from thermocline.model import quant
from thermocline.model.spec import PLAIN_ROUTER, ModelSpec
from thermocline.ops import reference
from thermocline.ops.cpu import CpuOps
from thermocline.ops.interface import F32, FFN, FFNStats, Layer, Linear, Norm

EXPERTS, ACTIVE = 12, 3
PLAIN = _native.Join(None, 1.0)
Both = tuple[_native.Matrix, F32]


@cache
def matrix(isa: str, format: str, seed: int, rows: int, cols: int) -> Both:
    """Rows in groups where this instruction set multiplies them so, and their values."""
    data = quant.encode(format, normal(seed, rows, cols) / np.float32(cols**0.5))
    arena, offset = in_arena(data)
    made = _native.Matrix(arena, offset, quant.FORMATS[format].id, rows, cols, data.shape[1])
    native = cpu(isa).native
    if native.interleaves(made):
        made = native.interleaved(arena, made)
    return made, quant.decode(format, data, cols)


class Formats(NamedTuple):
    gate: str
    up: str
    down: str


def ffn(isa: str, formats: Formats, seed: int, neurons: int, dim: int, *, gated: bool) -> tuple[FFN, FFN]:
    """One native FFN, and one of values."""
    gate = matrix(isa, formats.gate, seed, neurons, dim)
    up = matrix(isa, formats.up, seed + 1, neurons, dim) if gated else (None, None)
    down = matrix(isa, formats.down, seed + 2, dim, neurons)
    bias, after = normal(seed + 3, neurons), normal(seed + 4, dim)
    native = FFN.whole(Linear(gate[0], bias), up[0], down[0], after, False)
    return native, FFN.whole(Linear(gate[1], bias), up[1], down[1], after, False)


def in_bundles(seed: int, neurons: int, dim: int, *, gated: bool) -> tuple[FFN, FFN]:
    gate, values = matrix(ISAS[0], "f32", seed, neurons, dim)
    wanted = normal(seed + 1, neurons, dim) if gated else None
    up, down, up_values, down_values = stored_bundle("f32", wanted, normal(seed + 2, neurons, dim))
    native = FFN.whole(Linear(gate, None), up, down, None, True)
    return native, FFN.whole(Linear(values, None), up_values, down_values, None, True)


class Mix:
    """A layer of experts, perhaps with a shared FFN that is wider: natively and as values."""

    def __init__(
        self,
        isa: str,
        formats: Formats,
        *,
        shared: Formats | None = None,
        shared_gate: bool = False,
        bundles: bool = False,
        gated: bool = True,
    ) -> None:
        widest = max(quant.FORMATS[f].block for f in (*formats, *(shared or ())))
        self.dim, self.isa = whole("q4_k" if widest == 256 else "q4_0", 64), isa
        neurons = whole("q4_k" if widest == 256 else "q4_0", 96)
        self.spec: ModelSpec = replace(
            SPEC, dim=self.dim, ffn_dim=neurons, n_experts=EXPERTS, n_experts_active=ACTIVE, gated=gated,
            activation="relu" if bundles else "silu", residual_scale=0.5, shared_gate=shared_gate,
        )  # fmt: skip
        router = matrix(isa, "f32", 7, EXPERTS, self.dim)
        gate = matrix(isa, "f32", 8, 1, self.dim) if shared_gate else (None, None)
        made = [
            in_bundles(100 * e, neurons, self.dim, gated=gated)
            if bundles
            else ffn(isa, formats, 100 * e, neurons, self.dim, gated=gated)
            for e in range(EXPERTS)
        ]
        every = ffn(isa, shared, 9000, 2 * neurons, self.dim, gated=gated) if shared else (None, None)
        norm = Norm(1 + normal(12, self.dim) / np.float32(8), None)
        unused: Any = None

        def layer(i: int) -> Layer:
            by = Linear(router[i], None)
            experts = tuple(x[i] for x in made)
            return Layer(
                unused, unused, unused, norm, experts, router=by, shared=every[i], shared_router=gate[i]
            )

        self.native, self.values = layer(0), layer(1)

    def run(self, ops: Any, x: F32, h: F32) -> tuple[F32, FFNStats]:
        y, stats = x.copy(), FFNStats()
        bound = ops.bind_ffn(self.spec, self.values if ops is reference else self.native)
        ops.ffn_add(y, h, bound, "exact", stats)
        return y, stats

    def one_by_one(self, x: F32, h: F32) -> F32:
        """What `run` gives, from every expert alone: their sum in ascending order."""
        ops, norm = cpu(self.isa), self.native.ffn_norm
        assert norm is not None and self.native.router is not None
        seen = ops.norm(h, norm.weight, None, self.spec.norm_eps, "rms")
        logits = ops.matmul(self.native.router.weight, seen, None)
        weights = np.empty_like(logits)
        ops.bind_ffn(self.spec, self.native).route(logits, weights)  # type: ignore[union-attr]
        y = np.zeros_like(h)
        alone = [(f, weights[:, e]) for e, f in enumerate(self.native.experts)]
        if self.native.shared is not None:
            alone.append((self.native.shared, np.ones(len(h), np.float32)))
        for f, share in alone:
            for t in np.flatnonzero(share):
                out = np.zeros((1, self.dim), np.float32)
                ops.native.ffn_add(out, seen[t : t + 1], ops.bind_part(self.spec, f), 1)
                y[t] += share[t] * out[0]
        return x + np.float32(0.5) * y


def tokens(mix: Mix, n: int) -> tuple[F32, F32]:
    return normal(5, n, mix.dim), normal(6, n, mix.dim)


MIXED = {
    "a float beside blocks": (Formats("f16", "q8_0", "q4_0"), None),
    "blocks, down in floats": (Formats("q4_0", "q4_0", "bf16"), None),
    "K formats": (Formats("q4_k", "q6_k", "q2_k"), Formats("q8_0", "f32", "q6_k")),
    "a shared one in floats": (Formats("q4_0", "q5_1", "q8_0"), Formats("f32", "f32", "f32")),
}


@pytest.mark.parametrize(("isa", "format"), FFN_PAIRS)
def test_a_mixture_is_the_weighted_sum_of_its_experts_to_the_bit(isa: str, format: str) -> None:
    """Groups of up to 4 tokens, of more, and of more than rows in groups are multiplied with, in one call."""
    mix = Mix(isa, Formats(format, format, format), shared=Formats(format, format, format))
    x, h = tokens(mix, 170)
    y = mix.run(cpu(isa, 2), x, h)[0]
    assert same_bits(y[:40], mix.one_by_one(x, h)[:40])
    for cut in (1, 4, 21):
        parts = [mix.run(cpu(isa, 3), x[at], h[at])[0] for at in (slice(0, cut), slice(cut, 40))]
        assert same_bits(np.concatenate(parts), y[:40]), cut


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", MIXED)
def test_each_matrix_has_its_own_format(case: str, isa: str) -> None:
    formats, shared = MIXED[case]
    mix = Mix(isa, formats, shared=shared)
    x, h = tokens(mix, 30)
    wanted = mix.one_by_one(x, h)
    for n in (1, 3, 30):
        assert same_bits(mix.run(cpu(isa, 2), x[:n], h[:n])[0], wanted[:n]), n


@pytest.mark.parametrize("bundles", (False, True))
@pytest.mark.parametrize("gated", (False, True))
@pytest.mark.parametrize("shared_gate", (False, True))
def test_a_shared_ffn_joins_what_the_experts_give(bundles: bool, gated: bool, shared_gate: bool) -> None:
    same = Formats("f32", "f32", "f32")
    mix = Mix(ISAS[0], same, shared=same, shared_gate=shared_gate, bundles=bundles, gated=gated)
    without = Mix(ISAS[0], same, bundles=bundles, gated=gated)
    for n in (1, 3, 40, 300):
        x, h = tokens(mix, n)
        (y, stats), (wanted, truth) = mix.run(cpu(ISAS[0], 2), x, h), mix.run(reference, x, h)
        assert nmse(y - x, wanted - x) <= 10 * F32_NMSE
        apart = without.run(cpu(ISAS[0]), x, h)
        assert not same_bits(y, apart[0]) and stats == apart[1]  # what every token reads is not counted
        if bundles and n <= 256:  # a pass: an expert is read in each
            assert stats == truth


def test_a_call_of_other_sizes_finds_its_scratch() -> None:
    """One context, whose scratch is another call's."""
    q4 = Formats("q4_0", "q4_0", "q4_0")
    small, wide = Mix(ISAS[0], q4), Mix(ISAS[0], Formats("q4_k", "q4_k", "q6_k"), shared=q4)
    ops = CpuOps(2, ISAS[0])
    for mix, n in ((small, 1), (wide, 64), (small, 170), (wide, 2), (small, 3), (wide, 1)):
        x, h = tokens(mix, n)
        assert same_bits(mix.run(ops, x, h)[0], mix.run(cpu(ISAS[0]), x, h)[0])
    assert small.spec.router == PLAIN_ROUTER
