"""A pack in several memories: GPUs have their rows in their own, the rest is in an arena."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from thermocline.model.sizes import aligned, gpu_stride
from thermocline.model.tensors import bundle_parts
from thermocline.ops import device_sizes
from thermocline.ops.device_layers import FIRST_GPU, DevicePredictor
from thermocline.ops.device_rows import DeviceRows
from thermocline.ops.interface import CPU, FFN, FFNPart, Layer, Linear, Weights, gpu_index
from thermocline.pack import blocks
from thermocline.plan.placement import ATTENTION, LayerPlacement, NeuronRange, Placement
from thermocline.plan.problem import divides
from thermocline.session import expert_store, weights
from thermocline.session.store import OnDisk, Store, opened

if TYPE_CHECKING:
    from thermocline import _native
    from thermocline.model.spec import ModelSpec
    from thermocline.model.tensors import TensorInfo
    from thermocline.ops.cpu import CpuOps
    from thermocline.ops.device import Device
    from thermocline.pack.checksums import NeuronChecksums
    from thermocline.pack.pack import Pack
    from thermocline.pack.predictor import Predictors, StoredMatrix, StoredPredictor
    from thermocline.pack.stored_model import Progress, StoredModel
    from thermocline.plan.disk.disk_split import Arrangement
    from thermocline.plan.disk.expert_split import ExpertSplit

OnGpus = Mapping[str, Mapping[str, DeviceRows]]  # by name and device
N = TypeVar("N", bound=np.generic)
SLABS = ("gate.weight", "up.weight", "down.weight")  # of an expert as plain matrices
STAGED_BYTES = 64 << 20  # on their way from the file to the device


@dataclass(frozen=True)
class Split:
    """The rows of each of a tensor's equal parts: the first ones go to GPUs, the others to the arena."""

    name: str
    there: tuple[tuple[str, int], ...]  # (device, rows of each part), one behind the other
    kept: bool  # whether the others are in the arena
    parts: int = 1
    # Parts that go to each of these GPUs as a whole; None: some rows of each part.
    whole: tuple[tuple[int, ...], ...] | None = None

    def sent(self) -> Iterator[tuple[str, Sequence[int], range]]:
        """Yield what goes to GPUs: (device, which parts, rows of each)."""
        first = 0
        for i, (device, rows) in enumerate(self.there):
            if self.whole is not None:
                yield device, self.whole[i], range(rows)
                continue
            yield device, range(self.parts), range(first, first + rows)
            first += rows

    @property
    def gone(self) -> frozenset[int]:
        """The parts that are on GPUs as a whole."""
        return frozenset(e for which in self.whole or () for e in which)

    def left(self, part: int, rows: int) -> int:
        """Return how many of a part's `rows` first rows are not in the arena."""
        if self.whole is not None:
            return rows if part in self.gone else 0
        return sum(n for _, n in self.there)


def everywhere(spec: ModelSpec) -> Placement:
    """Return the placement of a whole model on the first GPU, but for experts under a norm of their own."""

    def layer(i: int) -> LayerPlacement:
        how, (experts, _, width) = divides(spec, i), spec.ffn(i)
        whole = tuple(range(experts)) if how == "experts" else None
        ffn = NeuronRange(CPU if how == "none" else FIRST_GPU, width, whole=whole)
        return LayerPlacement(FIRST_GPU, FIRST_GPU, (ffn,) if width else ())

    return Placement(tuple(map(layer, range(spec.n_layers))), FIRST_GPU)


def gpu_ranges(p: LayerPlacement) -> list[NeuronRange]:
    return [r for r in p.ranges if r.device != CPU and r.neurons]


def gpu_neurons(p: LayerPlacement) -> int:
    """Return how many neurons of each expert are on GPUs."""
    return sum(r.neurons for r in gpu_ranges(p))


