"""Sizes of a step's buffers on GPUs and beside them: for `GpuOps`, which makes them, and the planner."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from thermocline.model.spec import AttentionShape, ModelSpec
from thermocline.ops.interface import BANNED as BANNED  # kernels take it from here, as they do all sizes
from thermocline.ops.interface import CANDIDATES as CANDIDATES
from thermocline.ops.interface import FEW as GUESSED

FEW = 16  # tokens for which sparse kernels skip rows; of more, nearly every row is needed by some token
SPAN = 128  # positions, or neurons, that one program adds up before sums are joined in order
# Of a kv head's spans, at most; 64 of four heads: a program reads them in about 1.2 us more than one program
# for each head would, and a launch costs 1.2 to 2 us. By arithmetic.
JOINED_APART = 64 * 4 * 128
MAX_SUMS = 96  # joined of `down`: more spread a matrix over more programs, and cost as much to write and add
PAIRS = 32  # (token, expert) pairs of a tile: of one expert, multiplied at once
# Formats that more than FEW tokens meet in f32, or as tf32; that they meet in f16; others in int8.
AS_F32, AS_F16 = ("f32", "bf16"), ("f16", "q6_k", "q3_k", "q2_k")
STREAMS = 4  # residual streams that a step holds at once: x, a copy of it, and a norm of each
PIECE_BYTES = 32 << 20  # of neurons on their way to the device for a prompt; there are two such buffers
EXPERT_BYTES = 64 << 20  # likewise of whole experts: gate and up of one, or its down
# torch rounds a tensor of 10 MiB and more up to 2 MiB, and takes 20 MiB for several smaller ones. So a
# session's tensors are parts of one slab, each from a multiple of 256 bytes on. It may take ROUNDING_BYTES
# beside what they have: for the beginnings of 41,000 tensors, or the least slab, and the slab's last 2 MiB.
SLAB_STEP, LEAST_SLAB, SLAB_ALIGN = 2 << 20, 10 << 20, 256
ROUNDING_BYTES = LEAST_SLAB + SLAB_STEP
KEYS = 1024  # that one program chooses candidates from
BYTES = {"f32": 4, "i32": 4, "u8": 1, "f64": 8, "i64": 8}


@dataclass(frozen=True)
class KernelSizes:
    """The largest call that a kernel's scratch is for."""

    tokens: int
    dim: int
    neurons: int  # of one `gate_up` or `down` with more than FEW tokens
    heads: int
    head_dim: int
    positions: int  # block table's width times the positions of a block
    rank: int = 0  # of predictors; 0: there are none, 1: of signs only
    columns: int = 0  # of the widest input of a matrix, if that is none of these
    experts: int = 1
    active: int = 1  # experts that a token goes to

    @property
    def scratch_bytes(self) -> int:
        """Floats, behind them inputs in int8, of many tokens in f16, and `Scratch.arrivals`."""
        half = half_words(self.tokens, self._widest) if self.tokens > FEW else 0
        pairs = half_words(self.tokens * self.active, self.neurons) if self.experts > 1 else 0
        return 4 * (self.floats + self.quantised + max(half, pairs) + self.arrivals)

    @property
    def quantised(self) -> int:
        """Words of inputs in int8: of few tokens those of all experts, of more those of each token's own."""
        few = quantised_words(min(self.tokens, FEW), max(self._widest, self.neurons * self.experts))
        pairs = quantised_words(self.tokens * self.active, self.neurons)
        return -(-max(few, pairs, quantised_words(self.tokens, self._widest)) // 4) * 4

    @property
    def _widest(self) -> int:
        return max(self.columns, self.dim, self.neurons, self.heads * self.head_dim, self.rank)

    @property
    def arrivals(self) -> int:
        """Count what programs make together: blocks of 32 neurons, or heads of few tokens."""
        return max(-(-self._widest // 32), min(self.tokens, FEW) * self.heads)

    @property
    def floats(self) -> int:
        few = min(self.tokens, FEW)
        steps = {self.tokens, *range(few, self.tokens, FEW)}  # most tokens with spans of each length
        parts = max(tokens * spans(self.positions, tokens) for tokens in steps)
        attention = parts * self.heads * (self.head_dim + 2)
        down = few * MAX_SUMS * self.dim
        up = self.tokens * self.neurons if self.tokens > FEW else 0
        asked = self.tokens * (self.rank + self.neurons) if self.rank else 0
        pairs = 0
        if self.experts > 1 and self.tokens > FEW:
            tables = pair_sizes(self.tokens, self.experts, self.active, self.experts * self.neurons)
            pairs = sum(tables) + self.tokens * self.active * self.dim
        most: int = max(attention, down, up, asked, pairs)
        return -(-most // 4) * 4  # what follows is aligned to 16 bytes


def quantised_words(tokens: int, columns: int) -> int:
    """Words of 4 bytes that tokens take in int8: of 32 columns 8, a scale and a sum."""
    return tokens * -(-columns // 32) * 10


def half_words(tokens: int, columns: int) -> int:
    """Words of 4 bytes that tokens take in f16: columns in whole eights, and a scale."""
    return tokens * (-(-columns // 8) * 4 + 1)


def pair_tiles(tokens: int, experts: int, active: int) -> int:
    """Return how many tiles there may be, each of one expert's pairs."""
    pairs = tokens * active
    return pairs // PAIRS + min(experts, pairs)


def pair_sizes(tokens: int, experts: int, active: int, neurons: int) -> list[int]:
    """Return the numbers of what `Scratch.pairs` names."""
    pairs = tokens * active
    return [pairs, pairs, 3 * pair_tiles(tokens, experts, active), neurons]


def choice_sizes(vocabulary: int) -> list[int]:
    """Return the keys of a row that are left after each pass, until one program can take them all."""
    sizes = [CANDIDATES * -(-vocabulary // KEYS)]
    while sizes[-1] > KEYS:
        sizes.append(CANDIDATES * -(-sizes[-1] // KEYS))
    return sizes


def span_of(tokens: int) -> int:
    """Positions that one program of attention reads: with more tokens fewer programs fill the device."""
    return SPAN * -(-tokens // FEW)


def spans(positions: int, tokens: int) -> int:
    return -(-positions // span_of(tokens))


def joins_at_once(spans: int, group: int, head_dim: int) -> bool:
    """Return whether few tokens' spans are joined where they are made: not where one program would read more
    than another launch costs, of a `group` of heads.
    """
    return head_dim <= 128 and spans * group * head_dim <= JOINED_APART


@dataclass(frozen=True)
class StepLimits:
    """The largest step that buffers are made for."""

    tokens: int
    sequences: int
    positions: int  # of one sequence
    block: int  # positions of a block of keys and values
    rank: int = 0  # as `Sizes`'

    @property
    def blocks(self) -> int:
        return -(-self.positions // self.block)

    def sizes(self, spec: ModelSpec) -> KernelSizes:
        positions, head_dim = self.blocks * self.block, max((x.head_dim for x in spec.attentions), default=0)
        return KernelSizes(
            *(self.tokens, spec.dim, spec.ffn_dim, spec.n_heads, head_dim, positions, self.rank),
            columns=_widest(spec),
            experts=spec.n_experts,
            active=spec.n_experts_active,
        )


@dataclass(frozen=True)
class Buffer:
    shape: tuple[int, ...]
    kind: str = "f32"  # of BYTES
    here: int = 1  # twins in RAM, to be copied from or to; two: of steps that take them in turns

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BYTES[self.kind]


def buffers(spec: ModelSpec, s: StepLimits, gpus: int = 1) -> dict[str, Buffer]:
    """Return all that `GpuOps` makes on the first of its GPUs, but for the model's own vectors."""
    stream = Buffer((s.tokens, spec.dim))
    marks = Buffer((GUESSED * -(-spec.ffn_dim // 8),), "u8")
    made = {f"stream {i}": stream for i in range(STREAMS)}
    made |= {name: stream for name in ("normed", "sum", "cold")}
    made |= {name: Buffer((s.tokens, n), here=0) for name, n in _attention(spec).items()}
    made |= _ints(spec, min(s.tokens, FEW))
    made["squares"] = Buffer((min(s.tokens, FEW), -(-spec.dim // 32)), here=0)
    always = s.tokens * max(spec.shared_dim, spec.dense_dim)
    made["gate"] = Buffer((max(_activations(spec, s), always),), here=0)
    if not spec.sparse or spec.shared_dim:
        # Experts have theirs in scratch, or in registers.
        made["up"] = Buffer((always,), here=0) if spec.sparse or spec.n_experts > 1 else made["gate"]
    if spec.shared_gate:
        made["opened"] = Buffer((s.tokens, 1), here=0)
    if spec.shared_norms or spec.router_input == "own_norm":
        # What a router reads; of the shared FFN its input, of both halves the sum.
        made["aside"] = replace(stream, here=0)
    if spec.n_experts > 1:
        routes = Buffer((s.tokens, spec.n_experts))
        made |= {"routed": replace(routes, here=0), "weights": routes}
        if not spec.sparse:
            made["parted"] = made["routed"]  # shares of experts here, then of those in RAM
    made |= {name: Buffer((s.tokens, n), here=0) for name, n in _mixers(spec).items()}
    if spec.recurrent is not None:
        made["runs"] = Buffer((s.sequences, 4), "i32", here=2)
    if spec.per_layer_dim:
        made["given"] = Buffer((spec.n_layers, s.tokens, spec.per_layer_dim))
        made["let in"] = Buffer((s.tokens, spec.per_layer_dim), here=0)
    made["named"] = Buffer(marks.shape, "u8", here=int(gpus > 1))
    if gpus > 1:
        made["returned"] = replace(stream, here=0)  # another GPU's sum
    made["named cold"] = marks
    made["counts"] = Buffer((4,), "i32", here=2)
    wanted = s.tokens if spec.pools_all else s.sequences
    made["rows"] = Buffer((wanted,), "i32")
    made["logits"] = Buffer((wanted, spec.dim if spec.embeds else spec.vocab_size))
    made |= _choices(spec, s)
    # Layers without attention share the step of those without a window.
    kinds = {
        (None if spec.attention(i) is None else spec.window(i), spec.turns(i)) for i in range(spec.n_layers)
    }
    for window in sorted({window for window, _ in kinds}, key=str):
        row = Buffer((s.tokens,), "i32", here=2)
        made |= {f"{name} {window}": row for name in ("positions", "sequence")}
        made[f"table {window}"] = Buffer((s.sequences, s.blocks), "i32", here=2)
        if (window, True) in kinds:
            head_dim = (spec.full_head_dim if window is None else 0) or spec.head_dim
            turned = Buffer((s.tokens, (spec.rotary_dim or head_dim) // 2), here=2)
            made |= {f"{name} {window}": turned for name in ("cos", "sin")}
    if size := piece_bytes(spec):
        made |= {f"piece {i}": Buffer((size,), "u8", here=0) for i in range(2)}
    made["scratch"] = Buffer((s.sizes(spec).scratch_bytes // 4,), here=0)
    return made


def _ints(spec: ModelSpec, tokens: int) -> dict[str, Buffer]:
    """Return what few tokens' vectors are in int8, too, for all matrices that read them."""
    columns = {"normed": spec.dim}
    if spec.parallel:
        columns["begun"] = spec.dim
    if not spec.sparse or spec.shared_dim:
        columns["gate"] = max(spec.ffn_dim * spec.n_experts, spec.shared_dim, spec.dense_dim)
    if spec.latent is None and spec.attentions:
        columns["attended"] = max(x.context for x in spec.attentions)
    return {
        f"{name} ints": Buffer((quantised_words(tokens, n),), "i32", here=0) for name, n in columns.items()
    }


def _choices(spec: ModelSpec, s: StepLimits) -> dict[str, Buffer]:
    """Return what chooses tokens where logits are: how, the tokens, and keys and sums between passes."""
    n, sizes = s.sequences, choice_sizes(spec.vocab_size)
    return {
        "ids": Buffer((n,), "i32", here=2),
        "draws": Buffer((n, 5 + BANNED), "f64", here=2),
        "chosen": Buffer((n, 3), "i32", here=2),
        "keys": Buffer((n * sum(sizes),), "i64", here=0),
        "digests": Buffer((n * sizes[0] // CANDIDATES,), "i32", here=0),
    }


def piece_bytes(spec: ModelSpec) -> int:
    """Return the bytes that are on their way to the device at a time; 0: nothing is sent for prompts."""
    whole = 3 * 4 * spec.dim * spec.ffn_dim  # of an expert's neurons, at most
    if spec.sparse:
        return min(PIECE_BYTES, whole)
    return min(EXPERT_BYTES, whole) if spec.n_experts > 1 else 0


def _widest(spec: ModelSpec) -> int:
    """Count the columns of the widest input of a matrix; experts' are apart."""
    neurons = max(spec.ffn_dim, spec.shared_dim, spec.dense_dim)
    return max(spec.dim, neurons, spec.per_layer_dim, *_attention(spec).values(), *_mixers(spec).values())


def _attention(spec: ModelSpec) -> dict[str, int]:
    """Return the numbers of a token that attention computes, by buffer."""
    n, a = spec.n_heads, spec.latent
    if a is None:
        inner = max((x.context for x in spec.attentions), default=0)
        return {"qkv": max((_qkv_width(x) for x in spec.attentions), default=0), "attended": inner}
    made = {"lower": a.q_rank} if a.q_rank is not None else {}
    made |= {"queries": n * (a.nope + a.rope), "latent": spec.head_dim, "qkv": n * spec.head_dim}
    return {**made, "found": n * a.kv_rank, "attended": n * a.value}


def _qkv_width(x: AttentionShape) -> int:
    """Return the size of a token's q, k and v, where values may be keys; or of its q alone."""
    return (x.heads + (2 * x.kv_heads if len(x.projections) > 1 else 0)) * x.head_dim


def _activations(spec: ModelSpec, s: StepLimits) -> int:
    """Count the neurons at once: of few tokens those of all experts, of more those of each token's own."""
    return max(s.tokens * spec.n_experts_active, min(s.tokens, FEW) * spec.n_experts) * spec.ffn_dim


def _mixers(spec: ModelSpec) -> dict[str, int]:
    """Return the numbers of a token that recurrent layers compute, by buffer."""
    r, kinds = spec.recurrent, set(spec.mixers)
    if r is None:
        return {}
    rows = (sum(n for n, _ in [*spec.mixer_matrices(i).values()][:-1]) for i in range(spec.n_layers))
    mixed = max(r.inner, spec.dim if "conv" in kinds else 0)
    return {"into": max(rows), "mixed": mixed} | ({"convolved": r.channels} if r.channels else {})


def side_buffers(spec: ModelSpec, s: StepLimits) -> dict[str, Buffer]:
    """Return all that `GpuOps` makes on another GPU than the first, which has neurons alone."""
    first = buffers(spec, s)
    made = {name: replace(first[name], here=0) for name in ("normed", "named")}
    others = ("weights", "gate") if spec.sparse else ("weights", "gate", "gate ints", "up")
    made |= {name: replace(first[name], here=0) for name in others if name in first}
    made |= {name: replace(first[name], here=1) for name in ("sum", "counts")}
    made["scratch"] = Buffer((side_sizes(spec, s).scratch_bytes // 4,), here=0)
    return made


def side_sizes(spec: ModelSpec, s: StepLimits) -> KernelSizes:
    return replace(s.sizes(spec), heads=0)  # no attention


def watch_buffers(spec: ModelSpec, tokens: int) -> dict[str, Buffer]:
    """Return what `NeuronWatch` has in RAM, each twice: of one FFN at a time."""
    made = {"values": Buffer((tokens * spec.n_experts * spec.ffn_dim,)), "h": Buffer((tokens, spec.dim))}
    return made | ({"shares": Buffer((tokens, spec.n_experts))} if spec.n_experts > 1 else {})


def watch_bytes(spec: ModelSpec, tokens: int) -> int:
    """Return the RAM that `NeuronWatch` takes, with the values of a layer that it joins."""
    made = watch_buffers(spec, tokens)
    return 2 * _here(made) + 2 * made["values"].nbytes


def device_bytes(spec: ModelSpec, s: StepLimits, gpus: int = 1) -> int:
    """Return what `buffers` take of the first GPU's memory."""
    return _there(buffers(spec, s, gpus))


def host_bytes(spec: ModelSpec, s: StepLimits, gpus: int = 1) -> int:
    """Return what all GPUs' buffers take of RAM."""
    side = _here(side_buffers(spec, s)) if gpus > 1 else 0
    return _here(buffers(spec, s, gpus)) + (gpus - 1) * side


def side_device_bytes(spec: ModelSpec, s: StepLimits) -> int:
    """Return what `side_buffers` take of another GPU's memory."""
    return _there(side_buffers(spec, s))


def _there(made: dict[str, Buffer]) -> int:
    return sum(b.nbytes for b in made.values())


def _here(made: dict[str, Buffer]) -> int:
    return sum(pinned_bytes(b.nbytes) * b.here for b in made.values())


def pinned_bytes(nbytes: int) -> int:
    """Return what torch takes of RAM for so much pinned memory: a power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0
