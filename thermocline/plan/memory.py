"""The memory plan: what a session needs besides weights, to the byte, and whether it fits."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass

from thermocline import _native
from thermocline.engine.kv_cache import BLOCK, reserved_bytes
from thermocline.engine.prefill_budget import PREFILL_CHUNK, chunk_for
from thermocline.engine.prompt_cache.memory import prompt_cache_bytes as prompt_cache_bytes
from thermocline.engine.state_pool import reserved_bytes as state_bytes
from thermocline.errors import OutOfBudget, UsageError
from thermocline.model.formats import SMALL
from thermocline.model.modes import NO_PROMPT_CACHE, PLAIN, CacheTypes, PromptCacheLimits
from thermocline.model.spec import ModelSpec
from thermocline.ops.device_sizes import StepLimits as Limits
from thermocline.ops.device_sizes import device_bytes

GIB = 2**30
CONTEXT = 4096  # default context where the model can do more: keys and values are reserved before it starts
MANY_EXPERTS = 16  # of a layer: so many are small, and whole ones are better to keep than neurons of all
LEAST_CONTEXT = 512  # no default context is shorter
CACHE_SHARE = 8  # keys and values beside weights on disk take that part of the budget, unless asked for more
KV_POOL_BYTES = 512 << 20  # the cache is made for more than one full context as long as it stays below this
RUNTIME_BYTES = 48 << 20  # 44 MB measured with 512 tokens: 34 here, 10 in the tokenizer's process
HERE_BYTES = 34 << 20  # of these, this process's
TOKEN_BYTES = 1024
MIXER_CHANNELS = 128  # of a convolution that the core works on at a time; more where a key has more elements


@dataclass(frozen=True)
class Needs:
    """A session's demands on RAM. `limit`: whether the budget is what is "free" or what is "allowed"."""

    sparsity: str
    context: int | None
    max_batch: int
    threads: int
    budget: int | None = None  # bytes; None: nobody knows
    limit: str = "free"
    kv_tokens: int | None = None  # positions of the cache; None: as many full contexts as are cheap
    types: CacheTypes = PLAIN  # of keys and values
    beside: int = 0  # bytes that the command takes itself, beside its session
    kept: PromptCacheLimits = NO_PROMPT_CACHE
    tried: int = 0  # bytes on a GPU of predictors that are tried there, beside a plan's


def reads_from_disk(spec: ModelSpec, *, gpu: bool = False) -> str | None:
    """Return what of a model can be left on disk: "neurons", whole "experts", "rows" of FFNs, or nothing.

    `gpu`: beside one, where hot neurons are in VRAM. Without it whole experts of SmallThinker-21B's shape (64
    a layer) made 6 GiB serve 12.0 tok/s in place of 2.6.
    """
    alike = not spec.shared_dim and spec.recurrent is None and not spec.no_ffn  # are layers
    if spec.sparse and alike and (gpu or spec.n_experts < MANY_EXPERTS):
        return "neurons"
    if spec.n_experts > 1:
        return "experts"
    return "rows" if not spec.sparse and any(spec.ffn(i).experts for i in range(spec.n_layers)) else None


def context_for(spec: ModelSpec, asked: int | None) -> int:
    if asked is not None and asked > spec.max_context:
        raise UsageError(
            f"a context of {asked} tokens was asked for; the model's limit is {spec.max_context}"
        )
    return min(spec.max_context, CONTEXT) if asked is None else asked


def contexts_for(
    spec: ModelSpec, asked: int | None, budget: int | None, types: CacheTypes = PLAIN
) -> list[int]:
    """Return contexts to try: a default one is shorter where the weights do not fit in `budget` beside it.

    The shorter one leaves most of the memory to the weights.
    """
    context = context_for(spec, asked)
    if asked is not None or budget is None or reads_from_disk(spec) is None:
        return [context]
    shorter = context

    def cache(context: int) -> int:
        return reserved_bytes(spec, context, context, PREFILL_CHUNK, types)

    while shorter > LEAST_CONTEXT and cache(shorter) > budget // CACHE_SHARE:
        shorter //= 2
    return list(dict.fromkeys((context, shorter)))