def check(spec: ModelSpec, placement: Placement, gpus: int) -> None:
    """Assert that a placement is one that `load` can carry out."""
    beside = (CPU, FIRST_GPU)
    assert placement.head in beside, "the head is on the first GPU or in RAM"
    for i, p in enumerate(placement.layers):
        assert p.attention in beside and p.predictor in (*beside, None), "only neurons are on further GPUs"
        on = [r.device for r in p.ranges if r.neurons]
        assert len(set(on)) == len(on) and CPU not in on[:-1], "a range for each device, the CPU's last"
        assert all(gpu_index(r.device) < gpus for r in gpu_ranges(p)), "a GPU that this session does not have"
        experts, _, width = spec.ffn(i)
        if p.whole:
            assert not spec.sparse, "experts that skip neurons are divided"
            found = sorted(e for r in p.ranges for e in r.whole or ())
            assert found == list(range(experts)), "each expert is in one range"
            assert all(r.neurons == width for r in p.ranges), "they are whole"
        else:
            assert spec.sparse or len(on) <= 1, "only neurons that can be skipped are divided"
            assert sum(r.neurons for r in p.ranges) == width, "ranges add up to the FFN's neurons"
        assert p.attention == placement.layers[spec.kv_layer(i)].attention, "keys and values are in one place"
        assert not spec.shared_dim or p.attention == FIRST_GPU or not gpu_ranges(p), "the shared FFN is there"


