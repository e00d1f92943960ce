"""The checkpoint of a profile, on disk beside the pack, from which an interrupted profile continues.

A checkpoint is a directory. `state.safetensors` holds the counts, the number of passages done, and the
number of bytes of samples that belong to them; it is replaced in one step. `samples.bin` only grows beyond
those bytes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from thermocline import _native
from thermocline.errors import BadFile, IOFailure, UsageError
from thermocline.files.bounded import Json, open_regular, read_at
from thermocline.model.spec import ModelSpec
from thermocline.offline.activity import Counted, Sampled
from thermocline.pack import sidecar
from thermocline.pack.activity_profile import BUCKETS, I64, Rows
from thermocline.pack.writer import lock

STATE, SAMPLES = "state.safetensors", "samples.bin"
_HEADER_BYTES = 24  # the header of a piece of samples.bin: layer, tokens, active neurons
_STEP_BYTES = 4 << 20


@dataclass(frozen=True)
class CheckpointState:
    """The state of a profile, replaced as a whole, so that a Ctrl-C never leaves half a passage."""

    done: int  # passages
    counts: I64  # [layers with an FFN, buckets, neurons]
    held: tuple[bytes, ...]  # samples that are not in the file yet
    saved_bytes: int  # bytes of the file that belong to the state
    saved_crc: int


class ProfileCheckpoint:
    """A profile's checkpoint, used by one process at a time.

    `made_for` holds the facts that a saved state must share, so that counting can continue from it. Raises
    IOFailure, and UsageError if another process uses the directory.
    """

    def __init__(self, directory: Path, spec: ModelSpec, pack: str, made_for: Json) -> None:
        self.directory, self._spec, self._pack, self._made_for = directory, spec, pack, made_for
        shape = (len(spec.ffn_layers), len(BUCKETS), spec.n_experts * spec.ffn_dim)
        self._at = CheckpointState(0, np.zeros(shape, np.int64), (), 0, 0)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise IOFailure(f"{directory}: cannot make a directory for the counts: {e.strerror}") from None
        try:
            self._lock = lock(directory)
        except OSError:
            raise UsageError(
                f"{directory}: another process is making this profile; wait for it, or use -o"
            ) from None
        try:
            self.replaced = not self._load()  # whether there was a checkpoint of something else
        except BaseException:
            self.close()
            raise

    @property
    def done(self) -> int:
        return self._at.done

    @property
    def counts(self) -> I64:
        return self._at.counts

    @property
    def held_bytes(self) -> int:
        return sum(map(len, self._at.held))

    def add(self, found: Counted, passages: int = 1) -> None:
        """Add the counts and samples of the next passage, or of several that were counted together."""
        at = self._at
        held = (*at.held, *map(_packed, found.samples))
        self._at = replace(at, done=at.done + passages, counts=at.counts + found.counts, held=held)

    def save(self) -> None:
        at = self._at
        data = b"".join(at.held)
        saved = replace(
            at, held=(), saved_bytes=at.saved_bytes + len(data), saved_crc=_native.crc32c(data, at.saved_crc)
        )
        try:
            (self.directory / SAMPLES).touch()
            with open(self.directory / SAMPLES, "r+b") as out:
                out.seek(at.saved_bytes)
                out.write(data)
            self._write_state(saved)
        except OSError as e:
            raise IOFailure(f"{self.directory}: cannot save the counts: {e.strerror or e}") from None
        self._at = saved

    def _write_state(self, at: CheckpointState) -> None:
        new = self.directory / f"{STATE}.tmp"
        facts = {**self._made_for, "done": at.done, "bytes": at.saved_bytes, "crc32c": at.saved_crc}
        shapes = {"counts": ("i8", at.counts.shape)}
        sidecar.write(new, "unfinished", self._pack, facts, shapes, [at.counts])
        os.replace(new, self.directory / STATE)

    def _load(self) -> bool:
        """Continue from a saved state. Return False if it is damaged, or of another pack, text or option."""
        try:
            found = sidecar.Sidecar.open(self.directory / STATE, "unfinished", self._pack, "")
            if found is None:
                return True
            try:
                f, counts = found.facts, found.read("counts", "<i8", self._at.counts.shape)
            finally:
                found.close()
            if any(f.get(key) != value for key, value in self._made_for.items()):
                return False
            if f["crc32c"] != self._checksum(f["bytes"]):
                return False
        except (BadFile, IOFailure):
            return False
        self._at = CheckpointState(f["done"], counts, (), f["bytes"], f["crc32c"])
        return True

    def _checksum(self, size: int) -> int:
        crc = 0
        for data in self._read(0, size):
            crc = _native.crc32c(data, crc)
        return crc

    def _read(self, begin: int, end: int) -> Iterator[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
        if begin == end:
            return
        path = self.directory / SAMPLES
        fd, _ = open_regular(path)
        try:
            for at in range(begin, end, _STEP_BYTES):
                yield read_at(fd, at, min(_STEP_BYTES, end - at), path)
        finally:
            os.close(fd)

    # -- samples by layer

    def active(self) -> list[int]:
        """Return the number of active neurons in all samples, by layer with an FFN."""
        found = [0] * len(self._spec.ffn_layers)
        for layer, _, nnz, _ in self._pieces():
            found[layer] += nnz
        return found

    def rows(self, places: Mapping[int, I64]) -> Iterator[Rows]:
        """Yield the samples of these layers, for a pack with its neurons at `places`.

        One layer is in memory.
        """
        pieces: list[list[tuple[int, int, int]]] = [[] for _ in self._spec.ffn_layers]
        for layer, tokens, nnz, at in self._pieces():
            pieces[layer].append((tokens, nnz, at))
        fd, _ = open_regular(self.directory / SAMPLES)
        try:
            for i, new in places.items():
                layer = self._spec.ffn_layers.index(i)
                read = [self._unpacked(fd, layer, *piece) for piece in pieces[layer]]
                yield _joined(read, new)
        finally:
            os.close(fd)

    def _pieces(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (layer, tokens, active neurons, byte of the data) of each piece, in the order of the file."""
        assert not self._at.held
        path, at = self.directory / SAMPLES, 0
        fd, _ = open_regular(path)
        try:
            while at < self._at.saved_bytes:
                layer, tokens, nnz = read_at(fd, at, _HEADER_BYTES, path).view(np.int64).tolist()
                yield layer, tokens, nnz, at + _HEADER_BYTES
                at += _HEADER_BYTES + self._size(tokens, nnz)
        finally:
            os.close(fd)

    def _size(self, tokens: int, nnz: int) -> int:
        return tokens * (2 * self._spec.dim + 8) + nnz * 6

    def _unpacked(self, fd: int, layer: int, tokens: int, nnz: int, at: int) -> Sampled:
        data = read_at(fd, at, self._size(tokens, nnz), self.directory / SAMPLES)
        ends = np.cumsum([2 * tokens * self._spec.dim, 8 * tokens, 4 * nnz])
        seen, sizes, index, mass = np.split(data, ends)
        shaped = seen.view(np.float16).reshape(tokens, -1)
        return Sampled(layer, shaped, sizes.view(np.int64), index.view(np.int32), mass.view(np.float16))

    def close(self) -> None:
        if self._lock is not None:  # Windows has none
            os.close(self._lock)

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


def _packed(s: Sampled) -> bytes:
    header = np.array([s.layer, len(s.sizes), len(s.index)], np.int64)
    return b"".join(a.tobytes() for a in (header, s.input, s.sizes, s.index, s.mass))


def _joined(pieces: Sequence[Sampled], places: I64) -> Rows:
    """Join the pieces of one layer's samples, with each neuron at its new position."""
    sizes = np.concatenate([p.sizes for p in pieces])
    now = np.empty_like(places)
    now[places] = np.arange(len(places))
    index = now[np.concatenate([p.index for p in pieces])]
    order = np.argsort(np.repeat(np.arange(len(sizes)), sizes) * len(places) + index)
    return (
        np.concatenate([p.input for p in pieces]),
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        index[order].astype(np.int32),
        np.concatenate([p.mass for p in pieces])[order],
    )
