"""Placements for tests: a layer's attention and predictor, and its neurons on each device."""

from __future__ import annotations

from dataclasses import replace

from thermocline.model.spec import ModelSpec
from thermocline.ops.interface import CPU
from thermocline.plan.placement import LayerPlacement, NeuronRange, Placement, gpu
from thermocline.session import gpu_weights


def layer(spec: ModelSpec, attention: bool, predictor: bool, *neurons: int) -> LayerPlacement:
    """`attention`, `predictor`: on the first GPU. `neurons`: of each expert, on the GPUs in turn; the rest is
    the CPU's.
    """
    left, ranges = spec.ffn_dim, []
    for i, n in enumerate(neurons):
        ranges.append(NeuronRange(gpu(i), min(n, left)))
        left -= ranges[-1].neurons
    ranges.append(NeuronRange(CPU, left))
    where = [gpu(0) if there else CPU for there in (attention, predictor)]
    return LayerPlacement(where[0], where[1], tuple(r for r in ranges if r.neurons))


def halves(spec: ModelSpec, each: tuple[LayerPlacement, ...]) -> tuple[LayerPlacement, ...]:
    """Return the layers with no neurons where they have no FFN."""
    return tuple(replace(x, ranges=()) if i in spec.no_ffn else x for i, x in enumerate(each))


def every(spec: ModelSpec, attention: bool, predictor: bool, *neurons: int, head: bool = True) -> Placement:
    """All layers alike."""
    each = (layer(spec, attention, predictor, *neurons),) * spec.n_layers
    return Placement(halves(spec, each), gpu(0) if head else CPU)


def whole(spec: ModelSpec) -> Placement:
    made = gpu_weights.everywhere(spec.n_layers, spec.ffn_dim)
    return replace(made, layers=halves(spec, made.layers))
