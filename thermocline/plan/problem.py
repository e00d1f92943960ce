"""The planner's input: a model on a machine for a purpose, and the bytes that no placement changes.

The memory arithmetic is `memory.py`'s and `kv_cache.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from thermocline.engine.kv_cache import BLOCK, block_counts, layer_bytes
from thermocline.engine.prefill_budget import PREFILL_CHUNK
from thermocline.engine.state_pool import layer_bytes as state_bytes
from thermocline.machine.tiers import Tiers
from thermocline.model.modes import NO_PROMPT_CACHE, PLAIN, CacheTypes, PromptCacheLimits
from thermocline.model.sizes import ModelSizes
from thermocline.model.spec import ModelSpec
from thermocline.ops.device_sizes import ROUNDING_BYTES, device_bytes, host_bytes, joins_at_once, spans
from thermocline.ops.device_sizes import StepLimits as Limits
from thermocline.plan.cost import EXCESS, MATRIX_SHARE, LayerWork, Reads, Speeds, Work
from thermocline.plan.hotness import Hotness, in_turn
from thermocline.plan.memory import device_limits, prompt_cache_bytes, runtime_bytes, scratch_bytes
from thermocline.plan.solver import Budget

if TYPE_CHECKING:
    from thermocline.plan.disk.expert_hits import OwnRouting

# Of a GPU, beside tensors: a library's context, modules and workspace (an estimate, too), and rounding.
GPU_LIBRARY_BYTES = 448 << 20
GPU_RUNTIME_BYTES = GPU_LIBRARY_BYTES + ROUNDING_BYTES
# Of RAM: torch's libraries, the driver's own. An estimate: no card was at hand.
GPU_RAM_BYTES = 512 << 20
STAGING_BYTES = 64 << 20  # RAM for reads from disk in flight


@dataclass(frozen=True)
class Ask:
    """The user's limits and wishes. `vram_bytes` and `ram_bytes`: None is all the machine has."""

    context: int
    batch: int = 1
    sparsity: str = "exact"
    objective: str = "time"
    vram_bytes: int | None = None
    ram_bytes: int | None = None
    max_batch: int | None = None  # requests that buffers are made for; None: `batch`
    cache: CacheTypes = PLAIN  # of keys and values
    kv_tokens: int | None = None  # positions of the cache; None: `batch` full contexts
    beside: int = 0  # bytes of RAM that the command takes itself
    kept: PromptCacheLimits = NO_PROMPT_CACHE

    @property
    def positions(self) -> int:
        """The positions of the cache."""
        return self.context * self.batch if self.kv_tokens is None else self.kv_tokens