def chats_for(
    most: int, budget: int, others: Callable[[int], dict[str, int]], least: Callable[[dict[str, int]], int]
) -> int:
    """Return how many full contexts a budget bears beside weights on disk: at most `most`, at least one.

    `others`: what a session of so many contexts takes beside weights; of it keys and values are an eighth of
    the budget at most. `least`: the smallest budget with that.
    """

    def bears(n: int) -> bool:
        parts = others(n)
        return parts["keys and values"] <= budget // CACHE_SHARE and least(parts) <= budget

    return next(filter(bears, range(most, 1, -1)), 1)


def others_of(
    spec: ModelSpec,
    *,
    context: int,
    kv_tokens: int,
    max_batch: int,
    threads: int,
    types: CacheTypes = PLAIN,
    beside: int = 0,
    kept: PromptCacheLimits = NO_PROMPT_CACHE,
) -> dict[str, int]:
    """Part -> bytes of what a session, and the command that opens it, take besides weights."""
    states, prompts = state_bytes(spec, max_batch), prompt_cache_bytes(spec, kept, types)
    return {
        "keys and values": reserved_bytes(spec, kv_tokens, context, PREFILL_CHUNK, types),
        **({"recurrent states": states} if states else {}),
        **({"prompt cache": prompts} if prompts else {}),
        "buffers": scratch_bytes(spec, context=context, max_batch=max_batch, threads=threads),
        "runtime": runtime_bytes(spec),
        **({"the command's own": beside} if beside else {}),
    }


def layer_shape(spec: ModelSpec) -> _native.LayerShape:
    """Return sizes that no layer exceeds."""
    shapes = spec.attentions
    alone = spec.shared_dim if spec.shared_norms else 0  # then it is computed as the FFN of a dense layer
    return _native.LayerShape(
        dim=spec.dim,
        ffn_dim=spec.ffn_dim,
        experts=spec.n_experts,
        active=spec.n_experts_active,
        heads=max(s.heads for s in shapes),
        kv_heads=max(s.kv_heads for s in shapes),
        head_dim=max(s.head_dim for s in shapes),
        shared_dim=spec.shared_dim,
        dense_dim=max(spec.dense_dim, alone),
        bundles=spec.sparse,
        gated=spec.attention_gate,
        **_mixer_sizes(spec),
        **_latent(spec),
    )


def _mixer_sizes(spec: ModelSpec) -> dict[str, int]:
    """Return the largest arrays of recurrent layers, as `LayerShape` has them."""
    r = spec.recurrent
    if r is None:
        return {}
    first = {
        "deltanet": r.inner + r.channels + 2 * r.heads,
        "mamba2": r.inner + r.channels + r.heads,
        "conv": 3 * spec.dim,
    }
    return {
        "mixer_in": max(first.get(kind, 0) for kind in spec.mixers),
        "mixer_inner": max(r.inner, spec.dim if "conv" in spec.mixers else 0),
        "mixer_heads": r.heads,
        "mixer_ring": r.conv * max(r.state, MIXER_CHANNELS),
    }


def _latent(spec: ModelSpec) -> dict[str, int]:
    a = spec.latent
    if a is None:
        return {}
    lower = a.q_rank or spec.n_heads * (a.nope + a.rope)
    return {"lower": lower, "nope": a.nope, "rank": a.kv_rank, "value": a.value}


def scratch_bytes(
    spec: ModelSpec, *, context: int, max_batch: int, threads: int, prefill_chunk: int | None = None
) -> int:
    """Return the most that a step allocates besides keys and values: the core's scratch, our arrays."""
    tokens = max(chunk_for(spec, context) if prefill_chunk is None else prefill_chunk, max_batch)
    native = _native.scratch_bytes(layer_shape(spec), tokens=tokens, positions=context, threads=threads)
    given = 3 * tokens * spec.n_layers * spec.per_layer_dim  # the table's rows, the projection, their sum
    residual = tokens * spec.dim + given
    logits = (max_batch + 10) * spec.vocab_size  # and the sampler's sort of one request's, in f64 and i64
    hidden = 2 * tokens * spec.dim if spec.embeds else 0  # rows of the stream, and their norms
    return native + 4 * (residual + logits + hidden)


