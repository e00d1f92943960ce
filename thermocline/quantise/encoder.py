"""Encode rows of weights by searching for the bytes with the least error (csrc/quantise).

`model.quant` says what the bytes mean; its encoders round to the nearest with scales of the extremes. Here
scales, minima and quants are chosen for each other. With an importance, the error of a column costs that
much. With feedback, errors are evened out by later columns that take part in the same sums.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thermocline import _native
from thermocline.errors import BadFile
from thermocline.model import quant
from thermocline.model.formats import FORMATS
from thermocline.model.mixes import NUMBERS
from thermocline.quantise.feedback import Feedback

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


def encode(
    format: str,
    x: F32,
    importance: F32 | None = None,
    feedback: Feedback | None = None,
    *,
    threads: int = 1,
) -> U8:
    """Return weights [rows, n] as rows of bytes, [rows, row_bytes]. They have to be finite."""
    if format in NUMBERS:
        return quant.encode(format, x)
    out = np.empty((len(x), quant.row_bytes(format, x.shape[1])), np.uint8)
    x = np.ascontiguousarray(x, np.float32)
    upper = None if feedback is None else feedback.upper(FORMATS[format].block)
    _native.quantise(format, x, out, importance=importance, feedback=upper, threads=threads)
    return out


def encode_transposed(format: str, x: F32, feedback: Feedback, *, threads: int = 1) -> U8:
    """Encode rows that are summed up, each times its input (a down projection's neurons).

    Errors of a group of rows are evened out by the rows behind it. All rows of the matrix are needed.
    """
    out = np.empty((len(x), quant.row_bytes(format, x.shape[1])), np.uint8)
    for begin, u in feedback.windows():
        left = x[begin : begin + len(u)].astype(np.float32)
        for at in range(0, len(u), GROUP):
            end = min(at + GROUP, len(u))
            rows = encode(format, left[at:end], threads=threads)
            out[begin + at : begin + end] = rows
            error = left[at:end] - quant.decode(format, rows, x.shape[1])
            # error = (U of the group)' e: what each row leaves behind once the ones before it are evened out
            e = np.linalg.solve(u[at:end, at:end].T, error).astype(np.float32)
            left[end:] -= u[at:end, end:].T @ e
    return out


GROUP = 32  # rows that are searched together


def check_finite(x: F32, name: str, first: int) -> None:
    """Raise BadFile if a weight of rows [first, ...) is NaN or infinite."""
    with np.errstate(all="ignore"):
        bad = ~np.isfinite(x.sum(axis=1, dtype=np.float64))
    if bad.any():
        raise BadFile(
            f"{name}: row {first + int(bad.argmax())} has weights that are NaN or infinite: damaged"
        )
