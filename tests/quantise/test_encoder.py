"""The search: its bytes are worth what `quant` says they mean, and cost less than rounding's."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from thermocline import _native
from thermocline.errors import BadFile
from thermocline.model import quant
from thermocline.model.formats import FORMATS
from thermocline.model.mixes import NUMBERS
from thermocline.quantise import encoder
from thermocline.quantise.feedback import DAMPING, Feedback
from thermocline.quantise.moments import InputMoments

F32 = NDArray[np.float32]
SEARCHED = sorted(set(FORMATS) - set(NUMBERS))
COLUMNS = 512


def weights(rows: int = 19, seed: int = 0) -> F32:
    """With a row of zeros, one of a constant, and one with an outlier."""
    x = np.random.default_rng(seed).standard_t(5, (rows, COLUMNS)).astype(np.float32) * np.float32(0.02)
    x[3], x[4], x[5, 7] = 0, 0.01, 0.2
    return x


def importance(seed: int = 1) -> F32:
    return np.exp(np.random.default_rng(seed).standard_normal(COLUMNS)).astype(np.float32)


def cost(x: F32, rows: NDArray[np.uint8], format: str, w: F32) -> float:
    error = quant.decode(format, rows, x.shape[1]).astype(np.float64) - x
    return float((error**2 * w).sum())


@pytest.mark.parametrize("format", SEARCHED)
def test_the_search_costs_less_than_rounding(format: str) -> None:
    x, w = weights(), importance()
    searched, rounded = encoder.encode(format, x, w), quant.encode(format, x)
    share = 0.97 if format == "mxfp4" else 0.9  # whose scales are powers of two
    assert cost(x, searched, format, w) < share * cost(x, rounded, format, w)


@pytest.mark.parametrize("format", SEARCHED)
def test_columns_that_cost_more_get_smaller_errors(format: str) -> None:
    x, w = weights(), importance()
    with_w, without = encoder.encode(format, x, w), encoder.encode(format, x)
    assert cost(x, with_w, format, w) <= cost(x, without, format, w)
    assert cost(x, without, format, np.ones_like(w)) <= cost(x, with_w, format, np.ones_like(w))


@pytest.mark.parametrize("format", SEARCHED)
def test_every_instruction_set_finds_the_same_bytes(format: str) -> None:
    """Lanes are rows, sums have one order, and nothing is contracted; 19 rows fill no panel."""
    x, w = weights(), importance()
    u = feedback().upper(FORMATS[format].block)
    found = []
    for isa in _native.isa_levels():
        for threads in (1, 3):
            out = np.empty((len(x), quant.row_bytes(format, COLUMNS)), np.uint8)
            _native.quantise(format, x, out, importance=w, feedback=u, threads=threads, isa=isa)
            found.append(out)
    assert all(np.array_equal(found[0], other) for other in found)


@pytest.mark.parametrize("format", SEARCHED)
def test_a_row_does_not_depend_on_its_neighbours(format: str) -> None:
    x = weights()
    assert np.array_equal(encoder.encode(format, x)[7:9], encoder.encode(format, x[7:9]))


@pytest.mark.parametrize("format", SEARCHED)
def test_zeros_stay_zeros(format: str) -> None:
    zeros = np.zeros((2, COLUMNS), np.float32)
    assert not quant.decode(format, encoder.encode(format, zeros), COLUMNS).any()


def test_the_search_is_nearly_as_good_as_brute_force() -> None:
    """Of 4,000 scales for each block of q4_0, with the importance of its columns."""
    x, w = weights(40)[6:, :32], importance()[:32]
    found = quant.decode("q4_0", encoder.encode("q4_0", np.ascontiguousarray(x), w), 32)
    all_best = 0.0
    for row in x:
        scales = np.linspace(0.5, 1.6, 2000)[:, None] * np.abs(row).max() / 8
        scales = np.concatenate([scales, -scales]).astype(np.float16).astype(np.float64)
        tried = scales * np.clip(np.rint(row / scales), -8, 7)
        all_best += ((tried - row) ** 2 * w).sum(axis=1).min()
    assert ((found - x) ** 2 * w).sum() < 1.05 * all_best


def test_ternary_weights_come_back_as_they_were() -> None:
    x = np.random.default_rng(0).integers(-1, 2, (3, 256)).astype(np.float32) * np.float32(0.125)
    assert np.array_equal(quant.decode("tq2_0", encoder.encode("tq2_0", x), 256), x)


@pytest.mark.parametrize("format", ["f16", "bf16", "f32"])
def test_numbers_are_rounded(format: str) -> None:
    assert np.array_equal(encoder.encode(format, weights()), quant.encode(format, weights()))


# ---- errors that later columns even out


@cache
def inputs(rows: int = 1000) -> F32:
    """Inputs whose columns go together in groups."""
    rng = np.random.default_rng(2)
    mixed = rng.standard_normal((rows, 64)) @ rng.standard_normal((64, COLUMNS))
    x: F32 = (mixed + 0.3 * rng.standard_normal((rows, COLUMNS))).astype(np.float32)
    return x


@cache
def moments(window: int = 256) -> InputMoments:
    found = InputMoments.none(COLUMNS, window)
    for part in np.split(inputs(), 4):
        found.add(np.ascontiguousarray(part))
    return found


@cache
def feedback() -> Feedback:
    made = Feedback.of(moments())
    assert made is not None
    return made


def output_error(x: F32, rows: NDArray[np.uint8], format: str) -> float:
    error = quant.decode(format, rows, x.shape[1]) - x
    return float(np.square(inputs() @ error.T).sum())


@pytest.mark.parametrize("format", SEARCHED)
def test_feedback_makes_outputs_more_exact(format: str) -> None:
    x, m = weights(), moments()
    plain = encoder.encode(format, x, m.importance)
    evened = encoder.encode(format, x, m.importance, feedback())
    assert output_error(x, evened, format) < 0.7 * output_error(x, plain, format)


def test_feedback_is_the_closed_form() -> None:
    """Column by column in numpy, with the scales that were found: the same weights."""
    x, m = weights(6)[:3], moments()
    u = feedback().matrices[0].astype(np.float64)
    rows = encoder.encode("q8_0", x, m.importance, feedback())
    found = quant.decode("q8_0", rows, COLUMNS)[:, :256].astype(np.float64)
    left, worst = x[:, :256].astype(np.float64), 0.0
    for j in range(256):
        scale = np.abs(x).max() / 127
        worst = max(worst, float(np.abs(left[:, j] - found[:, j]).max() / scale))
        left[:, j + 1 :] -= ((left[:, j] - found[:, j]) / u[j, j])[:, None] * u[j, j + 1 :]
    assert worst < 3  # steps of the largest block, though errors of 255 columns were evened out


def test_rows_of_neurons_even_each_other_out() -> None:
    """As down in bundles: row i is multiplied with input i, and rows are summed up."""
    x = np.random.default_rng(3).standard_normal((COLUMNS, 64)).astype(np.float32)
    evened = encoder.encode_transposed("q4_0", x, feedback())
    plain = encoder.encode("q4_0", x)

    def wrong(rows: NDArray[np.uint8]) -> float:
        return float(np.square(inputs() @ (quant.decode("q4_0", rows, 64) - x)).sum())

    assert wrong(evened) < 0.7 * wrong(plain)


def test_u_is_the_factor_of_the_inverse() -> None:
    m, u = moments(), feedback().matrices[1].astype(np.float64)
    h = m.products[1].astype(np.float64)
    h[np.diag_indices(256)] += DAMPING * np.diag(h).mean()
    assert np.allclose(u.T @ u @ h, np.eye(256), atol=1e-3)
    assert not np.tril(u, -1).any()


def test_weights_that_are_not_finite_are_named() -> None:
    x = weights()
    x[9, 3] = np.inf
    with pytest.raises(BadFile, match=r"layers.0.gate.weight: row 109 has .*damaged"):
        encoder.check_finite(x, "layers.0.gate.weight", 100)


@pytest.mark.parametrize(
    ("format", "columns", "changes", "wrong"),
    [
        ("q9", 256, {}, "no search"),
        ("f16", 256, {}, "no search"),
        ("q4_k", 32, {}, "whole number of blocks"),
        ("q4_0", 256, {"importance": np.ones(3, np.float32)}, "importance"),
        ("q4_0", 256, {"feedback": np.ones((1, 64, 64), np.float32)}, "too few windows"),
        ("q4_k", 256, {"feedback": np.ones((8, 64, 64), np.float32)}, "window is no whole"),
    ],
)
def test_the_native_search_checks_shapes(
    format: str, columns: int, changes: dict[str, F32], wrong: str
) -> None:
    out = np.zeros((1, columns // 32 * 18), np.uint8)  # the same bytes in q4_0 and q4_k
    with pytest.raises(ValueError, match=wrong):
        _native.quantise(format, np.ones((1, columns), np.float32), out, **changes)
