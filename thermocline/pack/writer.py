"""Write pack directories: tensors are streamed from a source, and a pack appears whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from thermocline import _native
from thermocline.errors import IOFailure, Unsupported, UsageError
from thermocline.files.whole import alive
from thermocline.model import quant
from thermocline.model.spec import ModelSpec, check_spec
from thermocline.model.tensors import TensorInfo, TensorSpec, expected_tensors, place
from thermocline.pack.manifest import BLOCK_BYTES, Manifest, Predictor, ranks_of, render_manifest
from thermocline.pack.pack import Progress

if sys.platform != "win32":
    import fcntl

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

# f32 bytes encoded and written at a time. Buffers of this size stay in the heap. Buffers of 4 MiB are mapped,
# zeroed and unmapped each time, which takes a third of the time of making random rows.
_ROWS_BYTES = 1 << 19


class TensorSource(Protocol):
    """A function that returns rows [first, last) of a tensor, as f32 [last - first, columns].

    Names are those of docs/internals/pack.md, except that `layers.I.bundle` is read as `layers.I.up` (if
    gated) and `layers.I.down`, one row per neuron. Rows run through all experts. A vector (norm, bias, order)
    is read whole, one value per row: [last - first].
    """

    def __call__(self, name: str, first: int, last: int, /) -> NDArray[Any]: ...


@runtime_checkable
class EncodedSource(TensorSource, Protocol):
    """A source that can also return rows as they are stored: bytes [last - first, row bytes].

    Only matrices are read this way. None means that the source does not have them in this format; they are
    then read as f32.
    """

    def encoded(self, name: str, format: str, first: int, last: int, /) -> U8 | None: ...


@dataclass(frozen=True)
class PackExtras:
    """The parts of a pack that its spec and its weight format do not imply.

    formats    formats of the matrices that have their own, as `expected_tensors` takes them
    predictor  facts about the model's own predictors, if it has them
    optional   the optional tensors (biases, order) that the source has
    files      contents of the `COPIED` files, by name
    origin     kind, name and hash of the source, for the manifest
    """

    formats: Mapping[str, str] = field(default_factory=dict)
    predictor: Predictor | None = None
    optional: Collection[str] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    origin: tuple[str, str, str] = ("memory", "", "")


def write_pack(
    dst: str | os.PathLike[str],
    spec: ModelSpec,
    weight_format: str,
    source: TensorSource | EncodedSource,
    extras: PackExtras = PackExtras(),
    *,
    overwrite: bool = False,
    finish: Callable[[Path], None] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a pack by streaming, in a few times `_ROWS_BYTES` of memory besides the memory of `source`.

    `finish` may add sidecars to the finished directory before it is renamed. Whatever happens, `dst` is
    afterwards the old pack, the complete new one, or absent. Raises Unsupported, UsageError (`dst` exists) or
    IOFailure (disk full, ...).
    """
    check_spec(spec, "spec")
    predictor, files = extras.predictor, extras.files
    tensor_specs = expected_tensors(spec, weight_format, extras.formats, *ranks_of(predictor))
    unknown = set(extras.optional) - {n for n, t in tensor_specs.items() if t.optional}
    if unknown:
        raise ValueError(f"not optional tensors of this model: {sorted(unknown)}")
    tensor_specs = {n: t for n, t in tensor_specs.items() if not t.optional or n in extras.optional}
    tensors, weights_bytes = place(tensor_specs)
    with _replacing(Path(dst), weights_bytes + sum(map(len, files.values())), overwrite) as tmp:
        checksums = _write_weights(
            tmp / "weights.bin", tensor_specs, tensors, weights_bytes, source, progress
        )
        manifest = Manifest(
            spec=spec,
            weight_format=weight_format,
            tensors=tensors,
            block_bytes=BLOCK_BYTES,
            weights_bytes=weights_bytes,
            checksums_crc32c=_native.crc32c(checksums),
            source=dict(zip(("kind", "name", "hash"), extras.origin, strict=True)),
            files={name: _native.crc32c(data) for name, data in files.items()},
            predictor=predictor,
        )
        for name, data in {
            **files,
            "checksums.bin": checksums,
            "pack.json": render_manifest(manifest),
        }.items():
            with _Output(tmp / name) as out:
                out.append(data)
        if finish is not None:
            finish(tmp)


