"""More than a few tokens of a mixture on a device: each is multiplied by its own experts alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from gpu_cases import SIXTEEN, Kernels, multiply_rows_alike, normal, whole
from test_gpu_kernels import DEVICE, FORMATS, TABLES, kernels
from test_kernels import as_the_kernel_sees

from thermocline.model import activations
from thermocline.model.spec import ACTIVATIONS
from thermocline.ops import reference
from thermocline.ops.device_rows import DeviceRows, Scratch
from thermocline.ops.device_sizes import PAIRS, KernelSizes, pair_sizes, pair_tiles
from thermocline.ops.interface import F32
from thermocline.ops.kernels import torch_kernels

pytestmark = pytest.mark.oracle

__all__ = ["kernels"]  # fixture
Sizes = tuple[int, int, int, int]  # tokens, experts, active, neurons of an expert


@dataclass(frozen=True)
class Mixture:
    """Experts side by side, as they are stored and as that decodes."""

    gate: DeviceRows
    up: DeviceRows | None
    down: DeviceRows
    bundles: bool
    g: F32  # [experts * n, dim]
    u: F32
    d: F32  # [experts * dim, n], or with `bundles` [experts * n, dim]
    biases: tuple[F32 | None, F32 | None] = (None, None)
    activation: str = "silu"
    up_relu: bool = False
    scales_input: bool = False

    def expert(self, e: int, n: int, x: F32, share: F32) -> tuple[Any, ...]:
        """Gates, neurons, and neurons as `down` reads them, of an expert's tokens x."""
        which, scale = slice(e * n, (e + 1) * n), share if self.scales_input else np.float32(1)
        x = met_by_pairs(self.gate.format, x)
        bias, up_bias = (None if b is None else b[which] for b in self.biases)
        gates = activations.activate(
            reference.matmul(self.g[which], x, bias) * scale, self.activation, 0.5, 1.7
        )
        h = gates
        if self.up is not None:
            u = reference.matmul(self.u[which], x, up_bias) * scale
            factor = activations.up_factor(u, self.activation, 0.5, False)
            h = gates * (np.maximum(u, 0) if self.up_relu else factor)
        return gates, h, h if self.scales_input else h * share

    def answers(self, e: int, h: F32, dim: int) -> F32:
        n = h.shape[1]
        if self.bundles:
            return h @ self.d[e * n : (e + 1) * n]
        return met_by_pairs(self.down.format, h) @ self.d[e * dim : (e + 1) * dim].T

    def run(self, kernels: Kernels, x: F32, shares: F32, active: int, y: torch.Tensor, add: bool) -> Any:
        """Return h and the counts. y (+)= the answers. Scratch is no larger than it has to be."""
        (tokens, dim), experts = x.shape, shares.shape[1]
        n = self.gate.rows // experts
        sizes = KernelSizes(tokens, dim, n, 0, 0, 0, experts=max(2, experts), active=active)
        scratch = Scratch.of(sizes, kernels.device)
        scratch.floats.view(torch.int32).fill_(-1)  # NaNs, and as marks all bits
        h, counts = kernels.filled(tokens * active, n), kernels.put(np.zeros(4, np.int32))
        wide = np.pad(shares, ((0, 0), (0, 3)), constant_values=np.nan)  # of all experts, on several devices
        chosen = kernels.put(wide)[:, :experts], active
        bias, up_bias = (kernels.some(b) for b in self.biases)
        what = self.gate, bias, self.up, kernels.put(x), self.activation, 0.5, self.up_relu, *chosen, counts
        kernels.ops.gate_up_pairs(h, *what, scratch, up_bias, 1.7, self.scales_input)
        kernels.ops.down_pairs(y, self.down, self.bundles, h, *chosen, add, scratch)
        return h, counts


def met_by_pairs(format: str, x: F32) -> F32:
    """Pairs are many tokens, however many they are."""
    return x if format in SIXTEEN else as_the_kernel_sees(format, x)


def mixture(
    kernels: Kernels, format: str, sizes: Sizes, dim: int, *, bundles: bool = False, **how: Any
) -> Mixture:
    """Rows have bytes before or behind them, as in bundles."""
    _, experts, _, n = sizes
    (gate, g), (up, u) = (kernels.rows(format, normal(i, experts * n, dim), pad=8) for i in (1, 2))
    shape = (experts * n, dim) if bundles else (experts * dim, n)
    down, d = kernels.rows(format, normal(3, *shape), skip=8)
    return Mixture(gate, up, down, bundles, g, u, d, **how)


