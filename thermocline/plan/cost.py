"""How long a token takes: every placement that a layer can have, with its bytes in each tier and its time.

The only file that knows what is read when, and what overlaps with what. Figures of the CPU, and of a disk
beside it alone (`stored_times`), follow this engine as it is; the others are predictions of one to come.

A layer's time is attention, then the predictor, each on its tier, then the FFN on all tiers at once:
max(GPU, CPU, disk). Where the FFN reads what attention does (`LayerWork.parallel`), a GPU attends meanwhile.
A layer that uses both processors waits for the slower and pays `sync_us`; one that is all on one pays
nothing. (Where runs of such layers meet the residual stream crosses over too: `plan.predict` has it once a
token, since like layers lie together.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from thermocline.machine.tiers import DiskTier, Kernel, Tiers
from thermocline.model.sizes import FormatRead, LayerSizes, ModelSizes, PartSize, joined
from thermocline.model.sizes import Reads as FormatReads
from thermocline.ops import device_sizes
from thermocline.ops.interface import FEW
from thermocline.plan.disk.cache_split import Fetch

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Bool = NDArray[np.bool_]

# Of a token on the CPU, beside memory (LOG, "Planner"): a half of a layer is a native call with its barriers
# and the Python between two; sampling and the engine's own work come once.
CALL_US, TOKEN_US = 22.0, 350.0
KV_SHARE = 0.55  # of memory speed that attention reaches over keys and values, 1024 to 4096 positions deep
# Of a large matrix's speed: a layer's matrices in a whole step; bundles, read two rows at a time, all of them
# or some; gate rows that a predictor names, where they are few (where it names all, they are a matrix again).
MATRIX_SHARE, BUNDLE_SHARE, NAMED_SHARE = 0.94, 0.8, 0.45
# Neurons that a predictor names for one that is active, where it does not say; published ones: 1.2 to 1.8.
EXCESS = 1.5
PREDICT_TOKENS = FEW  # more tokens a step run `exact`
PREDICTOR_LAUNCHES = 4  # GPU kernels: two products, the second's input in int8, the names
PAGE = 4096
IN_FLIGHT = 16  # reads, where a disk's reads a second were measured: each then takes that many times theirs
MISS_US = 6.0  # of a thread, for a record from disk: asking, its checksum, a copy
EARLY_SHARE = 0.87  # of attention's time, that reads which a predictor began before it go on beside it


@dataclass(frozen=True)
class Work:
    """A step to plan for: one token of each of `batch` sequences, `depth` positions in."""

    sparsity: str  # predict, exact or off
    batch: int = 1
    depth: int = 0
    routed: float = 1.0  # of a mixture's experts, those that some token of the step goes to
    experts: int = 1
    active: int = 1  # of them, those that a token goes to

    @property
    def predicts(self) -> bool:
        return self.sparsity == "predict" and self.batch <= PREDICT_TOKENS

    @property
    def ffns(self) -> float:
        """Return how many FFNs of a layer run one after the other."""
        return self.routed * self.experts

    @property
    def dense(self) -> Work:
        """Return the step as a layer without experts sees it."""
        return replace(self, routed=1.0, experts=1, active=1)


@dataclass(frozen=True)
class Columns:
    """Placements of one layer (or of the head), one an entry: what each is, takes, and costs."""

    attention: Bool  # on the GPU, with its keys and values
    predictor: Bool  # on the GPU
    gpu: I64  # neurons [0, gpu) are there
    disk: I64  # bundles of the last `disk` neurons are on disk
    gates: Bool  # and so are their gate rows, which else stay in RAM
    vram_bytes: I64
    ram_bytes: I64
    gpu_us: F64  # what each tier adds to the token's time: of what runs side by side the longest counts
    cpu_us: F64
    disk_us: F64
    sync_us: F64

    @property
    def us(self) -> F64:
        total: F64 = self.gpu_us + self.cpu_us + self.disk_us + self.sync_us
        return total

    def __len__(self) -> int:
        return len(self.gpu)

    def pick(self, index: I64) -> Columns:
        return Columns(**{f.name: getattr(self, f.name)[index] for f in fields(Columns)})


@dataclass(frozen=True)
class Speeds:
    """Time of a read and its multiplications on either processor, in microseconds."""

    tiers: Tiers
    format: str
    batch: int

    def cpu(
        self, reads: FormatReads, times: F64 | float = 1, share: float = MATRIX_SHARE, tokens: float = 0
    ) -> F64:
        """Return the time of `times` such reads: of each format at its own speed, one after the other.

        `tokens`: that these weights are multiplied by, if that is not the whole step. A format without
        figures is read like the model's own: it is a small part of the weights.
        """
        total: F64 = np.zeros(())
        for k, r in self._by_kernel(reads):
            total = total + np.maximum(
                np.asarray(times * r.bytes) / (k.gbs * share * 1e3),
                2.0 * (tokens or self.batch) * (times * r.weights) / (k.gflops * 1e3),
            )
        return total

    def multiplied_ns(self, reads: FormatReads) -> float:
        """Return the time of a token's multiplications, of many tokens, without that of reading."""
        return sum(2.0 * r.weights / k.gflops for k, r in self._by_kernel(reads))

    def _by_kernel(self, reads: FormatReads) -> Iterator[tuple[Kernel, FormatRead]]:
        known = self.tiers.cpu.kernels
        for r in joined(replace(r, format=r.format if r.format in known else self.format) for r in reads):
            yield self.tiers.kernel(r.format), r

    def gpu(self, read_bytes: F64 | float, weights: F64 | float, tokens: float = 0) -> F64:
        """`tokens`: that these weights meet, if that is not the whole step."""
        g = self.tiers.gpu
        assert g is not None
        us: F64 = np.maximum(
            np.asarray(read_bytes) / (g.read_gbs * g.share * 1e3),
            2.0 * (tokens or self.batch) * weights / (g.gflops * 1e3),
        )
        return us

    def sync(self, dim: int) -> float:
        """The residual stream to the other processor and the result back."""
        g = self.tiers.gpu
        return 0.0 if g is None else g.sync_us + 2 * self.sent(dim)

    def sent(self, dim: int) -> float:
        """The residual stream to the other processor."""
        g = self.tiers.gpu
        return 0.0 if g is None else 4 * dim * self.batch / (g.link_gbs * 1e3)