@dataclass(frozen=True)
class Problem:
    """A model on a machine for a purpose, before anything is placed."""

    spec: ModelSpec
    sizes: ModelSizes
    hotness: Hotness
    tiers: Tiers
    ask: Ask
    gpus: int = 1  # that a session uses, if any
    staging: int | None = None  # RAM for reads in flight and what they pass through; None: `STAGING_BYTES`
    routing: OwnRouting | None = field(default=None, compare=False)  # a mixture's, by its profile
    known: dict[tuple[int, int, int], Reads] = field(default_factory=dict, compare=False)  # by `reads`

    def kv_layer_bytes(self, layer: int) -> int:
        """Return the bytes of a layer's keys and values; all layers' are `kv.reserved_bytes`."""
        whole, windowed = block_counts(self.spec, self.ask.positions, self.ask.context, PREFILL_CHUNK)
        blocks = whole if self.spec.window(layer) is None else windowed
        return layer_bytes(self.spec, layer, blocks * BLOCK, self.ask.cache)

    def state_layer_bytes(self, layer: int) -> int:
        """Return the bytes of a recurrent layer's states, which lie where it is computed."""
        return state_bytes(self.spec, layer, self._max_batch)

    @property
    def scratch(self) -> int:
        threads, context = self.tiers.cpu.threads, self.ask.context
        return scratch_bytes(self.spec, context=context, max_batch=self._max_batch, threads=threads)

    @property
    def _max_batch(self) -> int:
        return self.ask.batch if self.ask.max_batch is None else self.ask.max_batch

    def fixed_ram(self, *, disk: bool) -> dict[str, int]:
        """Return the parts that RAM holds in every placement."""
        twins = host_bytes(self.spec, self.limits, self.gpus) if self.vram else 0
        parts = {"embedding": self.sizes.embed.bytes, "buffers": self.scratch + twins}
        parts["runtime"] = runtime_bytes(self.spec) + (GPU_RAM_BYTES if self.vram else 0)
        prompts = prompt_cache_bytes(self.spec, self.ask.kept, self.ask.cache, gpu=self.vram > 0)
        if prompts:
            parts["prompt cache"] = prompts
        if self.ask.beside:
            parts["the command's own"] = self.ask.beside
        staging = STAGING_BYTES if self.staging is None else self.staging
        return parts | ({"disk buffers": staging} if disk else {})

    def others(self) -> dict[str, int]:
        """Return the parts of RAM besides weights, of a CPU that has all layers (`memory.others_of`)."""
        layers = range(self.spec.n_layers)
        parts = {"keys and values": sum(map(self.kv_layer_bytes, layers))}
        if states := sum(map(self.state_layer_bytes, layers)):
            parts["recurrent states"] = states
        return parts | {k: n for k, n in self.fixed_ram(disk=False).items() if k != "embedding"}

    def fixed_vram(self) -> dict[str, int]:
        return {"buffers": device_bytes(self.spec, self.limits, self.gpus), "runtime": GPU_RUNTIME_BYTES}

    @property
    def limits(self) -> Limits:
        a = self.ask
        predicted = a.sparsity == "predict" and any(s.predictor.bytes for s in self.sizes.layers)
        return device_limits(self.spec, a.context, self._max_batch, predicted=predicted)

    @property
    def ram(self) -> int:
        return self.tiers.cpu.ram_bytes if self.ask.ram_bytes is None else self.ask.ram_bytes

    @property
    def vram(self) -> int:
        if self.tiers.gpu is None:
            return 0
        return self.tiers.gpu.vram_bytes if self.ask.vram_bytes is None else self.ask.vram_bytes

    def room(self, *, disk: bool) -> Budget:
        """For what is placed. No VRAM where the fixed parts alone are too much; RAM may be below 0."""
        vram = max(0, self.vram - sum(self.fixed_vram().values()))
        return Budget(vram, self.ram - sum(self.fixed_ram(disk=disk).values()))

    def work(self, *, batch: int = 0, share: float = 0.5) -> Work:
        batch, s = batch or self.ask.batch, self.spec
        depth, routes = round(share * self.ask.context), (s.routed(batch), s.n_experts, s.n_experts_active)
        return Work(self.ask.sparsity, batch, depth, *routes)

    @property
    def excess(self) -> float:
        """Gate rows that predictors name for an active neuron."""
        return EXCESS if self.hotness.excess is None else self.hotness.excess

    def speeds(self, work: Work) -> Speeds:
        return Speeds(self.tiers, self.sizes.format, work.batch)

    def reads(self, key: int, layer: int, work: Work) -> Reads:
        known = self.known.get(at := (key, work.batch, work.experts))
        if known is None:
            hot = in_turn(self.hotness.at(layer, work.batch), work.experts)
            known = self.known[at] = Reads.of(hot, work, skips=True, excess=self.excess)
        return known

    def ranked(self, layer: int) -> list[int]:
        """Return a layer's experts, those that tokens go to most first; unsorted where nobody knows."""
        return (
            list(range(self.spec.ffn(layer).experts)) if self.routing is None else self.routing.ranked(layer)
        )

    def _reads_of_experts(self, layer: int, work: Work) -> Reads:
        """Return the reads of whole experts in that order, by the profile's own trace."""
        assert self.routing is not None
        known = self.known.get(at := (layer, work.batch, work.experts))
        if known is None:
            each = self.routing.needed(layer, work.batch)[self.ranked(layer)]
            rows = np.concatenate([[0.0], np.cumsum(np.repeat(each, self.spec.ffn(layer).width))])
            known = self.known[at] = Reads(rows, rows, MATRIX_SHARE, MATRIX_SHARE)
        return known

    def layers(self, work: Work) -> Iterator[LayerWork]:
        dense = {
            (n, experts): Reads.of(np.ones(n), work if experts > 1 else work.dense, skips=False)
            for n, experts in {(x.neurons, self.spec.ffn(i).experts) for i, x in enumerate(self.sizes.layers)}
        }
        for i, sizes in enumerate(self.sizes.layers):
            where, shared = divides(self.spec, i), self.spec.shared_dim > 0
            skips, experts = self.spec.sparse and sizes.neurons > 0, self.spec.ffn(i).experts
            own = work if experts > 1 else work.dense
            reads = self.reads(self.hotness.key(i), i, own) if skips else dense[sizes.neurons, experts]
            reads = reads if where != "experts" or self.routing is None else self._reads_of_experts(i, work)
            window = self.spec.window(i)
            depth = work.depth if window is None else min(work.depth, window)
            kept = self.kv_layer_bytes(i) + self.state_layer_bytes(i)
            kv_read = layer_bytes(self.spec, self.spec.kv_layer(i), depth * work.batch, self.ask.cache)
            width = self.spec.ffn(i).width
            dim, parallel = self.spec.dim, self.spec.parallel
            more = apart(self.spec, i, self.ask.context)
            how = (where, None, shared, width, parallel, experts <= 1, more, begun_norms(self.spec))
            yield LayerWork(sizes, reads, kept, kv_read, dim, *how)


def takes_experts(spec: ModelSpec) -> bool:
    """Return whether a GPU can have whole experts of a model."""
    return any(divides(spec, i) == "experts" for i in range(spec.n_layers))


def apart(spec: ModelSpec, layer: int, context: int) -> int:
    """Return the kernels of few tokens' attention on a GPU that other models' do not need.

    One turns and stores heads whose elements depend on more than one of the other half: under a norm, or
    turned in part. One joins spans where they are many.
    """
    shape = spec.attention(layer)
    if shape is None or shape.latent is not None:
        return 0
    turns = spec.turns(layer)
    in_part = turns and spec.rotary_dim not in (None, shape.head_dim)
    stores = spec.qk_norms(layer) or spec.v_norm or in_part or (not turns and spec.attention_tuning != 0)
    joins = not joins_at_once(spans(context, 1), shape.heads // shape.kv_heads, shape.head_dim)
    return int(stores) + int(joins)


def begun_norms(spec: ModelSpec) -> int:
    """Return how many norms of a layer begin with the product before them, where a GPU has few tokens."""
    plain = spec.norm == "rms" and spec.norm_order == "pre" and spec.residual_scale == 1
    between = spec.parallel or spec.per_layer_dim or spec.layer_scale or spec.shared_norms
    return 2 if plain and not between and spec.dim % 32 == 0 else 0


def divides(spec: ModelSpec, layer: int) -> str:
    """How many neurons of a layer can be on a GPU (`LayerWork.on_gpu`).

    Where down is no row per neuron, or a norm sees all activations, they stay together: of a mixture whole
    "experts" go there, but none under such a norm. "Any" number is as many of each expert.
    """
    if spec.sparse and not spec.sub_norms:
        return "any"
    if spec.ffn(layer).experts > 1:
        return "none" if spec.sub_norms else "experts"
    return "all"