def chosen(sizes: Sizes, dim: int) -> tuple[F32, F32]:
    """Tokens, and the shares of their experts. To the second expert nobody goes."""
    tokens, experts, active, _ = sizes
    x = normal(4, tokens, dim) / np.float32(dim**0.5)
    logits = normal(5, tokens, experts) - (np.arange(experts) == 1) * np.float32(99)
    return x, activations.route(logits, active)


def pairs_case(kernels: Kernels, m: Mixture, x: F32, shares: F32, active: int, add: bool = False) -> None:
    """Against the reference, expert after expert; counts too, where sums are close enough."""
    n, dim = m.gate.rows // shares.shape[1], x.shape[1]
    there = normal(8, len(x), dim)
    want = there.copy() if add else np.zeros_like(there)
    y = kernels.put(there) if add else kernels.filled(len(x), dim)
    h, counts = m.run(kernels, x, shares, active, y, add)
    found, end = h.cpu().numpy(), 0  # whose rounding to int8 `down` is held to
    read, counted = [], np.zeros(4, np.int64)
    for e in range(shares.shape[1]):
        mine = shares[:, e] != 0
        if not mine.any():
            continue
        gates, neurons, as_read = m.expert(e, n, x[mine], shares[mine, e : e + 1])
        first, end = end, end + len(as_read)
        want[mine] += m.answers(e, found[first:end], dim)
        read.append(as_read)
        open = (gates != 0).any(axis=0).sum()
        counted += (neurons != 0).sum(), open, n, (neurons != 0).any(axis=0).sum()
    pairs = np.concatenate(read)
    kernels.check(h[: len(pairs)], pairs)
    kernels.check(y, want)
    assert counts.tolist()[2] == counted[2]
    slack = 0 if kernels.nmse < 1e-9 else 1 + pairs.size // 1000  # tensor cores round gates near 0
    assert np.abs(np.array(counts.tolist()) - counted).max() <= slack


SLOW = ("f32", "q4_0", "mxfp4")  # interpreted with 40 tokens, and as bundles; the others with 17


@pytest.mark.parametrize(
    "kernels, format, tokens, bundles",
    [
        (table, format, tokens, bundles)
        for table, format, tokens, bundles in product(TABLES, FORMATS, (17, 40, 300), (False, True))
        if table == "torch"
        or DEVICE == "cuda"
        or (tokens < 300 and format in SLOW)
        or (tokens == 17 and not bundles)
    ],
    indirect=["kernels"],
)
def test_experts_as_the_reference_has_them(kernels: Kernels, format: str, tokens: int, bundles: bool) -> None:
    experts = 4 if tokens < 40 else 7
    sizes = tokens, experts, 2, 20 if bundles else whole(format, 20)
    dim = whole(format, 40)
    m = mixture(kernels, format, sizes, dim, bundles=bundles)
    pairs_case(kernels, m, *chosen(sizes, dim), 2, add=tokens > 17)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_experts_of_every_activation(kernels: Kernels, activation: str) -> None:
    """swiglu_oai as gpt-oss has it: with biases of gate and up."""
    sizes = 20, 3, 2, 9
    m = mixture(kernels, "f16", sizes, 40, activation=activation, bundles=activation == "fatrelu")
    if activation == "swiglu_oai":
        m = replace(m, biases=(normal(6, 27), normal(7, 27)))
    for each in m, replace(m, up=None, biases=(m.biases[0], None)), replace(m, up_relu=activation == "relu"):
        pairs_case(kernels, each, *chosen(sizes, 40), 2)


def test_shares_that_scale_an_experts_input(kernels: Kernels) -> None:
    """Llama 4."""
    sizes = 20, 3, 1, 9
    pairs_case(kernels, mixture(kernels, "f32", sizes, 40, scales_input=True), *chosen(sizes, 40), 1)


def test_gate_and_up_may_differ_in_format(kernels: Kernels) -> None:
    sizes = 20, 3, 2, 32
    m = mixture(kernels, "q4_0", sizes, 64)
    up, u = kernels.rows("q8_0", normal(9, 96, 64))
    pairs_case(kernels, replace(m, up=up, u=u), *chosen(sizes, 64), 2)


@pytest.mark.parametrize("tokens", [PAIRS, 2 * PAIRS, 2 * PAIRS + 1])
def test_all_tokens_may_go_to_one_expert(kernels: Kernels, tokens: int) -> None:
    sizes = tokens, 5, 1, 9
    x, shares = normal(4, tokens, 40), np.zeros((tokens, 5), np.float32)
    shares[:, 3] = 0.5
    pairs_case(kernels, mixture(kernels, "f32", sizes, 40), x, shares, 1, add=True)