def _write_weights(
    path: Path,
    tensor_specs: Mapping[str, TensorSpec],
    tensors: Mapping[str, TensorInfo],
    weights_bytes: int,
    source: TensorSource,
    progress: Progress | None,
) -> bytes:
    """Write weights.bin. Return the bytes of checksums.bin."""
    with _Output(path) as out:
        for name, tensor_spec in tensor_specs.items():
            out.append(bytes(tensors[name].offset - out.size))
            for rows in encoded_rows(tensor_spec, source):
                out.append(rows)
                if progress:
                    progress(out.size, weights_bytes)
        out.append(bytes(weights_bytes - out.size))
        if progress:
            progress(out.size, weights_bytes)
        return out.checksums()


def encoded_rows(tensor_spec: TensorSpec, source: TensorSource) -> Iterator[U8]:
    """Yield a tensor's bytes [rows * stride], a few rows at a time."""
    if tensor_spec.vector:
        yield stored_vector(tensor_spec, source)
        return
    step = max(1, _ROWS_BYTES // (4 * tensor_spec.columns * len(tensor_spec.parts)))
    for first in range(0, tensor_spec.rows, step):
        yield stored_rows(tensor_spec, source, first, min(tensor_spec.rows, first + step)).reshape(-1)


def stored_vector(tensor_spec: TensorSpec, source: TensorSource) -> U8:
    """Return the bytes of a vector as a pack has them."""
    n = tensor_spec.rows * tensor_spec.columns
    values = np.asarray(source(tensor_spec.parts[0], 0, n)).reshape(n)
    return values.astype("<i4" if tensor_spec.format == "i32" else "<f4").view(np.uint8)


def stored_rows(tensor_spec: TensorSpec, source: TensorSource, first: int, last: int) -> U8:
    """Return rows [first, last) of a matrix as a pack has them, [last - first, stride]."""
    out = np.zeros((last - first, tensor_spec.stride), np.uint8)
    at = range(tensor_spec.first + first, tensor_spec.first + last)
    for name, part in zip(tensor_spec.parts, tensor_spec.layout, strict=True):
        rows = _rows(name, part.format, tensor_spec.columns, at, source)
        out[:, part.at : part.at + rows.shape[1]] = rows
    return out


def _rows(name: str, format: str, columns: int, at: range, source: TensorSource | EncodedSource) -> U8:
    if isinstance(source, EncodedSource):
        rows = source.encoded(name, format, at.start, at.stop)
        if rows is not None:
            _check_shape(name, rows, len(at), quant.row_bytes(format, columns))
            return rows
    x = source(name, at.start, at.stop)
    _check_shape(name, x, len(at), columns)
    check_range(x, format, name)
    return quant.encode(format, x)


def _check_shape(name: str, x: NDArray[Any], rows: int, columns: int) -> None:
    if x.shape != (rows, columns):
        raise ValueError(f"{name}: source gave {x.shape}, wanted {(rows, columns)}")


def check_range(x: F32, format: str, name: str) -> None:
    """Raise Unsupported if a finite weight would become infinite in this format."""
    limit = quant.FORMATS[format].largest
    if math.isinf(limit) or x.size == 0:
        return
    peak = max(float(x.max()), -float(x.min()))
    if limit < peak < math.inf:
        raise Unsupported(f"{name}: a weight of {peak:g} is too large for {format}; use bf16 or f32")


class _Output:
    """A file to append to, checksummed by block, and synced when the `with` ends without an error."""

    def __init__(self, path: Path) -> None:
        self.size = 0
        self._path, self._crcs, self._crc = path, list[int](), 0
        binary = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)  # Windows has the other
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | binary, 0o644)

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if error is None:
                os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def append(self, data: bytes | U8) -> None:
        view = memoryview(data) if isinstance(data, bytes) else data.data
        at = 0
        while at < len(view):
            part = view[at : at + BLOCK_BYTES - self.size % BLOCK_BYTES]
            self._crc = _native.crc32c(part, self._crc)
            self.size, at = self.size + len(part), at + len(part)
            if self.size % BLOCK_BYTES == 0:
                self._crcs.append(self._crc)
                self._crc = 0
        while view:
            view = view[os.write(self._fd, view) :]

    def checksums(self) -> bytes:
        last = [self._crc] if self.size % BLOCK_BYTES else []
        return np.array(self._crcs + last, "<u4").tobytes()


