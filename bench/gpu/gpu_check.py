"""Is what a device computes right? Every weight format, kind of FFN, placement and number of tokens, beside
the specification (`ops.reference`, numpy, over the decoded weights).

`bench/gpu/gpu.py` runs this first: what computes something else is not measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from reference_weights import decoded
from synthetic_predictors import gate_of

from thermocline.convert import synthetic
from thermocline.engine.decoder import bind, forward
from thermocline.engine.kv_cache import BLOCK, KVCache, in_ram
from thermocline.model import quant
from thermocline.model.spec import ModelSpec
from thermocline.ops import reference
from thermocline.ops.cpu import CpuOps
from thermocline.ops.device_sizes import AS_F16, FEW, StepLimits
from thermocline.ops.gpu import GpuOps, pages_on
from thermocline.ops.interface import CPU, F32, Batch, FFNStats, KVLayer, KVShape, Weights
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import LayerPredictor, Predictors
from thermocline.plan.placement import LayerPlacement, NeuronRange, Placement, gpu
from thermocline.session import gpu_weights
from thermocline.session.gpu import OpenGpu

MAX_NMSE = 1e-4
INT8_NMSE = 3e-4  # where activations meet a quantised model in int8: 1.9e-4 was measured
FORMATS = tuple(quant.FORMATS)
STEPS = 3  # of each number of sequences: queued, recorded, replayed
LAYERS = 3
MARGIN, HOT = 0.3, 32  # of generous predictors: gates have unit variance; neurons that are not asked about

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "relu", "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "num_hidden_layers": LAYERS,
    "max_position_embeddings": 64, "vocab_size": 512,
}  # fmt: skip
OPT = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "activation_function": "relu",
    "do_layer_norm_before": True, "_remove_final_layer_norm": False, "bos_token_id": 2, "eos_token_id": 2,
    "num_hidden_layers": LAYERS, "max_position_embeddings": 64, "vocab_size": 512,
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """Of the models that are compared."""

    dim: int
    neurons: int
    heads: int
    sequences: tuple[int, ...]  # one token of each in a step
    prompt: int
    placed: tuple[str, ...] | None = None  # of the placements; None: all


SIZES = {
    "interpreted": Size(192, 128, 3, (1,), 17, ("all", "divided")),
    "tiny": Size(256, 512, 4, (1, 4, 16), 40),
    "wide": Size(1024, 4096, 8, (1, 2, 4, 8, 16, 32), 48),
}


def kinds(z: Size) -> dict[str, dict[str, Any]]:
    """Gated and sparse, ungated with biases, dense, mixtures of sparse and of dense experts: configs."""
    llama = LLAMA | {
        "hidden_size": z.dim, "intermediate_size": z.neurons, "num_attention_heads": z.heads,
        "num_key_value_heads": max(1, z.heads // 2),
    }  # fmt: skip
    opt = OPT | {
        "hidden_size": z.dim, "ffn_dim": z.neurons, "num_attention_heads": z.heads,
        "word_embed_proj_dim": z.dim,
    }  # fmt: skip
    mixture = llama | {
        "architectures": ["TurboSparseMixtralForCausalLM"], "model_type": "turbosparsemixtral",
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": z.neurons // 4,
    }  # fmt: skip
    experts = mixture | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    return {
        "gated": llama, "ungated": opt, "dense": llama | {"hidden_act": "silu"}, "mixture": mixture,
        "experts": experts | {"hidden_act": "silu"},
    }  # fmt: skip


def placements(spec: ModelSpec) -> dict[str, Placement]:
    """Where what is: all there, all but some neurons, attention alone, FFNs alone, layers in turn."""
    neurons, sparse, least = spec.n_experts * spec.ffn_dim, spec.sparse, 32 * spec.n_experts
    some = max(least, neurons // 4 // least * least) if sparse else 0

    def layer(there: bool, n: int) -> LayerPlacement:
        each, where = n // spec.n_experts, gpu(0) if there else CPU
        if spec.n_experts > 1 and not sparse:
            return LayerPlacement(where, where, whole(n // spec.ffn_dim))
        ranges = NeuronRange(gpu(0), each), NeuronRange(CPU, spec.ffn_dim - each)
        return LayerPlacement(where, where, tuple(r for r in ranges if r.neurons))

    def whole(n: int) -> tuple[NeuronRange, ...]:
        ids = tuple(range(spec.n_experts))  # the last are the first GPU's
        here, there = ids[: spec.n_experts - n], ids[spec.n_experts - n :]
        on = NeuronRange(gpu(0), spec.ffn_dim, whole=there), NeuronRange(CPU, spec.ffn_dim, whole=here)
        return tuple(r for r in on if r.whole) if n else (NeuronRange(CPU, spec.ffn_dim),)

    def of(*layers: tuple[bool, int], head: bool = True) -> Placement:
        return Placement(tuple(layer(*x) for x in layers), gpu(0) if head else CPU)

    made = {
        "all": of(*[(True, neurons)] * LAYERS),
        "attention": of(*[(True, 0)] * LAYERS),
        "FFNs": of(*[(False, neurons)] * LAYERS, head=False),
        "layers in turn": of((True, neurons), (False, 0), (True, neurons), head=False),
    }
    if sparse:
        made["divided"] = of((True, some), (True, max(some, neurons - least)), (False, some))
    elif spec.n_experts > 1:
        made["divided"] = of((True, neurons // 4), (True, neurons * 3 // 4), (False, neurons // 2))
    return made


# ---- steps


def batches(sequences: int, prompt: int) -> Iterator[Batch]:
    """STEPS steps of one token for each of some sequences, or one of a prompt."""
    rng = np.random.default_rng(sequences)
    if prompt:
        at = np.arange(prompt, dtype=np.int32)
        table = np.arange(2, dtype=np.int32)[None]
        yield Batch(rng.integers(3, 512, prompt).astype(np.int32), at, 0 * at, table, at)
        return
    each = np.arange(sequences, dtype=np.int32)
    table = np.stack([2 * each, 2 * each + 1], axis=1)
    for step in range(STEPS):
        ids = rng.integers(3, 512, sequences).astype(np.int32)
        yield Batch(ids, np.full_like(each, step), each, table, each)


def logits(
    pack: Pack, made: Weights, ops: Any, sequences: int, prompt: int, sparsity: str, storage: Any = in_ram
) -> F32:
    model = bind(pack.spec, made, ops)
    kv = KVCache(pack.spec, 2 * max(1, sequences), storage=storage)
    found = [
        forward(model, kv, b, ops, sparsity=sparsity, stats=FFNStats()) for b in batches(sequences, prompt)
    ]
    return np.concatenate(found)


@dataclass(frozen=True)
class Result:
    kind: str
    format: str
    placement: str
    sparsity: str
    tokens: int  # of a step
    nmse: float
    limit: float
    same_tokens: bool  # wherever the two likeliest are further apart than the limit lets them move

    @property
    def right(self) -> bool:
        return self.nmse <= self.limit and self.same_tokens


def limit_of(format: str, placement: str, tokens: int) -> float:
    """Return the limit of an NMSE. Activations are rounded to int8, but for `AS_F16` in prompts on a GPU."""
    rounds = placement != "all" or tokens <= FEW or format not in AS_F16
    return INT8_NMSE if quant.FORMATS[format].block > 1 and rounds else MAX_NMSE


def compared(y: F32, truth: F32, limit: float) -> tuple[float, float, bool]:
    """(NMSE, its limit, the same likeliest token in every row with a clear one)."""
    square = float(np.mean(truth.astype(np.float64) ** 2))
    nmse = float(np.mean((y.astype(np.float64) - truth) ** 2)) / square
    best = np.sort(truth, axis=1)
    tolerance = 4 * math.sqrt(2 * limit * square)  # four deviations of a difference of two logits
    sure = best[:, -1] - best[:, -2] > tolerance
    same = bool((y.argmax(1) == truth.argmax(1))[sure].all())
    return nmse, limit, same and bool(np.isfinite(y).all())


def written(config: dict[str, Any], format: str, directory: Path) -> Pack:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    sparse = "silu" not in config.values()
    model = synthetic.SyntheticModel.of(str(directory), 0, 0.1 if sparse else None, 0.26, 32)
    model.write(directory / "pack", format, overwrite=True)
    return Pack.open(directory / "pack")


def generous(pack: Pack) -> Predictors:
    """The gates themselves as predictors, which name all active neurons and some more: nothing is lost, and
    what is named wrongly for being near a threshold is zero.
    """
    s, eye = pack.spec, np.eye(pack.spec.dim, dtype=np.float32)

    def one(i: int) -> LayerPredictor:
        gate, bias = gate_of(pack, i)
        return LayerPredictor("svd", eye, gate, None, -bias - np.float32(MARGIN), HOT, s.n_experts)

    return Predictors.of(s, [one(i) for i in range(s.n_layers)])


def check(
    gpu: OpenGpu,
    directory: Path,
    size: str,
    formats: Sequence[str],
    progress: Callable[[str, int, int], None],
) -> list[Result]:
    """Every combination."""
    z, found = SIZES[size], list[Result]()
    cases = [(kind, config, f) for kind, config in kinds(z).items() for f in formats]
    for at, (kind, config, f) in enumerate(cases):
        progress("checking", at, len(cases))
        pack = written(config, f, directory / kind)
        found += of_pack(gpu, pack, z, kind)
    progress("checking", len(cases), len(cases))
    return found


def of_pack(gpu: OpenGpu, pack: Pack, z: Size, kind: str) -> Iterator[Result]:
    truth, f = decoded(pack), pack.weight_format
    shapes = [(n, 0) for n in z.sequences] + [(0, z.prompt)]
    exact = "exact" if pack.spec.sparse else "off"
    right = {s: logits(pack, truth, reference, *s, exact) for s in shapes}
    modes: list[tuple[str, Predictors | None]] = [(exact, None)]
    if pack.spec.sparse:
        modes.append(("predict", generous(pack)))
    for sparsity, predictors in modes:
        for name, places in placements(pack.spec).items():
            if (z.placed is not None and name not in z.placed) or not _agree(pack.spec, f, name):
                continue
            for shape, y in zip(shapes, _on(gpu, pack, places, predictors, shapes), strict=True):
                found = compared(y, right[shape], limit_of(f, name, sum(shape)))
                yield Result(kind, f, name, sparsity, sum(shape), *found)


def _agree(spec: ModelSpec, format: str, placement: str) -> bool:
    """Can they? Where the CPU makes activations int8, some tokens go to other experts than they would."""
    return spec.n_experts == 1 or quant.FORMATS[format].block == 1 or placement == "all"


def _on(
    gpu: OpenGpu,
    pack: Pack,
    places: Placement,
    predictors: Predictors | None,
    shapes: Sequence[tuple[int, int]],
) -> Iterator[F32]:
    """Logits of each, placed so."""
    device, largest = gpu.device, max(map(max, shapes))
    asked = predictors is not None and pack.spec.n_experts == 1
    limits = StepLimits(largest, largest, 2 * BLOCK, BLOCK, pack.spec.ffn_dim if asked else 0)
    ops = GpuOps((device,), gpu.kernels, CpuOps(2), pack.spec, limits)
    made = gpu_weights.load(pack, places, (device,), ops.cpu, predictors=predictors)

    def storage(layer: int, room: KVShape) -> KVLayer:
        on_device = places.layers[layer].attention != CPU
        return pages_on(device, room) if on_device else in_ram(layer, room)

    sparsity = "off" if not pack.spec.sparse else "exact" if predictors is None else "predict"
    try:
        for shape in shapes:
            ops.forget()  # each has keys and values of its own
            yield logits(pack, made, ops, *shape, sparsity, storage)
    finally:
        device.release()  # the next one's weights may lie where these did


def summary(results: Sequence[Result]) -> dict[str, Any]:
    wrong = [asdict(r) for r in results if not r.right]
    return {
        "compared": len(results),
        "worst_nmse": max(r.nmse for r in results),
        "worst_over_limit": max(r.nmse / r.limit for r in results),
        "same_tokens": all(r.same_tokens for r in results),
        "wrong": wrong,
        "by_format": {
            f: max(r.nmse for r in results if r.format == f) for f in dict.fromkeys(r.format for r in results)
        },
    }