def splits(spec: ModelSpec, tensors: Mapping[str, TensorInfo], placement: Placement) -> Iterator[Split]:
    for name, t in tensors.items():
        if ".predictor." in name or name.endswith((".activation_count", ".order")):
            continue
        rows = t.bytes // t.stride
        if not name.startswith("layers."):
            device = placement.head if name == "head.weight" else CPU
            yield _whole(name, rows, device)
            # Of a tied head there are two: embeddings are looked up in RAM.
            if name == "embed.weight" and spec.tied_head and placement.head != CPU:
                yield _whole(name, rows, placement.head)
            continue
        _, layer, part = name.split(".", 2)
        here, (experts, _, width) = placement.layers[int(layer)], spec.ffn(int(layer))
        ranges = gpu_ranges(here)
        if here.whole and part in SLABS:
            each = tuple((r.device, rows // experts) for r in ranges)
            whole = tuple(r.whole or () for r in ranges)
            yield Split(name, each, len(here.whole) < experts, experts, whole)
        elif part in ATTENTION or part in spec.mixer_matrices(int(layer)):
            yield _whole(name, rows, here.attention)
        elif part in ("gate.weight", "bundle"):
            alone = [r.neurons for r in ranges] == [width]  # then it goes as a whole
            parts = experts if ranges and not alone else 1
            there = tuple((r.device, r.neurons * experts // parts) for r in ranges)
            yield Split(name, there, kept=gpu_neurons(here) < width, parts=parts)
        elif part in ("up.weight", "down.weight"):  # without bundles: all or nothing
            yield _whole(name, rows, ranges[0].device if ranges else CPU)
        else:
            yield _whole(name, rows, CPU)
            # It is used there; the CPU's experts know its shape.
            if part == "router.weight" and (ranges or here.attention != CPU):
                yield _whole(name, rows, FIRST_GPU)


def _whole(name: str, rows: int, device: str) -> Split:
    return Split(name, () if device == CPU else ((device, rows),), kept=device == CPU)


def load(
    pack: StoredModel,
    placement: Placement,
    devices: Sequence[Device],
    cpu: CpuOps,
    *,
    predictors: Predictors | None = None,
    progress: Progress | None = None,
) -> Weights:
    """Read and check a pack. Raises as `weights.load` does, and DeviceFailure."""
    check(pack.spec, placement, len(devices))
    found = list(splits(pack.spec, pack.tensors, placement))
    there = _all_sent(pack, found, devices, sum(_kept_bytes(pack, s) for s in found), progress)
    kept: dict[str, TensorInfo] = {}
    runs: list[tuple[int, int, int]] = []
    end = 0
    for s in found:
        t = pack.tensors[s.name]
        if s.kept:
            at, part = end, t.bytes // s.parts
            for i, begin in enumerate(range(t.offset, t.offset + t.bytes, part)):
                first = begin + s.left(i, part // t.stride) * t.stride
                runs.append((first, begin + part, at))
                at += begin + part - first
            shape = _kept_shape(s, t)
            kept[s.name] = replace(t, shape=shape, offset=end, bytes=at - end)
            end += aligned(at - end)
    arena = blocks.new_arena(end, str(pack.path))
    sent = sum(r.rows * pack.tensors[n].stride for n, each in there.items() for r in each.values())
    pack.read_runs(arena, runs, _after(sent, progress))
    arena.gather_pages()
    in_memory = weights.PackInMemory(pack.spec, kept, arena, cpu, there, whole=whole_experts(placement))
    made = weights.assemble(in_memory, str(pack.path))
    made = _with_pinned(made, pack.spec, kept, arena, devices[0])
    return _completed(made, pack.spec, placement, there, predictors, devices)


def load_in_part(
    pack: Pack,
    placement: Placement,
    a: Arrangement,
    records: NeuronChecksums,
    devices: Sequence[Device],
    cpu: CpuOps,
    *,
    predictors: Predictors | None = None,
    progress: Progress | None = None,
) -> tuple[Weights, Store]:
    """Do what `load` does where the rest is larger than RAM: neurons that `a` has no slots for come from disk
    when they are needed.
    """
    check(pack.spec, placement, len(devices))
    there = _all_sent(pack, list(splits(pack.spec, pack.tensors, placement)), devices, 0, progress)
    made, store, _ = opened(pack, a, records, cpu, on_gpus=there, progress=progress)
    return _completed(made, pack.spec, placement, there, predictors, devices), store


def load_experts_in_part(
    model: StoredModel,
    placement: Placement,
    s: ExpertSplit,
    devices: Sequence[Device],
    cpu: CpuOps,
    *,
    threads: int,
    progress: Progress | None = None,
) -> tuple[Weights, OnDisk]:
    """Do what `load` does where RAM has not all the experts that are on no GPU: others come from disk."""
    check(model.spec, placement, len(devices))
    there = _all_sent(model, list(splits(model.spec, model.tensors, placement)), devices, 0, progress)
    made, store, _ = expert_store.opened(
        model, s, cpu, threads=threads, on_gpus=there, whole=whole_experts(placement), progress=progress
    )
    return _completed(made, model.spec, placement, there, None, devices), store


def _completed(
    made: Weights,
    spec: ModelSpec,
    placement: Placement,
    there: OnGpus,
    predictors: Predictors | None,
    devices: Sequence[Device],
) -> Weights:
    if spec.tied_head and placement.head != CPU:
        made = replace(made, head=replace(made.head, weight=there["embed.weight"][placement.head]))
    return made if predictors is None else _with_predictors(made, spec, placement, predictors, devices[0])


def whole_experts(placement: Placement) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the experts that GPUs have whole, by layer and device."""
    return {
        f"layers.{i}": {r.device: r.whole for r in gpu_ranges(x) if r.whole is not None}
        for i, x in enumerate(placement.layers)
        if x.whole
    }


def _kept_shape(s: Split, t: TensorInfo) -> tuple[int, ...]:
    """Return the shape of what the arena has of a tensor."""
    if s.whole is not None:
        return (s.parts - len(s.gone), *t.shape[1:])
    rows = s.left(0, 0)
    return (t.shape[0], t.shape[1] - rows, *t.shape[2:]) if rows else t.shape


def _after(begun: int, progress: Progress | None) -> Progress | None:
    """Return the progress of a read that follows `begun` bytes."""
    return None if progress is None else lambda done, size: progress(begun + done, begun + size)


def _all_sent(
    pack: StoredModel,
    found: Sequence[Split],
    devices: Sequence[Device],
    more_bytes: int,
    progress: Progress | None,
) -> dict[str, dict[str, DeviceRows]]:
    """Send the GPUs their rows; -> these, by name and device. `more_bytes`: read after them."""
    sizes = [(pack.tensors[s.name], len(parts), len(rows)) for s in found for _, parts, rows in s.sent()]
    most = max((rows * _staged_bytes(t) for t, _, rows in sizes), default=0)
    staging = blocks.new_arena(min(most, STAGED_BYTES), "weights on their way")
    done, size = 0, sum(parts * rows * t.stride for t, parts, rows in sizes) + more_bytes

    def more(n: int) -> None:
        nonlocal done
        done += n
        if progress is not None:
            progress(done, size)

    there: dict[str, dict[str, DeviceRows]] = {}
    for s in found:
        for name, parts, rows in s.sent():
            which = _Which(pack.tensors[s.name], s.parts, parts, rows)
            sent = _sent(pack, which, devices[gpu_index(name)], staging, more)
            there.setdefault(s.name, {})[name] = _rows(sent, s.name, which.tensor, pack.spec)
    return there


def _rows(data: torch.Tensor, name: str, t: TensorInfo, spec: ModelSpec) -> DeviceRows:
    """Return rows of a tensor, of which `data` has the bytes."""
    if not name.endswith(".bundle"):
        return DeviceRows(data, t.format, t.shape[-1])
    up, down = bundle_parts(t, spec)
    return DeviceRows(data, t.format, spec.dim, down=None if up is None else down)


def _with_pinned(
    made: Weights, spec: ModelSpec, kept: Mapping[str, TensorInfo], arena: _native.Arena, device: Device
) -> Weights:
    """Let layers that are divided send their other neurons to the first GPU, too: for prompts.

    So do mixtures whose router is there with experts that it has not.
    """

    def divided(layer: Layer) -> bool:
        f = next(iter(layer.experts), None)
        return f is not None and len(f.parts) > 1 and f.on(CPU) is not None

    def sent(i: int, layer: Layer) -> bool:
        return FIRST_GPU in layer.router_copies and _fits_pieces(i, kept, device_sizes.piece_bytes(spec))

    if not any(divided(x) or sent(i, x) for i, x in enumerate(made.layers)):
        return made
    if not device.register(arena.address, arena.nbytes):
        return made
    here = _bytes_at(arena)

    def rows(name: str) -> DeviceRows:
        t = kept[name]
        return _rows(here[t.offset : t.offset + t.bytes].view(-1, t.stride), name, t, spec)

    def pinned(i: int, experts: tuple[FFN, ...]) -> Iterator[FFN]:
        gates, bundles = rows(f"layers.{i}.gate.weight"), rows(f"layers.{i}.bundle")
        for e, f in enumerate(experts):
            gate, bundle = (x.part(e, len(experts)) for x in (gates, bundles))
            part = f.on(CPU)
            assert part is not None
            again = FFNPart(Linear(gate, None), *weights.records(bundle))
            yield f.with_part(replace(part, pinned=again))

    def layer(i: int, x: Layer) -> Layer:
        if divided(x):
            return replace(x, experts=tuple(pinned(i, x.experts)))
        if not sent(i, x):
            return x
        slabs = [rows(name) for name in _slabs(i, kept)]
        return replace(x, experts=tuple(_whole_pinned(x.experts, slabs)))

    return replace(made, layers=tuple(layer(i, x) for i, x in enumerate(made.layers)))


def _slabs(layer: int, kept: Mapping[str, TensorInfo]) -> list[str]:
    """Return the tensors of a layer's experts in RAM: gate, up if there is one, down."""
    return [n for n in (f"layers.{layer}.{part}" for part in SLABS) if n in kept]


def _fits_pieces(layer: int, kept: Mapping[str, TensorInfo], room: int) -> bool:
    """Return whether gate and up of an expert in RAM fit in a buffer together, and down in the next."""
    if f"layers.{layer}.down.weight" not in kept:
        return False  # all are on the GPU, or in bundles
    each = [kept[n].bytes // kept[n].shape[0] for n in _slabs(layer, kept)]
    return max(sum(each[:-1]), each[-1]) <= room


def _whole_pinned(experts: Sequence[FFN], slabs: Sequence[DeviceRows]) -> Iterator[FFN]:
    """Yield a layer's experts, those in RAM with their rows there as a GPU reads them."""
    n, at = sum(f.on(CPU) is not None for f in experts), 0
    for f in experts:
        if (part := f.on(CPU)) is None:
            yield f
            continue
        gate, *up, down = (x.part(at, n) for x in slabs)
        again = FFNPart(Linear(gate, None), up[0] if up else None, down)
        yield f.with_part(replace(part, pinned=again))
        at += 1


def _bytes_at(arena: _native.Arena) -> torch.Tensor:
    """Return the arena as a tensor, which does not keep it: its matrices do."""
    window = (ctypes.c_uint8 * arena.nbytes).from_address(arena.address)
    return torch.from_numpy(np.ctypeslib.as_array(window))


def _kept_bytes(pack: StoredModel, s: Split) -> int:
    t = pack.tensors[s.name]
    rows = t.bytes // t.stride // s.parts
    return sum(rows - s.left(i, rows) for i in range(s.parts)) * t.stride if s.kept else 0


@dataclass(frozen=True)
class _Which:
    """Rows of `sent` ones of a tensor's equal parts: the same of each."""

    tensor: TensorInfo
    parts: int
    sent: Sequence[int]
    rows: range


def _sent(
    pack: StoredModel, which: _Which, device: Device, staging: _native.Arena, more: Callable[[int], None]
) -> torch.Tensor:
    """Send rows to a device; -> these there, [sent parts * rows, `gpu_stride`]."""
    t, n, wide = which.tensor, len(which.rows), gpu_stride(which.tensor.stride)
    made: torch.Tensor = device.zeros((len(which.sent) * n, wide), torch.uint8)
    here, step = _bytes_at(staging), max(1, staging.nbytes // _staged_bytes(t))
    for part, to in zip(which.sent, made.view(len(which.sent), n, wide), strict=True):
        first = t.offset + part * (t.bytes // which.parts) + which.rows.start * t.stride
        for begin in range(0, n, step):
            rows = min(step, n - begin)
            size, at = rows * t.stride, first + begin * t.stride
            pack.read_runs(staging, [(at, at + size, 0)])
            read = here[:size].view(rows, t.stride)
            if wide != t.stride:
                apart = here[size : size + rows * wide].view(rows, wide)
                apart[:, t.stride :] = 0
                apart[:, : t.stride] = read
                read = apart
            device.put(to[begin : begin + rows], read)
            more(size)
    return made


def _staged_bytes(t: TensorInfo) -> int:
    """Return the bytes of a row on its way: as it is read, and as the GPU has it if that is more."""
    wide = gpu_stride(t.stride)
    return t.stride if wide == t.stride else t.stride + wide


# ---- predictors


def _with_predictors(
    made: Weights, spec: ModelSpec, placement: Placement, predictors: Predictors, device: Device
) -> Weights:
    """Give layers that have theirs on the first GPU those of all neurons, others those of neurons in RAM.

    A mixture's are in RAM.
    """
    stored = [predictors.stored(i) for i in range(predictors.count)]
    there = [p.predictor == FIRST_GPU and spec.n_experts == 1 for p in placement.layers]
    on_cpu = [
        None if p is None or asked else cut(p, gpu_neurons(x))
        for p, x, asked in zip(stored, placement.layers, there, strict=True)
    ]
    made = weights.with_stored(made, on_cpu)
    layers = []
    for layer, asked, p in zip(made.layers, there, stored, strict=True):
        if p is not None and asked:
            (f,) = layer.experts
            layer = replace(layer, experts=(replace(f, predictor=_on_device(p, device)),))
        layers.append(layer)
    return replace(made, layers=tuple(layers))


def with_tried(
    made: Weights, spec: ModelSpec, placement: Placement, predictors: Predictors, device: Device
) -> Weights:
    """Return loaded weights with these predictors, on the first GPU where it has a part of a layer.

    There they guess for all neurons, wherever these are. A plan may leave the GPU's unasked: the trial is of
    what the CPU alone would compute.
    """

    def there(x: LayerPlacement) -> bool:
        return x.attention == FIRST_GPU or gpu_neurons(x) > 0

    layers = tuple(replace(x, predictor=FIRST_GPU if there(x) else CPU) for x in placement.layers)
    return _with_predictors(made, spec, replace(placement, layers=layers), predictors, device)


def cut(p: StoredPredictor, first: int) -> StoredPredictor | None:
    """Return a predictor of each expert's neurons from `first` on; None if there are none."""
    if first * p.experts == len(p.threshold):
        return None

    def rest(of_all: NDArray[N]) -> NDArray[N]:
        each = of_all.reshape(p.experts, -1, *of_all.shape[1:])[:, first:]
        return np.ascontiguousarray(each).reshape(-1, *of_all.shape[1:])

    second = replace(p.second, rows=rest(p.second.rows))
    return replace(p, second=second, threshold=rest(p.threshold), hot=max(0, p.hot - first))


def _on_device(p: StoredPredictor, device: Device) -> DevicePredictor:
    def rows(m: StoredMatrix) -> DeviceRows:
        data = device.zeros(m.rows.shape, torch.uint8)
        device.put(data, torch.from_numpy(np.ascontiguousarray(m.rows)))
        return DeviceRows(data, m.format, m.columns)

    threshold = device.zeros(p.threshold.shape, torch.float32)
    device.put(threshold, torch.from_numpy(p.threshold))
    first = None if p.first is None else rows(p.first)
    return DevicePredictor(first, rows(p.second), threshold, p.hot, p.kind == "mlp")