@contextlib.contextmanager
def _replacing(dst: Path, need_bytes: int, overwrite: bool) -> Iterator[Path]:
    """Give a new directory that replaces `dst` if the body succeeds, and is removed otherwise.

    A killed process leaves the old `dst` or the new one, and the next call removes its other files. On a
    system that cannot exchange directories it may leave neither; the next call then restores the old one.
    """
    dst = Path(os.path.realpath(dst))
    check_target(dst, overwrite)
    try:
        tmp, lock = _begin(dst, need_bytes)
        try:
            yield tmp
            _sync_directory(tmp)
            _swap(tmp, dst)
        except BaseException:
            shutil.rmtree(tmp, ignore_errors=True)
            raise
        finally:
            if lock is not None:
                os.close(lock)
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = f" (it needs {need_bytes / 2**30:.3g} GiB)" if full else ""
        raise IOFailure(f"{dst}: cannot write the pack: {e.strerror or e}{hint}") from e


def _begin(dst: Path, need_bytes: int) -> tuple[Path, int | None]:
    """Make a temporary directory for `dst`: (its path, the descriptor that locks it; None on Windows)."""
    dst.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(dst)
    free = shutil.disk_usage(dst.parent).free
    if free < need_bytes:
        raise IOFailure(
            f"{dst}: the pack needs {need_bytes / 2**30:.3g} GiB, and {free / 2**30:.3g} GiB are free; "
            "free some space, or choose another disk"
        )
    tmp = dst.with_name(f"{dst.name}.tmp-{os.getpid()}")
    try:
        tmp.mkdir()
    except FileExistsError:
        raise IOFailure(f"{dst}: this process is writing it already; wait until that is done") from None
    try:
        return tmp, lock(tmp)
    except OSError:
        shutil.rmtree(tmp, ignore_errors=True)
        raise


def check_target(dst: Path, overwrite: bool) -> None:
    """Raise UsageError or IOFailure unless `dst` may be written: only packs and empty directories may."""
    if not os.path.lexists(dst):
        return
    if not os.path.isdir(dst):
        raise UsageError(f"{dst}: exists and is not a directory")
    try:
        names = os.listdir(dst)
    except OSError as e:
        raise IOFailure(f"{dst}: cannot list: {e.strerror}") from None
    if names and "pack.json" not in names:
        raise UsageError(f"{dst}: exists and is not a pack, so it is not replaced; choose another directory")
    if names and not overwrite:
        raise UsageError(f"{dst}: exists already; choose another directory or ask to replace it")


def _swap(tmp: Path, dst: Path) -> None:
    """Put `tmp` in the place of `dst`, durably, and remove the old `dst`. On an error nothing changes."""
    old = tmp.with_name(tmp.name + "-old")
    had_old = os.path.lexists(dst)
    if had_old and _exchange(tmp, dst):
        try:
            _sync_directory(dst.parent)
        except BaseException:
            _exchange(tmp, dst)
            raise
        shutil.rmtree(tmp, ignore_errors=True)
        return
    if had_old:
        os.rename(dst, old)
    try:
        os.rename(tmp, dst)
        _sync_directory(dst.parent)
    except BaseException:
        if os.path.lexists(dst):
            os.rename(dst, tmp)
        if had_old:
            os.rename(old, dst)
        raise
    shutil.rmtree(old, ignore_errors=True)


_HERE, _RENAME_EXCHANGE = -100, 2  # AT_FDCWD and renameat2's flag, of linux/fcntl.h and linux/fs.h


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two directories in one step. Return False if this system or disk cannot."""
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    done: int = renameat2(_HERE, os.fsencode(a), _HERE, os.fsencode(b), _RENAME_EXCHANGE)
    return done == 0


def _sync_directory(path: Path) -> None:
    if sys.platform == "win32":
        return  # a directory cannot be opened there
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def lock(directory: Path) -> int | None:
    """Lock a directory for as long as this process lives. Return a descriptor, or None on Windows.

    The kernel releases the lock however the process ends. Raises OSError if another process holds it.
    """
    if sys.platform == "win32":
        return None
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _remove_stale(dst: Path) -> None:
    """Remove temporary directories for `dst` whose writer is dead: its pid and its lock are free."""
    if sys.platform == "win32":
        return  # there are no locks, and os.kill(pid, 0) would interrupt the writer
    for path in dst.parent.iterdir():
        m = re.fullmatch(re.escape(dst.name) + r"\.tmp-(\d{1,10})(-old)?", path.name)
        if m is None or path.is_symlink() or not path.is_dir() or alive(int(m[1])):
            continue
        try:
            held = lock(path)
        except OSError:
            continue
        if held is not None:
            os.close(held)
        if m[2] and not os.path.lexists(dst) and (path / "pack.json").exists():  # killed between two renames
            os.rename(path, dst)
            continue
        shutil.rmtree(path, ignore_errors=True)
