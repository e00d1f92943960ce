"""Placements for tests: a layer's attention and predictor, and its neurons on each device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from thermocline.model.spec import ModelSpec
from thermocline.ops.interface import CPU
from thermocline.plan.placement import LayerPlacement, NeuronRange, Placement, gpu
from thermocline.plan.problem import divides
from thermocline.session import gpu_weights

ALL = 10**6  # neurons


def layer(spec: ModelSpec, attention: bool, predictor: bool, *neurons: int, index: int = 0) -> LayerPlacement:
    """`attention`, `predictor`: on the first GPU. `neurons`: of each expert, on the GPUs in turn; the rest is
    the CPU's. `index`: which layer, where these differ.
    """
    left, ranges = spec.ffn(index).width, []
    for i, n in enumerate(neurons):
        ranges.append(NeuronRange(gpu(i), min(n, left)))
        left -= ranges[-1].neurons
    ranges.append(NeuronRange(CPU, left))
    where = [gpu(0) if there else CPU for there in (attention, predictor)]
    return LayerPlacement(where[0], where[1], tuple(r for r in ranges if r.neurons))


def experts(
    spec: ModelSpec, attention: bool, count: int, seed: int = 0, *further: int, index: int = 0
) -> LayerPlacement:
    """`count` whole experts, drawn, on the first GPU, and `further` ones on others; the rest is the CPU's."""
    every, _, width = spec.ffn(index)
    drawn, ends = np.random.default_rng(seed).permutation(every), np.cumsum([count, *further])
    *there, here = (tuple(sorted(map(int, x))) for x in np.split(drawn, ends))
    where = gpu(0) if attention else CPU
    if not any(there):
        return LayerPlacement(where, CPU, (NeuronRange(CPU, width),))
    ranges = [NeuronRange(gpu(i), width, whole=x) for i, x in enumerate(there)]
    ranges.append(NeuronRange(CPU, width, whole=here))
    return LayerPlacement(where, CPU, tuple(r for r in ranges if r.whole))


def halves(spec: ModelSpec, each: tuple[LayerPlacement, ...]) -> tuple[LayerPlacement, ...]:
    """Return the layers with no neurons where they have no FFN."""
    return tuple(replace(x, ranges=()) if i in spec.no_ffn else x for i, x in enumerate(each))


def every(spec: ModelSpec, attention: bool, predictor: bool, *neurons: int, head: bool = True) -> Placement:
    """All layers alike."""
    each = (layer(spec, attention, predictor, *neurons),) * spec.n_layers
    return Placement(halves(spec, each), gpu(0) if head else CPU)


def some(spec: ModelSpec, seed: int) -> Placement:
    """Some layers' attention and some neurons on the first GPU, as the planner might choose."""
    rng = np.random.default_rng(seed)

    there = [bool(rng.integers(2)) for _ in range(spec.n_layers)]

    def one(i: int) -> LayerPlacement:
        how = divides(spec, i)
        counts = {"any": [0, 32, 96, 256, ALL], "all": [0, ALL], "none": [0], "experts": [0]}[how]
        attention, neurons = there[spec.kv_layer(i)], int(rng.choice(counts))
        neurons = 0 if spec.shared_dim and not attention else neurons
        if how == "experts" and (attention or not spec.shared_dim):
            return experts(spec, attention, int(rng.integers(spec.ffn(i).experts + 1)), seed + i, index=i)
        return layer(spec, attention, False, neurons, index=i)

    made = tuple(map(one, range(spec.n_layers)))
    return Placement(made, gpu(0) if rng.integers(2) else CPU)


def whole(spec: ModelSpec) -> Placement:
    return gpu_weights.everywhere(spec)
