"""Blocks of weights.bin, the units of its checksums: which of them a load reads, and how they are checked."""

from __future__ import annotations

import os

from thermocline import _native
from thermocline.errors import BadFile, IOFailure, OutOfBudget, ThermoclineError
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import Predictors


def new_arena(size: int, what: str) -> _native.Arena:
    """Allocate `size` bytes for `what`. Raises OutOfBudget."""
    try:
        return _native.Arena(size)
    except MemoryError:
        raise OutOfBudget(f"the system has no {size / 2**30:.1f} GiB of memory for {what}") from None


def memory_bytes(pack: Pack, predictors: Predictors | None = None) -> int:
    """Return the bytes that `load` keeps in memory."""
    weights = sum(end - begin for begin, end in block_ranges(pack))
    return weights + (0 if predictors is None else predictors.nbytes)


def block_ranges(pack: Pack) -> list[tuple[int, int]]:
    """Return the ranges [begin, end) of weights.bin that a load reads, in whole blocks.

    Blocks that hold only predictors are left out.
    """
    block, out = pack.block_bytes, list[tuple[int, int]]()
    wanted = ((t.offset, t.offset + t.bytes) for n, t in pack.tensors.items() if ".predictor." not in n)
    for begin, end in sorted(wanted):
        begin, end = begin // block * block, min(pack.weights_bytes, -(-end // block) * block)
        if out and begin <= out[-1][1]:
            begin = out.pop()[0]
        out.append((begin, end))
    return out


def read_blocks(arena: _native.Arena, pack: Pack, begin: int, end: int, to: int) -> None:
    """Read whole blocks of weights.bin to byte `to` of the arena, checked. Raises BadFile or IOFailure."""
    error, block = arena.load(str(pack.weights_path), begin, end, pack.checksums, pack.block_bytes, to)
    if block >= 0:
        raise block_error(pack, error, block)


def block_error(pack: Pack, error: int, block: int) -> ThermoclineError:
    """Return the error for a block. `error` is an errno, -1 for an early end, 0 for a wrong checksum."""
    at = block * pack.block_bytes
    where = f"byte {at} ({_tensor_at(pack, at)})"
    if error:
        why = "ends early" if error < 0 else os.strerror(error)
        return IOFailure(f"{pack.weights_path}: {why} at {where}")
    return BadFile(f"{pack.weights_path}: checksum mismatch at {where}; the file is damaged: pack it again")


def _tensor_at(pack: Pack, offset: int) -> str:
    end = offset + pack.block_bytes
    inside = [n for n, t in pack.tensors.items() if t.offset < end and offset < t.offset + t.bytes]
    return inside[0] if inside else "padding"
