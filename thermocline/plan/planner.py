"""`thermocline plan`: which neurons go to the GPU, to RAM, to disk, and how fast a token then is.

Owns the budget, to the byte, and what is said when nothing fits. (model, hotness, machine, budget) -> Plan.
Costs are `cost.py`'s, the choice `solver.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from thermocline.errors import OutOfBudget
from thermocline.machine.tiers import Tiers
from thermocline.model.formats import FORMATS, SMALL
from thermocline.model.sizes import ModelSizes
from thermocline.model.spec import ModelSpec
from thermocline.ops.interface import CPU
from thermocline.plan import cost
from thermocline.plan.cost import F64, Columns, LayerWork, Speeds, Work
from thermocline.plan.hotness import Hotness
from thermocline.plan.memory import GIB, gib_up, reads_from_disk, size_down, size_up
from thermocline.plan.placement import DISK, LayerPlacement, NeuronRange, Placement, gpu
from thermocline.plan.problem import Ask, Problem, divides, takes_experts
from thermocline.plan.solver import Budget, Choice, Group, fits, group, solve, totals

CLUSTERS = 64  # of a layer's neurons: the steps in which they are placed
DISK_CLUSTERS = 20  # where there are three tiers: columns grow with the square
BUCKETS = (1, 2, 4, 8)
TIME_LIMIT_S = 0.6
PREDICTED_ONLY = "predicted only:"  # what a note begins with of a plan that no session loads


@dataclass(frozen=True)
class LayerPlan:
    """The tiers of one layer: its `gpu + ram + disk` neurons, hottest first."""

    attention: str  # gpu or ram; with its keys and values
    predictor: str | None  # gpu or ram
    gpu: int
    ram: int
    disk: int  # bundles; gate rows of these stay in RAM
    disk_gates: int  # of neurons whose gate rows are on disk too
    expert: int = 0  # neurons of an expert, where whole ones are on a GPU or on disk
    further: int = 0  # of `gpu`, those on GPUs beside the first


@dataclass(frozen=True)
class Prediction:
    """One step, `depth` positions into the context, and what its time is spent on."""

    depth: int
    batch: int
    tokens_per_s: float
    gpu_us: float
    cpu_us: float
    disk_us: float
    sync_us: float

    @staticmethod
    def of(work: Work, us: F64) -> Prediction:
        """`us`: as `times_us`."""
        return Prediction(work.depth, work.batch, work.batch * 1e6 / float(us.sum()), *us.tolist())

    @property
    def bound(self) -> str:
        times = {"GPU": self.gpu_us, "CPU": self.cpu_us, "disk": self.disk_us, "sync": self.sync_us}
        return max(times, key=lambda name: times[name])


@dataclass(frozen=True)
class Plan:
    layers: tuple[LayerPlan, ...]
    head: str  # gpu or ram
    bytes: dict[str, dict[str, int]]  # tier -> part -> bytes
    budget: Budget
    predicted: tuple[Prediction, ...]  # with an empty context, half full, full
    buckets: tuple[Prediction, ...]  # other batches, half full, with the same placement
    hot: dict[int, tuple[int, ...]]  # batch -> of each layer, neurons computed without asking its predictor
    share: float  # of the neurons' work that the GPU does
    objective_us: float
    greedy_us: float | None  # what greedy made of it
    notes: tuple[str, ...]
    placement: Placement  # the same, as a session loads it
    further: tuple[int, ...] = ()  # bytes that may be used of each GPU beside the first

    @property
    def tokens_per_s(self) -> float:
        return self.predicted[0].tokens_per_s

    def used(self, tier: str) -> int:
        return sum(self.bytes[tier].values())

    @property
    def allowed(self) -> dict[str, int]:
        """Return the bytes that may be used of each GPU, by its name in the placement."""
        return {gpu(i): n for i, n in enumerate((self.budget.vram_bytes, *self.further)) if n}

    def neurons(self, layer: int, device: str) -> int:
        """Return how many of a layer's neurons, of all its experts, a GPU has."""
        ranges = [r for r in self.placement.layers[layer].ranges if r.device != CPU]
        counts = [r.neurons * (1 if r.whole is None else len(r.whole)) for r in ranges]
        own = sum(n for r, n in zip(ranges, counts, strict=True) if r.device == device)
        return self.layers[layer].gpu * own // sum(counts) if own else 0


