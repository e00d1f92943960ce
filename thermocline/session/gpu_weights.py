"""A pack in two memories: what the GPU computes in its own, the rest in an arena.

Owns which bytes go where. Knows torch; must not know requests, flags or how placements are found.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from thermocline import _native
from thermocline.model.sizes import aligned
from thermocline.model.spec import ModelSpec
from thermocline.model.tensors import TensorInfo
from thermocline.ops.cpu import CpuOps
from thermocline.ops.device import Device
from thermocline.ops.device_layers import DevicePredictor
from thermocline.ops.device_rows import Rows
from thermocline.ops.interface import FFN, Layer, Weights
from thermocline.pack import blocks
from thermocline.pack.checksums import NeuronChecksums
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import Predictors, StoredMatrix, StoredPredictor
from thermocline.plan.disk_split import Arrangement
from thermocline.session import weights
from thermocline.session.store import Progress, Store, fill_runs, opened

STAGED_BYTES = 64 << 20  # on their way from the file to the device


@dataclass(frozen=True)
class LayerPlace:
    """What of a layer is on the GPU."""

    attention: bool
    predictor: bool  # a mixture's stays beside the neurons in RAM
    neurons: int  # the first; of a mixture's all, the first of each expert, as many


@dataclass(frozen=True)
class Places:
    layers: tuple[LayerPlace, ...]
    head: bool

    @staticmethod
    def all_of(n_layers: int, neurons: int) -> Places:
        return Places((LayerPlace(True, True, neurons),) * n_layers, True)


@dataclass(frozen=True)
class Split:
    """Of each of a tensor's equal parts: rows [0, there) go to the device; the others, if `kept`, are in the
    arena.
    """

    name: str
    there: int
    kept: bool
    parts: int = 1


def splits(spec: ModelSpec, tensors: Mapping[str, TensorInfo], places: Places) -> Iterator[Split]:
    for name, t in tensors.items():
        if ".predictor." in name or name.endswith((".activation_count", ".order")):
            continue
        rows = t.bytes // t.stride
        if not name.startswith("layers."):
            on_device = name == "head.weight" and places.head
            # Of a tied head there are two: embeddings are looked up in RAM.
            yield Split(name, rows * on_device, kept=not on_device)
            if name == "embed.weight" and spec.tied_head and places.head:
                yield Split(name, rows, kept=False)
            continue
        _, layer, part = name.split(".", 2)
        here, experts = places.layers[int(layer)], spec.n_experts
        if part in ("qkv.weight", "attn_out.weight"):
            yield Split(name, rows * here.attention, kept=not here.attention)
        elif part in ("gate.weight", "bundle"):
            each = here.neurons // experts
            parts = experts if 0 < each < spec.ffn_dim else 1  # else it goes as a whole
            yield Split(name, here.neurons // parts, kept=each < spec.ffn_dim, parts=parts)
        elif part in ("up.weight", "down.weight"):  # without bundles: all or nothing
            on_device = here.neurons == experts * spec.ffn_dim
            yield Split(name, rows * on_device, kept=not on_device)
        else:
            yield Split(name, 0, kept=True)
            if part == "router.weight" and here.neurons:  # it is used there; the CPU's experts know its shape
                yield Split(name, rows, kept=False)


def load(
    pack: Pack,
    places: Places,
    device: Device,
    cpu: CpuOps,
    *,
    predictors: Predictors | None = None,
    progress: Progress | None = None,
) -> Weights:
    """Read and checked. Raises as `weights.load` does, and DeviceFailure."""
    found = list(splits(pack.spec, pack.tensors, places))
    kept_bytes = sum(_kept_bytes(pack, s) for s in found)
    there = _all_sent(pack, found, device, kept_bytes, progress)
    kept: dict[str, TensorInfo] = {}
    runs: list[tuple[int, int, int]] = []
    end = 0
    for s in found:
        t = pack.tensors[s.name]
        if s.kept:
            shape = t.shape if not s.there else (t.shape[0], t.shape[1] - s.there, *t.shape[2:])
            at, part = end, t.bytes // s.parts
            for begin in range(t.offset, t.offset + t.bytes, part):
                first = begin + s.there * t.stride
                runs.append((first, begin + part, at))
                at += begin + part - first
            kept[s.name] = replace(t, shape=shape, offset=end, bytes=at - end)
            end += aligned(at - end)
    arena = blocks.new_arena(end, str(pack.path))
    fill_runs(arena, pack, runs, _after(sum(r.data.numel() for r in there.values()), progress))
    arena.gather_pages()
    made = _with_senders(weights.assemble(pack.spec, kept, arena, cpu, there), kept, arena, device)
    return _completed(made, pack.spec, places, there, predictors, device)


def load_in_part(
    pack: Pack,
    places: Places,
    a: Arrangement,
    records: NeuronChecksums,
    device: Device,
    cpu: CpuOps,
    *,
    predictors: Predictors | None = None,
    progress: Progress | None = None,
) -> tuple[Weights, Store]:
    """`load` where what is not on the device is larger than RAM: neurons that `a` has no places for come from
    disk when they are needed.
    """
    there = _all_sent(pack, list(splits(pack.spec, pack.tensors, places)), device, 0, progress)
    made, store, _ = opened(pack, a, records, cpu, elsewhere=there, progress=progress)
    return _completed(made, pack.spec, places, there, predictors, device), store


def _completed(
    made: Weights,
    spec: ModelSpec,
    places: Places,
    there: Mapping[str, Rows],
    predictors: Predictors | None,
    device: Device,
) -> Weights:
    if spec.tied_head and places.head:
        made = replace(made, head=replace(made.head, weight=there["embed.weight"]))
    return made if predictors is None else _with_predictors(made, places, predictors, device)


def _after(begun: int, progress: Progress | None) -> Progress | None:
    """Of what follows `begun` bytes."""
    return None if progress is None else lambda done, size: progress(begun + done, begun + size)


def _all_sent(
    pack: Pack, found: Sequence[Split], device: Device, more_bytes: int, progress: Progress | None
) -> dict[str, Rows]:
    """What of the tensors is to be on the device. `more_bytes`: what is read after them."""
    sizes = [(s.parts, s.there * pack.tensors[s.name].stride) for s in found if s.there]
    most = max((part for _, part in sizes), default=0)
    staging = blocks.new_arena(min(most, STAGED_BYTES), "weights on their way")
    done, size = 0, sum(parts * part for parts, part in sizes) + more_bytes

    def more(n: int) -> None:
        nonlocal done
        done += n
        if progress is not None:
            progress(done, size)

    there: dict[str, Rows] = {}
    for s in found:
        if s.there:
            there[s.name] = _sent(pack, pack.tensors[s.name], s, device, staging, more)
    return there


def _with_senders(
    made: Weights, kept: Mapping[str, TensorInfo], arena: _native.Arena, device: Device
) -> Weights:
    """Layers that are divided can send their other neurons to the device, too: for prompts."""
    if not any(x.experts[0].hot is not None for x in made.layers):
        return made
    device.register(arena.address, arena.nbytes)
    here = _bytes_at(arena)

    def rows(name: str, columns: int) -> Rows:
        t = kept[name]
        return Rows(here[t.offset : t.offset + t.bytes].view(-1, t.stride), t.format, columns)

    def senders(i: int, experts: tuple[FFN, ...]) -> Iterator[FFN]:
        if experts[0].hot is None:
            yield from experts
            return
        dim = experts[0].gate.weight.shape[1]
        both = rows(f"layers.{i}.gate.weight", dim), rows(f"layers.{i}.bundle", dim)
        for e, f in enumerate(experts):
            gate, bundle = (x.part(e, len(experts)) for x in both)
            yield replace(f, sent=(gate, bundle))

    layers = (replace(x, experts=tuple(senders(i, x.experts))) for i, x in enumerate(made.layers))
    return replace(made, layers=tuple(layers))


def _bytes_at(arena: _native.Arena) -> torch.Tensor:
    """The arena as a tensor, which does not keep it: its matrices do."""
    window = (ctypes.c_uint8 * arena.nbytes).from_address(arena.address)
    return torch.from_numpy(np.ctypeslib.as_array(window))


def _kept_bytes(pack: Pack, s: Split) -> int:
    t = pack.tensors[s.name]
    return t.bytes - s.parts * s.there * t.stride if s.kept else 0


def _sent(
    pack: Pack, t: TensorInfo, s: Split, device: Device, staging: _native.Arena, more: Callable[[int], None]
) -> Rows:
    """The first rows of each part, on the device; of a bundle, as rows of what is first in its records."""
    nbytes = s.there * t.stride
    made = device.zeros((s.parts * s.there, t.stride), torch.uint8)
    here = _bytes_at(staging)
    for part, flat in enumerate(made.view(s.parts, -1)):
        first = t.offset + part * (t.bytes // s.parts)
        for begin in range(0, nbytes, STAGED_BYTES):
            size = min(STAGED_BYTES, nbytes - begin)
            fill_runs(staging, pack, [(first + begin, first + begin + size, 0)], None)
            device.put(flat[begin : begin + size], here[:size])
            more(size)
    return Rows(made, t.format, pack.spec.dim if s.name.endswith(".bundle") else t.shape[-1])


# ---- predictors


def _with_predictors(made: Weights, places: Places, predictors: Predictors, device: Device) -> Weights:
    """Those of layers that have them on the device there, of all neurons; others of the neurons in RAM."""
    stored = [predictors.stored(i) for i in range(predictors.count)]
    there = [
        x.predictor and layer.router is None for x, layer in zip(places.layers, made.layers, strict=True)
    ]
    on_cpu = [
        None if p is None or asked else cut(p, x.neurons // p.experts)
        for p, x, asked in zip(stored, places.layers, there, strict=True)
    ]
    made = weights.with_stored(made, on_cpu)
    layers = []
    for layer, asked, p in zip(made.layers, there, stored, strict=True):
        if p is not None and asked:
            layer = _asked_there(layer, _on_device(p, device))
        layers.append(layer)
    return replace(made, layers=tuple(layers))


def cut(p: StoredPredictor, first: int) -> StoredPredictor | None:
    """For each expert's neurons from `first` on."""
    if first * p.experts == len(p.threshold):
        return None

    def rest(of_all: NDArray[Any]) -> NDArray[Any]:
        each = of_all.reshape(p.experts, -1, *of_all.shape[1:])[:, first:]
        return np.ascontiguousarray(each).reshape(-1, *of_all.shape[1:])

    second = replace(p.second, rows=rest(p.second.rows))
    return replace(p, second=second, threshold=rest(p.threshold), hot=max(0, p.hot - first))


def _on_device(p: StoredPredictor, device: Device) -> DevicePredictor:
    def rows(m: StoredMatrix) -> Rows:
        data = device.zeros(m.rows.shape, torch.uint8)
        device.put(data, torch.from_numpy(np.ascontiguousarray(m.rows)))
        return Rows(data, m.format, m.columns)

    threshold = device.zeros(p.threshold.shape, torch.float32)
    device.put(threshold, torch.from_numpy(p.threshold))
    first = None if p.first is None else rows(p.first)
    return DevicePredictor(first, rows(p.second), threshold, p.hot, p.kind == "mlp")


def _asked_there(layer: Layer, p: DevicePredictor) -> Layer:
    f = layer.experts[0]
    if isinstance(f.gate.weight, Rows):
        return replace(layer, experts=(replace(f, predictor=p),))
    hot = f.hot or FFN(None, None, None, None, bundles=True)  # type: ignore[arg-type]
    return replace(layer, experts=(replace(f, hot=replace(hot, predictor=p)),))
