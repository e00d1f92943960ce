"""Checksums of every neuron's bundle record and gate row, so that single ones can be read and checked.

A sidecar, `records.safetensors`, keeps them. One pass over weights.bin makes the file when a pack first needs
it. A file that is damaged or belongs to another pack is made again.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thermocline import _native
from thermocline.errors import BadFile, IOFailure
from thermocline.model.tensors import TensorInfo
from thermocline.pack import sidecar
from thermocline.pack.blocks import new_arena
from thermocline.pack.pack import Pack, verify

log = logging.getLogger(__name__)

U32 = NDArray[np.uint32]
Progress = Callable[[int, int], None]

FILE, KIND = "records.safetensors", "records"
VERIFIED, VERIFIED_KIND = "verified.safetensors", "verified"
WINDOW_BYTES = (
    64 << 20
)  # of weights.bin in memory at a time; with smaller windows the disk would idle between


@dataclass(frozen=True)
class NeuronChecksums:
    """CRC-32C of each neuron's rows with their padding (`stride` bytes): [n_experts * ffn_dim] by layer."""

    bundle: tuple[U32, ...]
    gate: tuple[U32, ...]


def open_checksums(pack: Pack, progress: Progress | None = None) -> NeuronChecksums:
    """Read the pack's checksums, or make them now. BadFile or IOFailure if weights.bin is damaged.

    A warning is logged if they could not be saved: the next run then makes them again.
    """
    try:
        found = _read(pack)
    except BadFile:
        found = None
    if found is None:
        found = _made(pack, progress)
        try:
            _keep(pack, found)
        except IOFailure as e:
            log.warning(f"{e}; the checksums of its neurons are made again next time")
    return found


def verify_once(pack: Pack, progress: Progress | None = None) -> None:
    """Check every block of weights.bin, unless that was done since it was written. Raises BadFile, IOFailure.

    For records that are no blocks and have no checksums of their own: experts.
    """
    again, path = "thermocline verify", pack.path / VERIFIED
    facts = {"bytes": pack.state[2], "written": pack.state[3]}
    try:
        found = sidecar.Sidecar.open(path, VERIFIED_KIND, sidecar.stamp(pack.path), again)
    except BadFile:
        found = None
    if found is not None:
        found.close()
        if {key: found.facts.get(key) for key in facts} == facts:
            return
    if problems := verify(pack, progress):
        raise BadFile(f"{problems[0]}; pack the model again")
    try:
        sidecar.replace(path, VERIFIED_KIND, sidecar.stamp(pack.path), facts, {}, [])
    except IOFailure as e:
        log.warning(f"{e}; the pack is verified again next time")


def _names(pack: Pack) -> list[str]:
    """Return the tensors with checksums: every layer's bundle, then every layer's gate."""
    layers = range(pack.spec.n_layers)
    return [*(f"layers.{i}.bundle" for i in layers), *(f"layers.{i}.gate.weight" for i in layers)]


def _of(pack: Pack, arrays: list[U32]) -> NeuronChecksums:
    return NeuronChecksums(tuple(arrays[: pack.spec.n_layers]), tuple(arrays[pack.spec.n_layers :]))


def _read(pack: Pack) -> NeuronChecksums | None:
    found = sidecar.Sidecar.open(pack.path / FILE, KIND, sidecar.stamp(pack.path), "thermocline run --ram")
    if found is None:
        return None
    shape = (pack.spec.n_experts * pack.spec.ffn_dim,)
    try:
        arrays = [found.read(name, "<u4", shape) for name in _names(pack)]
    finally:
        found.close()
    return _of(pack, arrays)


def _keep(pack: Pack, checksums: NeuronChecksums) -> None:
    arrays = [*checksums.bundle, *checksums.gate]
    shapes: sidecar.TensorShapes = {n: ("u4", a.shape) for n, a in zip(_names(pack), arrays, strict=True)}
    sidecar.replace(pack.path / FILE, KIND, sidecar.stamp(pack.path), {}, shapes, arrays)


def _made(pack: Pack, progress: Progress | None) -> NeuronChecksums:
    """Compute the checksums in the order of weights.bin. Every block is checked on the way."""
    by_place = sorted(_names(pack), key=lambda name: pack.tensors[name].offset)
    tensors = {name: pack.tensors[name] for name in by_place}
    size = sum(t.bytes for t in tensors.values())
    longest = max(t.bytes for t in tensors.values())
    arena = new_arena(min(WINDOW_BYTES, longest) + 2 * pack.block_bytes, "checksums")
    made: dict[str, U32] = {}
    done = 0
    for name, t in tensors.items():
        made[name] = np.empty(t.bytes // t.stride, np.uint32)
        for first, last in _windows(t):
            _checksum(pack, t, arena, first, made[name][first:last])
            done += (last - first) * t.stride
            if progress is not None:
                progress(done, size)
    return _of(pack, [made[name] for name in _names(pack)])


def _windows(t: TensorInfo) -> Iterator[tuple[int, int]]:
    rows, step = t.bytes // t.stride, max(1, WINDOW_BYTES // t.stride)
    return itertools.pairwise([*range(0, rows, step), rows])


def _checksum(pack: Pack, t: TensorInfo, arena: _native.Arena, first: int, out: U32) -> None:
    """Write the checksums of the rows from `first` on to `out`."""
    block, begin = pack.block_bytes, t.offset + first * t.stride
    from_, end = begin // block * block, begin + len(out) * t.stride
    pack.read_runs(arena, [(from_, min(pack.weights_bytes, -(-end // block) * block), 0)])
    arena.checksums(begin - from_, t.stride, out)