@dataclass(frozen=True)
class Reads:
    """Rows of a layer's neurons that a step needs, hottest first: sums over the first k, k = 0 … neurons."""

    gates: F64  # gate rows
    bundles: F64
    gate_share: float  # of a large matrix's speed on the CPU
    bundle_share: float

    @staticmethod
    def of(hotness: F64, work: Work, *, skips: bool, excess: float = EXCESS) -> Reads:
        """`hotness`: each neuron's probability that a step needs it, hottest first. `excess`: see `named`."""
        n = len(hotness)
        every: F64 = work.routed * np.arange(n + 1, dtype=np.float64)
        if not skips:
            return Reads(every, every, MATRIX_SHARE, MATRIX_SHARE)
        if work.sparsity == "off":
            return Reads(every, every, MATRIX_SHARE, BUNDLE_SHARE)
        needed = np.concatenate([[0.0], np.cumsum(hotness)])
        if not work.predicts:
            return Reads(every, needed, MATRIX_SHARE, BUNDLE_SHARE)
        gates = np.concatenate([[0.0], np.cumsum(named(hotness, excess, work.routed))])
        share = NAMED_SHARE + (MATRIX_SHARE - NAMED_SHARE) * float(gates[-1]) / (n * work.routed)
        return Reads(gates, needed, share, BUNDLE_SHARE)


def named(hotness: F64, excess: float, routed: float = 1.0) -> F64:
    """How likely a predictor names each neuron. Of `excess` names for a needed one those too many are spread
    as uncertainty is, p (1 - p): what is always active is no guess. `routed`: as `Work`'s.
    """
    unsure = hotness * (1 - hotness / routed)
    more = (excess - 1) * float(hotness.sum()) / max(float(unsure.sum()), 1e-30)
    found: F64 = np.minimum(routed, hotness + more * unsure)
    return found