def test_tokens_may_go_to_fewer_experts_than_they_could_or_to_none(kernels: Kernels) -> None:
    """On a device that has some of the experts."""
    sizes = 40, 5, 3, 9
    x, shares = chosen(sizes, 40)
    shares[:, 3:], shares[7] = 0, 0
    m = mixture(kernels, "f32", sizes, 40)
    for add in False, True:
        pairs_case(kernels, m, x, shares, 3, add)
    there, y = kernels.put(x), kernels.put(x)
    _, counts = m.run(kernels, x, 0 * shares, 3, y, True)
    assert torch.equal(y, there) and counts.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("bundles", [False, True])
def test_experts_that_no_token_goes_to_are_not_read(kernels: Kernels, bundles: bool) -> None:
    """Here they are NaN."""
    sizes = 20, 3, 2, 9
    m = mixture(kernels, "f32", sizes, 40, bundles=bundles)
    for rows in (m.gate, m.up, m.down):
        assert rows is not None
        rows.part(1, 3).data.fill_(0xFF)
    pairs_case(kernels, m, *chosen(sizes, 40), 2)


def test_a_token_that_is_no_number_shows_in_its_own_answer_alone(kernels: Kernels) -> None:
    sizes = 40, 3, 2, 32
    m, (x, shares) = mixture(kernels, "q8_0", sizes, 64), chosen(sizes, 64)
    x[11], shares[20, np.flatnonzero(shares[20])[0]] = np.nan, np.nan
    y = kernels.filled(40, 64)
    m.run(kernels, x, shares, 2, y, False)
    broken = np.isnan(y.cpu().numpy())
    assert broken[[11, 20]].all() and not np.delete(broken, [11, 20], axis=0).any()


@pytest.mark.parametrize("format, bundles", [("q4_0", False), ("f16", True)])
def test_a_tokens_bits_do_not_depend_on_its_company(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, format: str, bundles: bool
) -> None:
    """Nor on its place in a tile: one of 70 tokens; and of 20, whose others go to one of its experts."""
    if kernels.ops is torch_kernels:
        pytest.skip("torch's products have orders of their own")
    multiply_rows_alike(kernels, monkeypatch)
    sizes = 70, 3, 2, 32
    m, (x, shares) = mixture(kernels, format, sizes, 96, bundles=bundles), chosen(sizes, 96)
    y = kernels.filled(70, 96)
    m.run(kernels, x, shares, 2, y, False)
    for token, at in (0, 0), (33, 19), (69, 5):
        others, theirs = normal(9, 20, 96), np.zeros((20, 3), np.float32)
        theirs[:, np.flatnonzero(shares[token])[0]] = 1
        others[at], theirs[at] = x[token], shares[token]
        alone = kernels.filled(20, 96)
        m.run(kernels, others, theirs, 2, alone, False)
        assert torch.equal(alone[at], y[token])


def test_answers_are_added_in_the_order_of_experts(kernels: Kernels) -> None:
    """2**30 + 1 - 2**30 is 0 in f32, and 1 in another order."""
    (gate, g), x = kernels.rows("f32", np.ones((3, 4), np.float32)), np.full((17, 4), 0.25, np.float32)
    for answers, want in ((2.0**30, 1, -(2.0**30)), 0), ((2.0**30, -(2.0**30), 1), 1):
        down, d = kernels.rows("f32", np.repeat(np.array(answers, np.float32), 4)[:, None])
        y = kernels.filled(17, 4)
        m = Mixture(gate, None, down, False, g, g, d, activation="relu")
        m.run(kernels, x, np.ones((17, 3), np.float32), 3, y, False)
        assert (y == want).all()


def test_there_are_as_many_tiles_as_pairs_may_need() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        tokens, experts = int(rng.integers(17, 400)), int(rng.integers(1, 65))
        active = int(rng.integers(1, min(experts, 8) + 1))
        skew = rng.random(experts) ** rng.integers(1, 30)
        going = (skew * rng.random((tokens, experts))).argsort(axis=1)[:, -active:]
        counts = np.bincount(going.ravel(), minlength=experts)
        assert (-(-counts // PAIRS)).sum() <= pair_tiles(tokens, experts, active)
    assert pair_tiles(512, 128, 8) == 128 + 128 and pair_sizes(17, 4, 2, 36) == [34, 34, 15, 36]
