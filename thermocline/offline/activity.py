"""Count which neurons are active, by running the engine's own prefill over passages.

Each passage is computed on its own, so its counts do not depend on threads, workers, interruptions or other
passages. Counts are integers and are added up.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from thermocline.engine.decoder import bind, ffn_input, for_context, forward, state_storage
from thermocline.engine.kv_cache import (
    BLOCK,
    KVCache,
    Storage,
    block_counts,
    blocks_for,
    bytes_for,
    in_ram,
)
from thermocline.engine.state_pool import StateTurns
from thermocline.errors import NumericalError
from thermocline.model.spec import ModelSpec
from thermocline.offline.packing.rows import PackRows
from thermocline.ops.cpu import CpuOps
from thermocline.ops.interface import (
    F32,
    Batch,
    FFNStats,
    Layer,
    LayerActivations,
    OpaqueOps,
    Weights,
    opaque,
)
from thermocline.pack.activity_profile import BUCKETS, F16, I32, I64
from thermocline.pack.pack import Pack

if TYPE_CHECKING:
    from thermocline.session.session import Session

UNIT = BUCKETS[-1]  # passages and steps are whole windows of this size, except at a passage's end
STEP = 256  # tokens computed together: `LLM`'s prefill chunk, and one pass of the native FFN
_SUM_ROWS = 128  # rows of 0 and 1 whose sums fit in a byte


@dataclass(frozen=True)
class Sampled:
    """Samples of k tokens in one layer, in the pack's order of neurons."""

    layer: int  # its number among the layers with an FFN
    input: F16  # [k, dim]
    sizes: I64  # [k]: active neurons of each token
    index: I32  # [nnz]: their positions, ascending within a token
    mass: F16  # [nnz]: |h| times the norm of the down row


@dataclass(frozen=True)
class Counted:
    """The counts and samples of one passage."""

    counts: I64  # [layers with an FFN, buckets, neurons]
    samples: list[Sampled]  # the samples of a layer are in the order of tokens


def add_windows(active: NDArray[np.uint8], counts: I64) -> None:
    """Add to counts[b] the number of windows of BUCKETS[b] consecutive rows in which a neuron is active.

    `active` holds 0 and 1 [tokens, neurons]. Windows start at multiples of their size, so two windows make
    one of the next bucket.
    """
    for total in counts:
        for at in range(0, len(active), _SUM_ROWS):
            total += np.add.reduce(active[at : at + _SUM_ROWS], axis=0, dtype=np.uint8)
        even = len(active) // 2 * 2
        active = active[0:even:2] | active[1:even:2]


class ActivityCounts:
    """Counts each FFN's activations, and samples them at the wanted rows."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[Layer],
        norms: Sequence[F32],
        sampled: Collection[int] | None = None,
    ) -> None:
        """`norms` are those of each layer's down rows. They may be empty if nothing is sampled.

        `sampled`: the layers to sample; None: all of them.
        """
        self._sampled = [sampled is None or i in sampled for i in spec.ffn_layers]
        self._spec, self._layers, self._norms = spec, [layers[i] for i in spec.ffn_layers], norms
        self._skip, self._wanted = 0, np.empty(0, np.int64)

    def begin(self) -> None:
        s = self._spec
        self.counts = np.zeros((len(self._layers), len(BUCKETS), s.n_experts * s.ffn_dim), np.int64)
        self.samples: list[Sampled] = []

    def look_at(self, skip: int, wanted: I64) -> None:
        """Count rows from `skip` on in the next step, and sample the `wanted` ones."""
        self._skip, self._wanted = skip, wanted

    def input(self, layer: int, h: F32, ops: CpuOps) -> F32 | None:
        """Return what the wanted rows' gates read, of what `ffn_add` reads; None: they are not sampled."""
        if not len(self._wanted) or not self._sampled[layer]:
            return None
        return ffn_input(self._spec, self._layers[layer], h[self._wanted], opaque(ops))

    def add(self, layer: int, record: F32, seen: F32 | None) -> None:
        """Count a layer's activations [tokens, neurons], and sample them where `input` was `seen`."""
        add_windows((record[self._skip :] != 0).view(np.uint8), self.counts[layer])
        if seen is not None:
            self.samples.append(self._sample(layer, seen, record[self._wanted]))

    def _sample(self, layer: int, seen: F32, h: F32) -> Sampled:
        row, index = np.nonzero(h)
        mass = np.abs(h[row, index]) * self._norms[layer][index]
        return Sampled(
            layer,
            np.clip(seen, -65504, 65504).astype(np.float16),
            np.bincount(row, minlength=len(h)).astype(np.int64),
            index.astype(np.int32),
            np.clip(mass, 0, 65504).astype(np.float16),
        )


