"""A model's resident part in memory, and the files that its other rows come from."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline import _native
from thermocline.errors import IOFailure
from thermocline.session.weights import PackInMemory, faster_in_groups

if TYPE_CHECKING:
    from thermocline.pack.stored_model import FileRows, Progress, Run, StoredModel


def read(
    model: StoredModel,
    made: PackInMemory,
    runs: Sequence[Run],
    whole: Collection[str],
    progress: Progress | None,
) -> PackInMemory:
    """Read `runs` into the arena, in groups of rows where the CPU is faster so. Raises as `read_runs` does.

    Return `made` with the tensors that lie in groups, those on disk too. `whole`: those that runs have all
    rows of, which come in groups at once.
    """
    ops = made.ops.native
    grouped = frozenset(n for n in faster_in_groups(made) if not model.tensors[n].shape[-2] % ops.group)
    read = frozenset(n for n in grouped if any(a <= model.tensors[n].offset < b for a, b, _ in runs))
    come = model.read_runs(made.arena, runs, progress, read & frozenset(whole), ops.group)
    for name in sorted(read - come):
        ops.interleaved(made.arena, made.all_rows(name))
    return replace(made, grouped=grouped)


def files_of(model: StoredModel, *, depth: int, piece_bytes: int) -> _native.ExpertFiles:
    """Open the files that weights lie in, behind one queue of reads. Raises IOFailure."""
    parts = [(str(path), state) for path, state in model.parts]
    try:
        return _native.ExpertFiles(parts, depth=depth, piece_bytes=piece_bytes)
    except OSError as e:
        raise IOFailure(f"{e.filename or model.path}: cannot open: {e.strerror or e}") from None


def row_run(made: PackInMemory, tensor: str, f: FileRows, first: int = 0) -> _native._RowRun:
    """Return rows as native code takes them, in groups where the CPU is faster so.

    `first`: the byte that row 0 of the tensor goes to.
    """
    group, lane = 1, 0
    if tensor in made.grouped:
        group = made.ops.native.group
        lane = (f.to - first) // f.stride % group
    return f.format, f.columns, f.part, f.at, f.rows, f.to, f.stride, f.order, group, lane