@dataclass(frozen=True)
class LayerWork:
    """One layer as the planner sees it."""

    sizes: LayerSizes
    reads: Reads
    kv_bytes: int  # of its keys and values, or states
    kv_read_bytes: int
    dim: int
    # Of its neurons: "any" number of the hottest, "all" or none, whole "experts" of `width`, "none".
    on_gpu: str = "any"
    attention_on_gpu: bool | None = None  # None: or not
    shared: bool = False  # it has an FFN of every token, with its attention: neurons go to a GPU with both
    width: int = 0  # neurons of an expert
    parallel: bool = False  # its FFN reads what attention does: others begin before the GPU attends
    dense: bool = False  # it has no experts, though the model may be a mixture
    apart: int = 0  # kernels of attention's that another one does not do, too
    begun: int = (
        0  # norms that are no kernels with few tokens, if all of it is on a GPU, and the layer before it
    )

    def own(self, work: Work) -> Work:
        """Return the step as this layer sees it."""
        return work.dense if self.dense else work

    def tokens_each(self, work: Work) -> float:
        """Return how many tokens the CPU computes an FFN for: a needed expert for those that go to it.

        So a step multiplies by `batch` times `active` experts, and reads those that are needed once.
        """
        work = self.own(work)
        needed = float(self.reads.gates[-1]) / self.width if self.on_gpu == "experts" else work.ffns
        return work.batch * work.active / needed if work.experts > 1 else work.batch

    def same_as(self, other: LayerWork) -> bool:
        kv = (self.kv_bytes, self.kv_read_bytes) == (other.kv_bytes, other.kv_read_bytes)
        alike = self.reads is other.reads and (self.on_gpu, self.shared) == (other.on_gpu, other.shared)
        alike &= (self.width, self.dense, self.apart) == (other.width, other.dense, other.apart)
        alike &= self.attention_on_gpu == other.attention_on_gpu
        return alike and kv and self.sizes == other.sizes


