"""Writing pack directories: tensors streamed from a source, whole or not at all.

Must not know where the tensors come from.
"""

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
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from thermocline import _native
from thermocline.errors import IOFailure, Unsupported, UsageError
from thermocline.files.whole import alive
from thermocline.model import quant
from thermocline.model.spec import ModelSpec, check_spec
from thermocline.model.tensors import Layout, TensorInfo, expected_tensors, place
from thermocline.pack.manifest import BLOCK_BYTES, Manifest, Predictor, render_manifest
from thermocline.pack.pack import Progress

if sys.platform != "win32":
    import fcntl

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

# f32 encoded and written at a time: such buffers stay in the heap, where 4 MiB are mapped, zeroed and
# unmapped each time (a third of the time of making random rows).
_ROWS_BYTES = 1 << 19


class TensorSource(Protocol):
    """Where weights come from: rows [first, last) of a tensor, as f32 [last - first, columns].

    Names are docs/internals/pack.md's, but `layers.I.bundle` is asked for as `layers.I.up` (if gated) and
    `layers.I.down`, one row per neuron. With several experts rows run through all of them. A vector (norm,
    bias, order) is asked for whole, one value a row: [last - first].
    """

    def __call__(self, name: str, first: int, last: int, /) -> NDArray[Any]: ...


@runtime_checkable
class EncodedSource(TensorSource, Protocol):
    """A source that has rows as they are stored, and hands them over: bytes [last - first, row bytes].

    Only matrices are asked for this way. None: not in this format; the rows are then asked for as f32.
    """

    def encoded(self, name: str, format: str, first: int, last: int, /) -> U8 | None: ...