class ActivityRecorder(CpuOps):
    """The native ops. They pass each FFN's activations to `counts`."""

    def __init__(self, threads: int, counts: ActivityCounts) -> None:
        super().__init__(threads)
        self._counts = counts

    def step(
        self, batch: Batch, block: int, cos: F32 | None, sin: F32 | None, window: int | None = None
    ) -> Any:
        self._layer = 0
        return super().step(batch, block, cos, sin, window)

    def ffn_add(
        self,
        x: F32,
        h: F32,
        bound: Any,
        sparsity: str,
        stats: FFNStats,
        record: F32 | None = None,
        *,
        shares: F32 | None = None,
    ) -> None:
        layer, self._layer = self._layer, self._layer + 1
        seen = self._counts.input(layer, h, self)  # before x, maybe h, changes
        record = np.empty((len(x), bound.neurons), np.float32) if record is None else record
        super().ffn_add(x, h, bound, sparsity, stats, record, shares=shares)
        self._counts.add(layer, record, seen)


class NeuronsOfGpu(Protocol):
    """`GpuOps`, which bring each FFN's neurons to RAM."""

    cpu: CpuOps

    def watch_neurons(self, tokens: int, look: Callable[[LayerActivations], None]) -> None: ...


def down_norms(pack: Pack) -> list[F32]:
    """Return the norm of each neuron's down row [neurons], times its weight in a sub-norm.

    There is an entry for each layer that has an FFN. They are read from the pack, one layer after the other,
    since a session that reads neurons from disk has few of them in memory. Raises BadFile or IOFailure.
    """
    rows, neurons = PackRows(pack), pack.spec.n_experts * pack.spec.ffn_dim
    steps = [(at, min(at + 1024, neurons)) for at in range(0, neurons, 1024)]  # rows decoded at a time
    out: list[F32] = []
    for i in pack.spec.ffn_layers:
        norms = np.concatenate([np.linalg.norm(rows(f"layers.{i}.down", *step), axis=1) for step in steps])
        if (sub_norm := f"layers.{i}.ffn_sub_norm.weight") in pack.tensors:
            norms *= np.abs(rows(sub_norm, 0, neurons))
        out.append(norms)
    return out


def passage_positions(context: int) -> int:
    """Return the positions of keys and values of `Passages`."""
    return blocks_for(context) * BLOCK


def passage_bytes(spec: ModelSpec, context: int) -> int:
    """Return the bytes of `Passages`, beside those of a session that lends it its weights."""
    return bytes_for(spec, passage_positions(context))


def depth_of(sampled: Collection[int] | None) -> int | None:
    """Return how many layers are computed for samples of these; None: all."""
    return None if sampled is None else max(sampled) + 1