def grid(neurons: int, clusters: int, least: int = 32) -> I64:
    """Borders of clusters, 0 to `neurons`: at most `clusters`, all but the last some multiple of `least`."""
    if not neurons:
        return np.zeros(1, np.int64)
    size = -(-neurons // clusters // least) * least if neurons >= least * clusters else min(least, neurons)
    borders: I64 = np.minimum(np.arange(0, neurons + size, size), neurons)
    return np.unique(borders)


def layer_columns(
    layer: LayerWork, speeds: Speeds, work: Work, *, clusters: int, gpu: bool, disk: bool
) -> Columns:
    """Every placement: attention and predictor here or there, any share on the GPU, any on disk.

    Gate rows are on disk only where a predictor says which to fetch.
    """
    s, whole = layer.sizes, layer.on_gpu == "experts"
    borders = grid(s.neurons, clusters, layer.width if whole else 32 * work.experts)
    ends = {"any": borders, "experts": borders, "all": borders[[0, -1]], "none": borders[:1]}
    counts = ends[layer.on_gpu] if gpu else borders[:1]
    tails = s.neurons - borders[::-1] if disk else borders[:1]
    both = np.array([False, True]) if gpu else np.array([False])
    attention = both if layer.attention_on_gpu is None else np.array([layer.attention_on_gpu])
    asks_there = work.predicts and s.predictor.bytes and layer.on_gpu in ("any", "all") and work.experts == 1
    predictors = both if asks_there else both[:1]
    fetched = np.array([False, True]) if disk and work.predicts else np.array([False])
    every = np.meshgrid(attention, predictors, counts, tails, fetched, indexing="ij")
    a, p, g, d, f = (x.ravel() for x in every)
    fits = (g + d <= s.neurons) & (~f | (d > 0)) & (a | (g == 0) | (not layer.shared))
    if whole:  # one expert at a time passes through RAM at least
        fits &= (g == s.neurons) | (d == 0) | (s.neurons - g - d >= layer.width)
    a, p, g, d, f = a[fits], p[fits], g[fits], d[fits], f[fits]
    f = d > 0 if whole else f
    gates, bundles = s.gate_bytes, s.bundle_bytes
    attention_bytes, predictor_bytes = s.attention.bytes + layer.kv_bytes, s.predictor.bytes
    vram = a * (attention_bytes + s.attention.more) + p * predictor_bytes + s.gpu_bytes(g)
    ram = ~a * attention_bytes + ~p * predictor_bytes
    ram = ram + gates(s.neurons - g - f * d) + bundles(s.neurons - g - d)
    vram, ram = vram + (~a & (g > 0)) * s.router.on_gpu, ram + a * s.router.bytes + s.bias_bytes(g + d)
    return Columns(a, p, g, d, f, vram, ram, *layer_times(layer, speeds, work, a, p, g, d, f))


def attention_us(layer: LayerWork, v: Speeds) -> float:
    """On the CPU."""
    kv = layer.kv_read_bytes / (v.tiers.cpu.read_gbs * KV_SHARE * 1e3)
    return float(v.cpu(layer.sizes.attention.reads)) + kv + CALL_US


def stored_times(layer: LayerWork, v: Speeds, work: Work, fetched: Sequence[Fetch]) -> tuple[float, float]:
    """(CPU, what the disk adds to that) of a layer on the CPU.

    Its reads run beside its own FFN, and those that a predictor named beside its attention.
    """
    disk, work = v.tiers.disk, layer.own(work)
    assert disk is not None
    none, no = np.zeros(1, np.int64), np.zeros(1, np.bool_)
    cpu = float(layer_times(layer, v, work, no, no, none, none, no)[1][0])
    attention = attention_us(layer, v)
    beside = cpu - attention + _early_us(attention, work)
    rows, reads, nbytes = (sum(x) for x in zip(*((f.rows, f.reads, f.bytes) for f in fetched), strict=True))
    if not reads:  # in order, in long pieces
        return cpu, max(0.0, nbytes / (disk.read_gbs * 1e3) - (cpu - attention))
    work_us = rows * MISS_US / v.tiers.cpu.threads
    late = work.ffns * (1 - math.exp(-reads / work.ffns))  # those whose last read begins near their end
    last = late * IN_FLIGHT * 1e6 / disk.reads_per_s
    return cpu + work_us, max(0.0, float(_reading_us(disk, reads, nbytes)) - beside - work_us) + last


def launches(on_gpu: str, shared: bool, format: str, work: Work, apart: int = 0) -> tuple[int, int]:
    """Return the kernels of (attention, an FFN) on a GPU. `on_gpu`, `shared`, `apart`: as `LayerWork`'s.

    Attention is a norm, q k v, rope with the store, scores, their spans' join, and out; of few tokens q k v
    does rope and the store, too, and scores are joined at once, but for what is `apart`. An FFN is a norm,
    gate with up, and down, whose sums are joined where it has a row for each neuron. A router is a product
    and the choice. For weights in blocks what makes their inputs writes int8, too. Where both halves have one
    norm, it is one launch fewer: no shape says so.
    """
    mixture = on_gpu != "all" and work.experts > 1
    if work.batch > device_sizes.FEW:
        # Gate, up, the activation, down; or tokens by expert, gate with up, down, the sum of experts. A
        # product makes its input int8 or f16, but not that of rows for each neuron. A router is one, too.
        made, inputs = int(format not in device_sizes.AS_F32), 3 - (on_gpu == "any")
        return 6 + 2 * made, 5 + 2 * mixture + inputs * made + (4 + 3 * made) * shared
    return 4 + apart, 3 + (on_gpu == "any") + 2 * mixture + 2 * shared


def tokens_met(on_gpu: str, work: Work) -> float:
    """Return how many tokens meet a weight of an FFN on a GPU: of many its expert's, in whole tiles.

    `on_gpu`: as `LayerWork`'s.
    """
    if on_gpu == "all" or work.experts == 1 or work.batch <= device_sizes.FEW:
        return work.batch
    tile = device_sizes.PAIRS
    return max(tile, work.batch * work.active / work.ffns + tile / 2)


def layer_times(
    layer: LayerWork, v: Speeds, work: Work, a: Bool, p: Bool, g: I64, d: I64, f: Bool
) -> tuple[F64, F64, F64, F64]:
    """(gpu_us, cpu_us, disk_us, sync_us) of each placement."""
    s, gates, bundles = layer.sizes, layer.reads.gates, layer.reads.bundles
    n, has_gpu, work = s.neurons, v.tiers.gpu is not None, layer.own(work)
    attention = s.attention
    cpu = np.where(a, 0.0, attention_us(layer, v))
    predictor = s.predictor if work.predicts else PartSize()
    asked = v.cpu(predictor.reads, work.routed, tokens=layer.tokens_each(work))
    cpu += np.where(p | (g == n), 0.0, asked)
    rest = _ffn_us(layer, v, gates[n] - gates[g], bundles[n] - bundles[g], layer.tokens_each(work))
    ffn_cpu = rest + np.where(g < n, CALL_US, 0.0)
    ffn_gpu, gpu, sync = np.zeros(len(g)), np.zeros(len(g)), np.zeros(len(g))
    if has_gpu:
        assert v.tiers.gpu is not None
        launch_us = v.tiers.gpu.launch_us
        of_attention, of_ffn = launches(layer.on_gpu, layer.shared, v.format, work, layer.apart)
        here = v.gpu(attention.read_bytes + layer.kv_read_bytes, attention.weights) + of_attention * launch_us
        attends = np.where(a, here, 0.0)
        asking = v.gpu(work.routed * predictor.read_bytes, work.routed * predictor.weights)
        gpu += np.where(p, asking + PREDICTOR_LAUNCHES * launch_us, 0.0)
        # Without a predictor all that are there, but no expert that no token goes to.
        computed = gates[g] if layer.on_gpu == "experts" else np.where(p, gates[g], work.routed * g)
        met = tokens_met(layer.on_gpu, work)
        there = _ffn_us(layer, v, computed, bundles[g], met, on_gpu=True) + of_ffn * launch_us
        begun = layer.begun if work.batch <= device_sizes.FEW else 0
        fewer = np.where(a & (g == n), np.maximum(begun - p, 0), 0)  # a predictor's FFN has its own
        ffn_gpu = np.where(g > 0, there - fewer * launch_us, 0.0)
        if layer.parallel:
            ffn_gpu += attends
        else:
            gpu += attends
        on_gpu, on_cpu = a | p | (g > 0), ~a | (g < n)
        sync = np.where(on_gpu & on_cpu, v.sync(layer.dim), 0.0)
        if layer.parallel:  # then the stream goes there, and what attention had read
            sync += np.where(~a & (g > 0), v.sent(layer.dim), 0.0)
    if layer.on_gpu == "experts":
        disk = experts_us(s, v, bundles[n] - bundles[n - d])
    else:
        disk = disk_us(s.record_bytes, v, bundles[n] - bundles[n - d], d)
        disk += disk_us(s.gate_row_bytes, v, f * (gates[n] - gates[n - d]), d)
    longest = np.maximum(np.maximum(ffn_gpu, ffn_cpu), disk)
    of_disk = (disk == longest) & (disk > 0)
    of_gpu = (ffn_gpu == longest) & ~of_disk & (ffn_gpu > ffn_cpu)
    gpu += np.where(of_gpu, longest, 0.0)
    cpu += np.where(of_gpu | of_disk, 0.0, longest)
    return gpu, cpu, np.where(of_disk, longest, 0.0), sync


def step_us(layer: LayerWork, v: Speeds, work: Work, needed: F64, missed: F64) -> tuple[F64, F64]:
    """`stored_times` of steps whose bundles, and those from disk, were counted: (time, of it waiting)."""
    s, disk, work = layer.sizes, v.tiers.disk, layer.own(work)
    assert disk is not None
    predictor, met = s.predictor if work.predicts else PartSize(), layer.tokens_each(work)
    asked = v.cpu(predictor.reads, work.routed, tokens=met)
    attention = attention_us(layer, v)
    ffn = _ffn_us(layer, v, layer.reads.gates[-1:], needed, met) + CALL_US
    waits = np.minimum(work.ffns, missed) * (IN_FLIGHT * 1e6 / disk.reads_per_s)
    work_us = missed * (MISS_US / v.tiers.cpu.threads)
    beside = ffn + work_us + _early_us(attention, work)
    waited: F64 = np.maximum(0.0, _reading_us(disk, missed, missed * s.record_bytes) - beside) + waits
    return attention + asked + ffn + work_us + waited, waited


def _early_us(attention: float, work: Work) -> float:
    """Return the part of attention's time in which reads go on."""
    return EARLY_SHARE * attention if work.predicts else 0.0


def _reading_us(disk: DiskTier, reads: F64 | float, nbytes: F64 | float) -> F64:
    """Many reads at random: an operation each, and the bytes beyond a page of each."""
    beyond = np.maximum(0.0, np.asarray(nbytes) - reads * PAGE)
    us: F64 = reads * 1e6 / disk.reads_per_s + beyond / (disk.read_gbs * 1e3)
    return us


def _ffn_us(
    layer: LayerWork, v: Speeds, gate_rows: F64, bundle_rows: F64, met: float, *, on_gpu: bool = False
) -> F64:
    """Return the time of so many rows of each kind: the CPU's, or a GPU's. `met`: tokens that meet one."""
    gate, bundle, r = layer.sizes.gate, layer.sizes.bundle, layer.reads
    total: F64 = np.zeros(())
    for rows, each, share in ((gate_rows, gate, r.gate_share), (bundle_rows, bundle, r.bundle_share)):
        if on_gpu:
            total = total + v.gpu(rows * each.read_bytes, rows * each.weights, met)
        else:
            total = total + v.cpu(each.reads, rows, share, met)
    return total


def ffn_cpu_us(layer: LayerWork, v: Speeds, work: Work, gpu: int) -> float:
    """Return the CPU's time for the neurons of an FFN of which the first `gpu` are on a GPU."""
    gates, bundles = (x[-1] - x[gpu] for x in (layer.reads.gates, layer.reads.bundles))
    each = _ffn_us(layer, v, np.array([gates]), np.array([bundles]), layer.tokens_each(work))
    return float(each[0]) + CALL_US * (gpu < layer.sizes.neurons)


def disk_us(row_bytes: int, v: Speeds, needed: F64, of: I64) -> F64:
    """`needed` rows of `of` from disk: each on its own (bound by reads or bytes a second), or in order."""
    disk = v.tiers.disk
    if disk is None:
        return np.zeros(len(needed))
    pages = -(-row_bytes // PAGE)
    each = needed * max(1e6 / disk.reads_per_s, pages * PAGE / (disk.read_gbs * 1e3))
    us: F64 = np.minimum(each, np.where(needed > 0, of * row_bytes / (disk.read_gbs * 1e3), 0.0))
    return us


def experts_us(s: LayerSizes, v: Speeds, needed: F64) -> F64:
    """`needed` neurons of whole experts from disk."""
    disk = v.tiers.disk
    if disk is None:
        return np.zeros(len(needed))
    us: F64 = needed * ((s.record_bytes + s.gate_row_bytes) / (disk.pieced_gbs * 1e3))
    return us


def head_columns(sizes: ModelSizes, v: Speeds, *, gpu: bool) -> Columns:
    """The head in RAM, or on the GPU (a tied one as a copy)."""
    part = sizes.head + PartSize(0, sizes.tied.reads)
    where = np.array([False, True]) if gpu else np.array([False])
    none = np.zeros(len(where), np.int64)
    there = v.gpu(part.read_bytes, part.weights) if gpu else 0.0
    return Columns(
        attention=where,
        predictor=np.zeros(len(where), np.bool_),
        gpu=none,
        disk=none,
        gates=np.zeros(len(where), np.bool_),
        vram_bytes=where * (sizes.head.on_gpu + sizes.tied.on_gpu),
        ram_bytes=~where * sizes.head.bytes,
        gpu_us=np.where(where, there, 0.0),
        cpu_us=np.where(where, 0.0, v.cpu(part.reads)) + v.cpu(sizes.embed.reads),
        disk_us=np.zeros(len(where)),
        sync_us=np.zeros(len(where)),
    )