def placement_of(
    p: Problem, layers: Sequence[LayerPlan], head: str, nbytes: Mapping[str, Mapping[str, int]]
) -> Placement:
    """Return a plan's layers as a session loads them. Of neurons on disk each expert has as many."""
    where = {"gpu": gpu(0), "ram": CPU, "disk": DISK}

    def shared(neurons: int, experts: int) -> tuple[int, ...]:
        each, more = divmod(neurons, experts)
        return tuple(each + (e < more) for e in range(experts))

    def layer(i: int, x: LayerPlan) -> LayerPlacement:
        experts = max(1, p.spec.ffn(i).experts)
        if x.expert:
            on = [(gpu(0), x.gpu // x.expert)]
            return LayerPlacement(where[x.attention], None, whole_experts(x, p.ranked(i), on))
        ranges = [NeuronRange(gpu(0), x.gpu // experts)] if x.gpu else []
        if rest := x.ram + x.disk:
            slots = shared(x.ram, experts) if x.disk else None
            gates = shared(rest - x.disk_gates, experts) if x.disk_gates else None
            ranges.append(NeuronRange(CPU, rest // experts, slots, gates))
        predictor = None if x.predictor is None else where[x.predictor]
        return LayerPlacement(where[x.attention], predictor, tuple(ranges))

    taken = {where[tier]: dict(parts) for tier, parts in nbytes.items() if parts}
    each = tuple(layer(i, x) for i, x in enumerate(layers))
    return Placement(each, where[head], p.ask.context, p.ask.positions, taken, p.sizes.tables)


def whole_experts(
    x: LayerPlan, ranked: Sequence[int], on: Sequence[tuple[str, int]]
) -> tuple[NeuronRange, ...]:
    """Return the ranges of a layer whose experts are whole. `on`: how many of `ranked` GPUs have, in turn."""
    ranges, end = list[NeuronRange](), 0
    for device, n in on:
        begin, end = end, end + n
        if n:
            ranges.append(NeuronRange(device, x.expert, whole=tuple(sorted(ranked[begin:end]))))
    if others := tuple(sorted(ranked[end:])):
        slots = x.ram // x.expert if x.disk else None
        ranges.append(NeuronRange(CPU, x.expert, experts=slots, whole=others if end else None))
    return tuple(ranges)


# ---- solving it


@dataclass(frozen=True)
class Placed:
    """A choice in the order of the layers: each one's columns and which of them; the head's likewise."""

    layers: tuple[tuple[Columns, int], ...]
    head: tuple[Columns, int]
    choice: Choice
    gpu: bool
    disk: bool


def plan(spec: ModelSpec, sizes: ModelSizes, hotness: Hotness, tiers: Tiers, ask: Ask, gpus: int = 1) -> Plan:
    """Solve the placement, as if every tier were there to the byte: `place.plan` is what a session does.

    `gpus`: how many a session uses; the solver places on the first.
    Raises OutOfBudget with the smallest change that would fit.
    """
    return solved(Problem(spec, sizes, hotness, tiers, ask, gpus))


def solved(problem: Problem) -> Plan:
    """Do as `plan`."""
    return _best(problem, attends=False)


def attending(problem: Problem) -> Plan:
    """Do as `plan`, with all attention on the GPU."""
    return _best(problem, attends=True)


def _best(p: Problem, *, attends: bool) -> Plan:
    """The fastest; on disk only what fits nowhere else, since that never makes a token faster."""
    placed = _place(p, disk=False, attends=attends)
    if placed is None and p.tiers.disk is not None:
        placed = _place(p, disk=True, attends=attends)
    if placed is None:
        raise OutOfBudget(refusal(p))
    return described(p, placed)


def _place(p: Problem, *, disk: bool, attends: bool) -> Placed | None:
    """The best placement, with a GPU where there is one; None where nothing fits.

    Layers that attend to others' keys and values lie where those lie: all on the GPU, or all on the CPU.
    `attends`: all attention is on the GPU.
    """
    if attends:
        return _solved(p, disk=disk, attention=dict.fromkeys(range(p.spec.n_layers), True))
    if not p.spec.kv_shared_layers or p.room(disk=disk).vram_bytes == 0:
        return _solved(p, disk=disk)
    pairs = [(i, p.spec.kv_layer(i)) for i in range(p.spec.n_layers)]
    tied = {layer for pair in pairs if pair[0] != pair[1] for layer in pair}
    ways = (False,) if p.ask.objective == "frequency" else (False, True)
    found = [
        x for there in ways if (x := _solved(p, disk=disk, attention=dict.fromkeys(tied, there))) is not None
    ]
    return min(found, key=lambda x: x.choice.value, default=None)


def _solved(p: Problem, *, disk: bool, attention: Mapping[int, bool] | None = None) -> Placed | None:
    """`attention`: of some layers, whether it is on the GPU."""
    room = p.room(disk=disk)
    groups, of = _groups(p, disk=disk, attention=attention)
    choice = solve(groups, room, time_limit=TIME_LIMIT_S)
    if choice is None:
        return None
    # Of like layers the first take what has the most on the GPU: like placements lie together.
    left = [
        sorted(picks, key=lambda c, x=g.columns: -int(x.vram_bytes[c]))  # type: ignore[misc]
        for g, picks in zip(groups, choice.picks, strict=True)
    ]
    chosen = tuple((groups[i].columns, left[i].pop(0)) for i in of)
    return Placed(chosen[:-1], chosen[-1], choice, any(c.vram_bytes[i] for c, i in chosen), disk)


def _groups(
    p: Problem, *, disk: bool, attention: Mapping[int, bool] | None = None
) -> tuple[list[Group], list[int]]:
    """(the layers and last the head, as groups, the group of each). `attention`: as `_solved`'s."""
    work, room = p.work(), p.room(disk=disk)
    gpu = room.vram_bytes > 0
    v, known = p.speeds(work), attention or {}
    layers = [replace(x, attention_on_gpu=known.get(i)) for i, x in enumerate(p.layers(work))]
    clusters = DISK_CLUSTERS if disk and gpu else CLUSTERS
    made: list[Columns] = []
    for i, layer in enumerate(layers):
        like = next((k for k in range(i) if layers[k].same_as(layer)), None)
        made.append(
            made[like]
            if like is not None
            else cost.layer_columns(layer, v, work, clusters=clusters, gpu=gpu, disk=disk)
        )
    head = cost.head_columns(p.sizes, v, gpu=gpu)
    if p.ask.objective == "frequency":
        return _paper_groups(p, layers, made, head, room.vram_bytes)
    return group([*made, head], [x.us for x in [*made, head]])


# ---- PowerInfer's own objective


def _paper_groups(
    p: Problem, layers: Sequence[LayerWork], made: Sequence[Columns], head: Columns, vram: int
) -> tuple[list[Group], list[int]]:
    """arXiv 2312.12456, (2) to (8): the most activations on the GPU; a layer has none or at least C there.

    Attention, predictors and head come first, in its loader's order, while they fit. Time breaks ties.
    """
    tied, dense = 1e-9, [[False, False] for _ in layers]
    for part in range(2):
        for i, x in enumerate(layers):
            nbytes = x.sizes.predictor.bytes if part else x.sizes.attention.on_gpu + x.kv_bytes
            wanted = bool(np.any(made[i].predictor if part else made[i].attention))
            if wanted and nbytes <= vram:
                vram -= nbytes
                dense[i][part] = True
    on_gpu = len(head) > 1 and int(head.vram_bytes[-1]) <= vram
    columns, values = [], []
    for x, all_columns, (attention, predictor) in zip(layers, made, dense, strict=True):
        least = least_neurons(x, p.speeds(p.work()))
        keep = (all_columns.attention == attention) & (all_columns.predictor == predictor)
        keep &= (all_columns.gpu == 0) | (all_columns.gpu >= least)
        c = all_columns.pick(np.flatnonzero(keep))
        columns.append(c)
        values.append(tied * c.us - x.reads.bundles[c.gpu])
    columns.append(head.pick(np.array([-1 if on_gpu else 0])))
    return group(columns, [*values, tied * columns[-1].us])


def least_neurons(x: LayerWork, v: Speeds) -> float:
    """(4) and (5): C T_gpu + T_sync <= C T_cpu, with T a neuron's bytes over a memory's speed."""
    g = v.tiers.gpu
    if g is None:
        return math.inf
    neuron = x.sizes.gate.read_bytes + x.sizes.bundle.read_bytes
    saved_us = neuron / (v.tiers.cpu.read_gbs * 1e3) - neuron / (g.read_gbs * 1e3)
    return math.ceil(v.sync(x.dim) / saved_us) if saved_us > 0 else math.inf


# ---- what it means


def described(p: Problem, x: Placed) -> Plan:
    parts = _bytes(p, x)
    budget = Budget(p.vram, p.ram)
    vram, ram = sum(parts["gpu"].values()), sum(parts["ram"].values())
    assert vram <= max(0, budget.vram_bytes) and ram <= budget.ram_bytes, (
        "a plan keeps its budget to the byte"
    )
    for (columns, c), sizes in zip(x.layers, p.sizes.layers, strict=True):
        assert columns.gpu[c] + columns.disk[c] <= sizes.neurons, "a neuron is on one tier"
    layers = tuple(_layer(p, i, picked) for i, picked in enumerate(x.layers))
    head = _tier(x.head[0].attention[x.head[1]])
    predicted, buckets = predictions(p, layers, head, gpu=x.gpu)
    return Plan(
        layers=layers,
        head=head,
        bytes=parts,
        budget=budget,
        predicted=predicted,
        buckets=buckets,
        hot={b: tuple(hot_neurons(p, b)) for b in BUCKETS},
        share=gpu_share(p, layers),
        objective_us=x.choice.value,
        greedy_us=x.choice.greedy,
        notes=tuple(_notes(p, x)),
        placement=placement_of(p, layers, head, parts),
    )


def _tier(on_gpu: object) -> str:
    return "gpu" if on_gpu else "ram"


def _layer(p: Problem, layer: int, picked: tuple[Columns, int]) -> LayerPlan:
    c, i = picked
    neurons = p.sizes.layers[layer].neurons
    gpu, disk = int(c.gpu[i]), int(c.disk[i])
    whole = divides(p.spec, layer) == "experts" and bool(gpu or disk)
    predictor = _tier(c.predictor[i]) if p.work().predicts else None
    width, gates = (p.spec.ffn(layer).width, 0) if whole else (0, disk * bool(c.gates[i]))
    return LayerPlan(_tier(c.attention[i]), predictor, gpu, neurons - gpu - disk, disk, gates, width)


def _bytes(p: Problem, x: Placed) -> dict[str, dict[str, int]]:
    """Tier -> part -> bytes; they add up to what the chosen columns take."""
    ram = p.fixed_ram(disk=x.disk)
    tiers = {"gpu": p.fixed_vram() if x.gpu else {}, "ram": ram, "disk": {}}

    def add(tier: str, part: str, nbytes: int) -> None:
        if nbytes:
            tiers[tier][part] = tiers[tier].get(part, 0) + nbytes

    for at, ((c, i), s) in enumerate(zip(x.layers, p.sizes.layers, strict=True)):
        g, d = np.array(int(c.gpu[i])), np.array(int(c.disk[i]))
        on_disk = d * bool(c.gates[i])
        there = bool(c.attention[i])
        add(_tier(there), "attention", s.attention.on_gpu if there else s.attention.bytes)
        add("ram", "routers", s.router.bytes * there)
        add("gpu", "routers", s.router.on_gpu * (bool(g) and not there))
        add("ram", "experts' biases", int(s.bias_bytes(g + d)))
        add(_tier(c.attention[i]), "keys and values", p.kv_layer_bytes(at))
        add(_tier(c.attention[i]), "recurrent states", p.state_layer_bytes(at))
        add(_tier(c.predictor[i]), "predictors", s.predictor.bytes)
        add("gpu", "neurons", int(s.gpu_bytes(g)))
        add("ram", "gate rows", int(s.gate_bytes(s.neurons - g - on_disk)))
        add("disk", "gate rows", int(s.gate_bytes(on_disk)))
        add("ram", "up and down rows", int(s.bundle_bytes(s.neurons - g - d)))
        add("disk", "up and down rows", int(s.bundle_bytes(d)))
    add("disk", "embedding", p.sizes.left_bytes)
    columns, i = x.head
    add("gpu", "head", int(columns.vram_bytes[i]))
    add("ram", "head", int(columns.ram_bytes[i]))
    placed = [*x.layers, x.head]
    fixed = sum(p.fixed_ram(disk=x.disk).values())
    assert sum(ram.values()) == fixed + sum(int(c.ram_bytes[i]) for c, i in placed)
    return tiers


def predictions(
    p: Problem, layers: Sequence[LayerPlan], head: str, *, gpu: bool
) -> tuple[tuple[Prediction, ...], tuple[Prediction, ...]]:
    """Return what `Plan` has as `predicted` and as `buckets`. `gpu`: whether there is one in it."""

    def of(work: Work) -> Prediction:
        return Prediction.of(work, times_us(p, layers, head, work, gpu=gpu))

    depths = tuple(of(p.work(share=share)) for share in (0.0, 0.5, 1.0))
    return depths, tuple(of(p.work(batch=b)) for b in BUCKETS)


def times_us(p: Problem, layers: Sequence[LayerPlan], head: str, work: Work, *, gpu: bool) -> F64:
    """Return how long a step of this placement takes: GPU, CPU, disk and synchronisation."""
    v, total = p.speeds(work), np.zeros(4)
    for x, layer in zip(layers, p.layers(work), strict=True):
        there, counts = (x.attention == "gpu", x.predictor == "gpu"), (x.gpu, x.disk)
        where = (*there, *counts, x.disk_gates > 0)
        times = cost.layer_times(layer, v, work, *(np.array([one]) for one in where))
        total += np.concatenate(times)
        total[3] += hands_over_us(v, p.spec.dim, x)
    of_head, at = cost.head_columns(p.sizes, v, gpu=gpu), int(head == "gpu")
    own = [of_head.gpu_us[at], of_head.cpu_us[at] + cost.TOKEN_US, 0.0, v.sync(p.spec.dim) * gpu]
    return np.asarray(total + own)


def hands_over_us(v: Speeds, dim: int, x: LayerPlan) -> float:
    """Return what a layer's part on a further GPU costs beside computing: with a part of the CPU's nothing
    more, which is handed over at the same time.
    """
    return v.sync(dim) if x.further and not x.ram + x.disk else 0.0


def hot_neurons(p: Problem, batch: int) -> Iterator[int]:
    """Yield, for each layer, how many neurons cost less to compute than to predict; 0: none is predicted."""
    work = p.work(batch=batch)
    for i, s in enumerate(p.sizes.layers):
        if not (work.predicts and s.predictor.bytes and s.neurons and p.spec.sparse):
            yield 0
            continue
        asking = s.predictor.read_bytes / s.neurons / s.gate.read_bytes
        own = work if p.spec.ffn(i).experts > 1 else work.dense
        gates = np.diff(p.reads(p.hotness.key(i), i, own).gates)
        yield int(np.count_nonzero(gates / own.routed + asking >= 1.0))


def gpu_share(p: Problem, layers: Sequence[LayerPlan]) -> float:
    """Return the share of the neurons' work that GPUs do."""
    done = [
        (r.reads.bundles[x.gpu], r.reads.bundles[-1]) for x, r in zip(layers, p.layers(p.work()), strict=True)
    ]
    whole = sum(float(w) for _, w in done)
    return sum(float(on) for on, _ in done) / whole if whole else 0.0


def _notes(p: Problem, x: Placed) -> Iterator[str]:
    """Yield the assumptions that a reader of the plan should know."""
    if p.spec.sparse:
        yield f"hotness: {p.hotness.source}"
    elif p.ask.sparsity != "off":
        yield f"{p.spec.activation} has no inactive neurons: every token computes all of them"
    if assumed := p.tiers.assumed(p.sizes.formats):
        yield assumed
    if p.sizes.tables:
        yield f"of {' and '.join(p.sizes.tables)} a row is read from disk for each token"
    if p.work().predicts and not any(s.predictor.bytes for s in p.sizes.layers):
        yield "there are no predictors: they are taken to cost nothing"
    if p.work().predicts:
        known = "name" if p.hotness.excess is not None else "are taken to name"
        yield f"predictors {known} {p.excess:.3g} neurons for an active one"
    if p.tiers.gpu is not None and p.vram > 0 and not x.gpu:
        worth = "would not make a token faster" if p.room(disk=False).vram_bytes else "is too small"
        yield f"the GPU is not used: with {p.vram / GIB:.2f} GiB it {worth}"
    if x.disk and (left := reads_from_disk(p.spec, gpu=p.vram > 0)) is None:
        why = "some layers have a state or no neurons" if p.spec.sparse else "its neurons cannot be skipped"
        yield f"{PREDICTED_ONLY} {why}, so this version leaves none on disk"
    elif x.disk and p.vram and (left == "rows" or (left == "experts" and not takes_experts(p.spec))):
        what = "experts" if left == "experts" else "rows of FFNs"
        yield f"{PREDICTED_ONLY} beside a GPU this version leaves no {what} on disk"
    if any(c.gpu[i] for c, i in x.layers) and takes_experts(p.spec):
        which = "the first of each layer; `thermocline profile` finds those that are chosen most"
        if p.routing is not None:
            which = f"those that are chosen most, by its profile of {p.routing.tokens:,} tokens"
        yield f"experts on the GPU are {which}"
    if p.tiers.disk is None:
        yield "without a disk, of which there are no figures: everything fits in memory"
    if p.sizes.weights_bytes <= p.tiers.cpu.cache_bytes:
        yield "the model fits in the CPU's cache: it will be faster than predicted from memory's speed"


# ---- when nothing fits, and when there were more


def refusal(p: Problem) -> str:
    """Return the need, the budget, and the smallest changes that would fit, of one memory or the context."""
    need, vram_need = least_ram(p), least_vram(p)
    changes = [f"--ram {gib_up(need)}"]
    if p.tiers.gpu is not None and vram_need is not None:
        enough = vram_need <= p.tiers.gpu.vram_bytes
        changes.append(
            f"{'--vram' if enough else 'a GPU with'} {gib_up(vram_need)}{'' if enough else ' GiB'}"
        )
    if context := _largest_context(p):
        changes.append(f"--ctx {context}")
    elif FORMATS[p.sizes.format].bits > FORMATS[SMALL].bits:
        changes.append(f"a smaller weight format (--format {SMALL})")
    vram = f" beside {p.vram / GIB:.2f} GiB of VRAM" if p.vram else ""
    disk = "" if p.tiers.disk is not None else ", and the hardware has no disk to keep cold neurons on"
    return (
        f"the model needs {size_up(need)} of RAM{vram}, {size_down(p.ram)} is allowed{disk}; "
        f"the smallest change that fits: {' or '.join(changes)}"
    )


def least_ram(p: Problem) -> int:
    """Bytes of RAM below which nothing fits, with this VRAM and with disk where there is one."""
    disk = p.tiers.disk is not None
    groups, _ = _groups(p, disk=disk)
    ram = [Group(g.columns, g.count, g.columns.ram_bytes / 2**20) for g in groups]
    found = solve(ram, Budget(p.room(disk=disk).vram_bytes, 1 << 62), time_limit=TIME_LIMIT_S, gap=0.0)
    assert found is not None, "RAM without end holds everything"
    return totals(groups, found.picks)[2] + sum(p.fixed_ram(disk=disk).values())


def least_vram(p: Problem) -> int | None:
    """Bytes of VRAM below which nothing fits, with this RAM and any disk; None: nothing does."""
    disk = p.tiers.disk is not None
    endless = replace(p, ask=replace(p.ask, vram_bytes=1 << 62))
    groups, _ = _groups(endless, disk=disk)
    vram = [Group(g.columns, g.count, g.columns.vram_bytes / 2**20) for g in groups]
    found = solve(vram, endless.room(disk=disk), time_limit=TIME_LIMIT_S, gap=0.0)
    return None if found is None else totals(groups, found.picks)[1] + sum(p.fixed_vram().values())


def _largest_context(p: Problem) -> int:
    """The longest shorter context with which it fits, in steps of 32 tokens; 0: none."""
    low, high, disk = 0, p.ask.context // 32, p.tiers.disk is not None
    while high - low > 1:
        middle = (low + high) // 2
        shorter = replace(p, ask=replace(p.ask, context=32 * middle))
        low, high = (middle, high) if fits_in(shorter, disk) else (low, middle)
    return 32 * low


def fits_in(p: Problem, disk: bool) -> bool:
    return fits(_groups(p, disk=disk)[0], p.room(disk=disk))