def write_pack(
    dst: str | os.PathLike[str],
    spec: ModelSpec,
    weight_format: str,
    source: TensorSource | EncodedSource,
    *,
    formats: Mapping[str, str] | None = None,
    predictor: Predictor | None = None,
    optional: Collection[str] = (),
    files: Mapping[str, bytes] | None = None,
    origin: tuple[str, str, str] = ("memory", "", ""),
    overwrite: bool = False,
    finish: Callable[[Path], None] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a pack, streaming: a few times `_ROWS_BYTES` of memory besides what `source` keeps.

    `formats`: of matrices that have one of their own, as `expected_tensors` takes them. `optional`: which of
    the optional tensors (biases, order) the source has. `files`: contents of `COPIED`
    files. `origin`: kind, name and hash for the manifest. `finish` may add sidecars to the finished
    directory before it takes its place. Whatever happens, `dst` is afterwards the old pack,
    the whole new one, or absent. Raises Unsupported, UsageError (it exists), IOFailure (disk full, ...).
    """
    check_spec(spec, "spec")
    ranks = predictor.ranks if predictor is not None else ()
    layouts = expected_tensors(spec, weight_format, formats, ranks)
    unknown = set(optional) - {n for n, t in layouts.items() if t.optional}
    if unknown:
        raise ValueError(f"not optional tensors of this model: {sorted(unknown)}")
    layouts = {n: t for n, t in layouts.items() if not t.optional or n in optional}
    tensors, weights_bytes = place(layouts)
    files = files or {}
    with _replacing(Path(dst), weights_bytes + sum(map(len, files.values())), overwrite) as tmp:
        checksums = _write_weights(tmp / "weights.bin", layouts, tensors, weights_bytes, source, progress)
        manifest = Manifest(
            spec=spec,
            weight_format=weight_format,
            tensors=tensors,
            block_bytes=BLOCK_BYTES,
            weights_bytes=weights_bytes,
            checksums_crc32c=_native.crc32c(checksums),
            source=dict(zip(("kind", "name", "hash"), origin, strict=True)),
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
    layouts: Mapping[str, Layout],
    tensors: Mapping[str, TensorInfo],
    weights_bytes: int,
    source: TensorSource,
    progress: Progress | None,
) -> bytes:
    """Write weights.bin; returns the bytes of checksums.bin."""
    with _Output(path) as out:
        for name, layout in layouts.items():
            out.append(bytes(tensors[name].offset - out.size))
            for rows in _encoded(layout, source):
                out.append(rows)
                if progress:
                    progress(out.size, weights_bytes)
        out.append(bytes(weights_bytes - out.size))
        if progress:
            progress(out.size, weights_bytes)
        return out.checksums()


def _encoded(layout: Layout, source: TensorSource) -> Iterator[U8]:
    """The tensor's bytes, a few MiB of rows at a time: [rows, stride]."""
    if layout.vector:
        n = layout.rows * layout.columns
        values = np.asarray(source(layout.parts[0], 0, n)).reshape(n)
        yield values.astype("<i4" if layout.format == "i32" else "<f4").view(np.uint8)
        return
    step = max(1, _ROWS_BYTES // (4 * layout.columns * len(layout.parts)))
    row = quant.row_bytes(layout.format, layout.columns)
    for first in range(0, layout.rows, step):
        last = min(layout.rows, first + step)
        out = np.zeros((last - first, layout.stride), np.uint8)
        for i, part in enumerate(layout.parts):
            out[:, i * row : (i + 1) * row] = _rows(layout, part, first, last, source)
        yield out.reshape(-1)


def _rows(layout: Layout, part: str, first: int, last: int, source: TensorSource | EncodedSource) -> U8:
    if isinstance(source, EncodedSource):
        rows = source.encoded(part, layout.format, first, last)
        if rows is not None:
            _check_shape(part, rows, last - first, quant.row_bytes(layout.format, layout.columns))
            return rows
    x = source(part, first, last)
    _check_shape(part, x, last - first, layout.columns)
    check_range(x, layout.format, part)
    return quant.encode(layout.format, x)


def _check_shape(name: str, x: NDArray[Any], rows: int, columns: int) -> None:
    if x.shape != (rows, columns):
        raise ValueError(f"{name}: source gave {x.shape}, wanted {(rows, columns)}")


def check_range(x: F32, format: str, name: str) -> None:
    """Unsupported where a finite weight would become infinite."""
    limit = quant.FORMATS[format].largest
    if math.isinf(limit) or x.size == 0:
        return
    peak = max(float(x.max()), -float(x.min()))
    if limit < peak < math.inf:
        raise Unsupported(f"{name}: a weight of {peak:g} is too large for {format}; use bf16 or f32")


class _Output:
    """A file being written: appended to, checksummed by block, synced when the `with` ends well."""

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
    """A new directory beside `dst` that takes its place if the body succeeds and vanishes if it does not.

    A kill leaves the old `dst` or the new one, and the next call removes what else it left. (Where a system
    cannot exchange directories it may leave none: the next call then brings the old one back.)
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
    """(a new temporary directory for `dst`, the descriptor that keeps it locked: Windows has no such)."""
    dst.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(dst)
    free = shutil.disk_usage(dst.parent).free
    if free < need_bytes:
        raise IOFailure(
            f"{dst}: the pack needs {need_bytes / 2**30:.3g} GiB, and {free / 2**30:.3g} GiB are free"
        )
    tmp = dst.with_name(f"{dst.name}.tmp-{os.getpid()}")
    try:
        tmp.mkdir()
    except FileExistsError:
        raise IOFailure(f"{dst}: this process is writing it already") from None
    try:
        return tmp, lock(tmp)
    except OSError:
        shutil.rmtree(tmp, ignore_errors=True)
        raise


def check_target(dst: Path, overwrite: bool) -> None:
    """Only a pack, or an empty directory, may be replaced."""
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
    """tmp becomes dst, durably, or nothing changes. What dst was is removed afterwards."""
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
    """Two directories in each other's place, in one step. False: this system or disk cannot."""
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
    """Mark a directory as in use by a living process. The kernel unmarks it however the process ends."""
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
    """Remove temporary directories for `dst` whose writer is dead: pid free (or ours) and lock free."""
    if sys.platform == "win32":
        return  # without locks nobody knows, and os.kill(pid, 0) would interrupt the writer
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