def device_limits(spec: ModelSpec, context: int, max_batch: int, *, predicted: bool) -> Limits:
    """Return the step that a GPU's buffers are made for.

    `predicted`: with predictors, of which a mixture's are the CPU's.
    """
    rank = spec.ffn_dim if predicted and spec.n_experts == 1 else 0  # at most
    return Limits(PREFILL_CHUNK + max_batch, max_batch, context, BLOCK, rank)


def tried_bytes(spec: ModelSpec, needs: Needs) -> int:
    """Return the VRAM of predictors that are tried, and of what their guesses take."""
    if not needs.tried:
        return 0
    context = context_for(spec, needs.context)
    with_them, without = (
        device_bytes(spec, device_limits(spec, context, needs.max_batch, predicted=predicted))
        for predicted in (True, False)
    )
    return needs.tried + with_them - without


def runtime_bytes(spec: ModelSpec) -> int:
    """Python, numpy, the native core; then the tokenizer, 0.7 to 0.8 KB for a token of the vocabulary."""
    return RUNTIME_BYTES + TOKEN_BYTES * spec.vocab_size


def fit(spec: ModelSpec, needs: Needs, *, weights_bytes: int, context: int) -> int:
    """Positions for the KV cache: as many full contexts as are cheap, at least one; else OutOfBudget.

    Fewer than `kv_tokens` positions will not do, or than `context` if these are not said.
    """
    at_least = context if needs.kv_tokens is None else needs.kv_tokens
    available_bytes = needs.budget

    def cache(tokens: int, context: int = context) -> int:
        return reserved_bytes(spec, tokens, context, PREFILL_CHUNK, needs.types)

    prompts = prompt_cache_bytes(spec, needs.kept, needs.types)

    def others(context: int) -> int:
        scratch = scratch_bytes(spec, context=context, max_batch=needs.max_batch, threads=needs.threads)
        rest = scratch + runtime_bytes(spec) + needs.beside + prompts
        return weights_bytes + state_bytes(spec, needs.max_batch) + rest

    def least(shorter: int) -> int:  # what a session of such a context needs
        return others(shorter) + cache(-(-at_least * shorter // context), shorter)

    cheap = bisect.bisect_right(range(context * needs.max_batch + 1), KV_POOL_BYTES, key=cache) - 1
    pool = max(at_least, cheap)
    if available_bytes is None or others(context) + cache(pool) <= available_bytes:
        return pool
    if least(context) <= available_bytes:
        return at_least
    tokens = bisect.bisect_right(range(1, context), available_bytes, key=least)
    change = f"a context of at most {tokens}" if tokens > 0 else f"a smaller weight format ({SMALL}) or model"
    change = f"a smaller --prompt-cache or {change}" if prompts else change
    change = f"--ram {gib_up(least(context))} or {change}" if needs.limit == "allowed" else change
    raise OutOfBudget(
        f"the model needs {size_up(least(context))} of memory ({size_up(weights_bytes)} weights, "
        f"{size_up(cache(at_least))} keys and values at context {context}, "
        f"{f'{size_up(prompts)} prompt cache, ' if prompts else ''}"
        f"{size_up(others(context) - weights_bytes - prompts)} buffers), {size_down(available_bytes)} is "
        f"{needs.limit}; use {change}"
    )


def gib_up(nbytes: int) -> str:
    """GiB for --ram or --vram: never less than the bytes, and at most 0.1 MiB more below 1 GiB."""
    digits = 4 if nbytes < GIB else 2
    return f"{math.ceil(nbytes / GIB * 10**digits) / 10**digits:.{digits}f}"


def size_up(nbytes: int) -> str:
    """Return a need as text, rounded up: in MiB below 1 GiB."""
    return f"{math.ceil(nbytes / 2**20 * 10) / 10:.1f} MiB" if nbytes < GIB else f"{gib_up(nbytes)} GiB"


def size_down(nbytes: int) -> str:
    """Return an amount of free memory as text, rounded down."""
    return f"{nbytes * 10 // 2**20 / 10:.1f} MiB" if nbytes < GIB else f"{nbytes * 100 // GIB / 100:.2f} GiB"