class Passages:
    """Computes passages, each on its own, with ops that look on, in a KV cache of its own."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        ops: OpaqueOps,
        context: int,
        depth: int | None = None,
        storage: Storage = in_ram,
    ) -> None:
        """`depth`: the number of layers to compute; None: all of them. `storage`: of keys and values."""
        self._ops, self._context = ops, context
        m = bind(for_context(spec, context), weights, self._ops)
        self._model = replace(m, attention=m.attention[:depth], mixers=m.mixers[:depth], ffn=m.ffn[:depth])
        blocks = block_counts(spec, passage_positions(context), context, STEP)
        self._kv = KVCache(spec, *blocks, chunk=STEP, storage=storage)
        self._table = self._kv.open([])
        self._states = StateTurns(spec, 1, state_storage(m, ops))

    def compute(self, ids: I32) -> Iterator[int]:
        """Compute a whole passage; yield the tokens of each step that is done. Raises NumericalError."""
        for begin in range(0, len(ids), STEP):
            end = min(begin + STEP, len(ids))
            self.step(ids, begin, end)
            yield end - begin

    def step(self, ids: I32, begin: int, end: int) -> None:
        """Compute tokens [begin, end) of a passage, whose earlier ones were the last. NumericalError."""
        if begin == 0:  # windows have released the first blocks of the passage before
            self._kv.begin_again(self._table, self._context)
        tables = self._kv.tables([self._table], [end])
        at = np.arange(begin, end, dtype=np.int32)
        last = np.array([end - begin - 1], np.int32)  # one row of logits, to check that they are finite
        turn, states = self._states.step(1, first=begin == 0), self._states.layers
        batch = Batch(ids[begin:end], at, np.zeros_like(at), tables[0], last, tables[-1], *turn)
        model, kv, ops = self._model, self._kv, self._ops
        logits = forward(model, kv, batch, ops, sparsity="exact", stats=FFNStats(), states=states)
        kv.release_passed(self._table, end)
        if not np.isfinite(logits).all():
            raise NumericalError(
                "the model gives NaN or infinity: its weights are damaged, or too large for its format"
            )


class ProfileWorker:
    """Runs one passage at a time through the decoder, with a KV cache of its own, and counts."""

    def __init__(self, counts: ActivityCounts, passages: Passages, prefix: I32) -> None:
        self._counts, self._passages, self._prefix = counts, passages, prefix

    @classmethod
    def on_cpu(
        cls,
        spec: ModelSpec,
        weights: Weights,
        prefix: I32,
        context: int,
        threads: int,
        norms: Sequence[F32],
        sampled: Collection[int] | None = None,
    ) -> ProfileWorker:
        """Return a worker with its own thread pool.

        `sampled`: the layers to sample, up to which the model is computed; None: all of them.
        """
        counts = ActivityCounts(spec, weights.layers, norms, sampled)
        ops = opaque(ActivityRecorder(threads, counts))
        return cls(counts, Passages(spec, weights, ops, context, depth_of(sampled)), prefix)

    @classmethod
    def on_gpu(
        cls,
        session: Session,
        prefix: I32,
        context: int,
        norms: Sequence[F32],
        sampled: Collection[int] | None = None,
    ) -> ProfileWorker:
        """Return a worker that computes as a session with a GPU does, in its cache."""
        spec, weights, ops = session.pack.spec, session.loaded.weights, session.loaded.ops
        counts, there = ActivityCounts(spec, weights.layers, norms, sampled), cast("NeuronsOfGpu", ops)

        def look(seen: LayerActivations) -> None:
            counts.add(seen.index, seen.values, counts.input(seen.index, seen.h, there.cpu))

        there.watch_neurons(STEP, look)
        passages = Passages(spec, weights, ops, context, depth_of(sampled), session.storage)
        return cls(counts, passages, prefix)

    def count(self, passage: I32, wanted: I64, stop: threading.Event) -> Counted:
        """Count a passage's active neurons. `wanted` are the tokens to sample, ascending.

        Raises Stopped if `stop` is set, and NumericalError.
        """
        counts, n_prefix = self._counts, len(self._prefix)
        ids = np.concatenate([self._prefix, passage])
        wanted = wanted + n_prefix
        first = n_prefix + (STEP - n_prefix) // UNIT * UNIT  # later steps begin with a window
        counts.begin()
        edges = [0, *range(first, len(ids), STEP), len(ids)]
        for begin, end in itertools.pairwise(edges):
            if stop.is_set():
                raise Stopped
            inside = wanted[(wanted >= begin) & (wanted < end)]
            counts.look_at(max(0, n_prefix - begin), inside - begin)
            self._passages.step(ids, begin, end)
        return Counted(counts.counts, counts.samples)


def counted_together(each: Sequence[Counted]) -> Counted:
    """Return the counts of consecutive passages as one passage's, so that less is sent."""
    return Counted(np.sum([c.counts for c in each], axis=0), [s for c in each for s in c.samples])


class Stopped(Exception):
    """Raised in a worker that was asked to stop."""


def count_passages(
    workers: Sequence[ProfileWorker], passages: Sequence[I32], wanted: Sequence[I64]
) -> Generator[Counted]:
    """Yield each passage's counts and samples, in order. Close the iterator to stop early."""
    free: queue.SimpleQueue[ProfileWorker] = queue.SimpleQueue()
    for worker in workers:
        free.put(worker)
    stop = threading.Event()

    def count(passage: I32, rows: I64) -> Counted:
        worker = free.get()
        try:
            return worker.count(passage, rows, stop)
        finally:
            free.put(worker)

    with ThreadPoolExecutor(len(workers)) as pool:
        found = pool.map(count, passages, wanted)
        try:
            yield from found
        finally:
            stop.set()
