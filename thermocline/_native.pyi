"""csrc/bindings/bindings.cpp, typed. Arrays are C-contiguous and never converted: a wrong dtype or layout
is a TypeError, a wrong shape or value a ValueError.
"""

from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F16 = NDArray[np.float16]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

def isa() -> str:
    """The instruction set the kernels use."""

def isa_levels() -> list[str]:
    """Instruction sets this CPU supports, best first."""

def group_ahead(bytes: int | None = None) -> int:
    """Return how many bytes ahead of its use a group of rows is asked for; 0: it is left to the processor.

    `bytes`: sets it, to measure.
    """

def rows_near(near: bool | None = None) -> bool:
    """Return whether rows are asked for into the first-level cache, and not into the second.

    `near`: sets it, to measure.
    """

def cpu_features() -> dict[str, bool]: ...
def read_bandwidth(nbytes: int, threads: int, seconds: float) -> float:
    """GB/s of reading memory: the roof."""

def crc32c(buffer: bytes | memoryview | U8, seed: int = 0) -> int:
    """CRC-32C (Castagnoli); pass the last result as seed to continue."""

def quantise(
    format: str,
    x: F32,
    out: U8,
    *,
    importance: F32 | None = None,
    feedback: F32 | None = None,
    threads: int = 1,
    isa: str = "",
) -> None:
    """Search for the bytes of rows x [rows, columns] with the least error: planar rows [rows, row bytes].

    importance: what the square of an error costs, for each column. feedback: for each window of columns the
    upper triangular U with U'U = the inverse of the inputs' covariance, [windows, window, window]; the errors
    of a column are then evened out by later ones of its window.
    """

SIGNS: int  # a `Matrix` format for predictors: a bit a weight
FORMATS: dict[str, tuple[int, int, int]]  # by name: id, weights of a block, bytes of a block

class Arena:
    """Memory for weights. A `Matrix` in it keeps it alive."""

    def __init__(self, nbytes: int) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    def write(self, offset: int, data: U8) -> None: ...
    def copy(self, to: int, source: Arena, begin: int, nbytes: int) -> None:
        """Bytes of another arena."""

    def checksums(self, begin: int, stride: int, out: U32) -> None:
        """The CRC-32C of each of len(out) records of `stride` bytes, from `begin` on."""

    def read_bandwidth(self, begin: int, end: int, threads: int, seconds: float) -> float:
        """GB/s of reading these bytes, at least 1 MiB, over and over: the roof of weights there."""

    def gather_pages(self) -> None:
        """Once filled: into huge pages what the system did not give as such."""

    def fence(self) -> None:
        """Tests: reading past the padding, where a page must begin, ends the process from now on."""

ROW_BITS: int  # of a row's number in what `Loading.wait` returns
CHANGED: int  # its error where a file is no longer what it was

class Loading:
    """Weights on their way into an arena, by threads of their own. One that goes is given up."""

    def wait(self, progress: Callable[[int], None] | None = None) -> tuple[int, int]:
        """Wait; `progress(bytes)` and signal handlers run meanwhile.

        -> (0, -1), or what the first failure is: of blocks (errno, -1 for EOF or 0 for a wrong checksum; the
        block), of rows (the same, but 0 for a scale that is no number; run << ROW_BITS | row) or (CHANGED;
        the file).
        """

    def stop(self) -> None:
        """Give up: what is begun is finished, nothing else is read."""

def begin_blocks(
    arena: Arena, path: str, ranges: list[tuple[int, int, int]], checksums: U32, block: int
) -> Loading:
    """File bytes [begin, end) to byte `to`, each range, checked."""

_FileState = tuple[int, int, int, int]
_RowRun = tuple[str, int, int, int, int, int, int, I32 | None, int, int]

def begin_rows(
    arena: Arena,
    files: Sequence[tuple[str, _FileState]],
    runs: Sequence[_RowRun],
) -> Loading:
    """Rows of GGUF files as planar rows. files: (path, (device, inode, bytes, time of writing in ns)); runs:
    (format, columns, file, first byte, rows, to, stride, order, rows of a group (1: none), rows of the first
    one's group before it)"""

def arranged(format: str, rows: U8, out: U8) -> int | None:
    """Rows of GGUF's blocks as planar rows. -> the first row with a scale that is no number"""

def arranging_gbs(format: str, columns: int, nbytes: int, threads: int, seconds: float) -> float:
    """GB/s at which each of `threads` checks such rows of a file and puts them into their groups, in passes
    over `nbytes` of them, for `seconds` and one pass at least."""

class Reader:
    """Asynchronous reads of one file. OSError where it cannot be opened.

    At most `depth` reads in flight, and as many buffers. `method`: "" is the best there is, or
    "io_uring", "threads".
    """

    def __init__(
        self, path: str, *, depth: int, buffer_bytes: int, method: str = "", direct: bool = True
    ) -> None: ...
    @property
    def how(self) -> str:
        """How it reads, and why not better, for people."""

    @property
    def alignment(self) -> int:
        """What offsets and sizes must be multiples of: 512 to 4096 direct, 1 through the page cache."""

    @property
    def changed(self) -> bool:
        """Another file has the path now, or this one another size or time than when it was opened."""

    def buffer(self, i: int) -> U8: ...
    def submit(self, reads: list[tuple[int, int, int, int]]) -> bool:
        """(offset, bytes, buffer, tag) each. False, and none begun: more than `depth` would be in flight."""

    def take(self, wait: bool) -> list[tuple[int, int]]:
        """(tag, error) of reads that are done: an errno, -1 where the file ends early, or 0. `wait`: for one,
        up to 100 ms."""

    def measure(self, offsets: U64, nbytes: int, seconds: float) -> tuple[int, int]:
        """Read at each offset, `depth` at a time, for so long. -> (how many were read, the first error)"""

class Matrix:
    """Rows inside an arena, one every `stride` bytes. `format`: `quant.FORMATS[...].id`.

    `group`: of rows that are interleaved, `Context.group`.
    """

    def __new__(
        cls, arena: Arena, offset: int, format: int, rows: int, cols: int, stride: int, group: int = 1
    ) -> Matrix: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def interleaved(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...

# Parts of a layer, validated when they are made; they keep the arrays and matrices they were given.

class Norm:
    """RMSNorm, or LayerNorm with `layer`."""

    def __new__(cls, weight: F32, bias: F32 | None, eps: float, layer: bool) -> Norm: ...

class Linear:
    def __new__(cls, weight: Matrix, bias: F32 | None) -> Linear: ...

class Stack:
    """Matrices of one width, one under the other, at most 4, and a bias for all their rows."""

    def __new__(cls, parts: tuple[Matrix, ...], bias: F32 | None) -> Stack: ...

class Heads:
    """How the heads of a layer attend. `window` 0: to all positions; `softcap` 0: none. `sinks` [n].

    `whole_norms`: the norms are of all heads as one. `norms_last`: they are behind rope. `own_norms`: they
    are LayerNorms, every head's with its own weights. `shares`: keys and values are what an earlier layer
    stored. `chunked`: to those of the same `window` positions.
    `temperature`: q is multiplied by 1 + temperature * log(1 + floor((position + 1) / temperature_span)).
    `value_dim`: of latents, whose first elements are the value; 0: keys and values.
    """

    def __new__(
        cls,
        n: int,
        n_kv: int,
        dim: int,
        window: int,
        scale: float,
        softcap: float,
        q_norm: F32 | None,
        k_norm: F32 | None,
        eps: float,
        sinks: F32 | None = None,
        whole_norms: bool = False,
        norms_last: bool = False,
        v_norm: F32 | None = None,
        shares: bool = False,
        own_norms: bool = False,
        chunked: bool = False,
        temperature: float = 0.0,
        temperature_span: float = 1.0,
        value_dim: int = 0,
    ) -> Heads: ...

class Join:
    """How a half of a layer joins the residual stream: x = after * (x + scale * norm(y))."""

    def __new__(cls, norm: Norm | None, scale: float, after: float = 1.0) -> Join: ...

class PerLayer:
    """x joins norm(down(act(gate x) * given)), as `join` says."""

    def __new__(cls, gate: Matrix, down: Matrix, activation: int, join: Join) -> PerLayer: ...

class Latent:
    """What a latent attention has beside its first and last matrices: RMS norms, matrices of each head."""

    def __new__(
        cls,
        *,
        nope: int,
        rope: int,
        q_norm: Norm | None,
        q_b: Matrix | None,
        kv_norm: Norm,
        k_b: Matrix,
        v_b: Matrix,
    ) -> Latent: ...

class Attention:
    """`gate` [n * dim, width of qkv]: what attention gives is multiplied by its sigmoid."""

    def __new__(
        cls,
        norm: Norm | None,
        qkv: Stack,
        out: Linear,
        heads: Heads,
        sub_norm: Norm | None,
        join: Join,
        gate: Matrix | None = None,
        latent: Latent | None = None,
    ) -> Attention: ...

class Mixer:
    """A mixer with a state: csrc/engine/model_ops.h. `kind` 0: DeltaNet, 1: Mamba-2, 2: a convolution.

    `conv` [width, channels]. A head's state is [rows, cols]; `tiled`: head h is of group h % groups.
    """

    def __new__(
        cls,
        *,
        kind: int,
        norm: Norm | None,
        proj: Stack,
        out: Linear,
        join: Join,
        conv: F32,
        conv_bias: F32 | None,
        heads: int = 0,
        groups: int = 1,
        rows: int = 1,
        cols: int = 1,
        tiled: bool = False,
        decay: F32 | None = None,
        step_bias: F32 | None = None,
        skip: F32 | None = None,
        gated_norm: F32 | None = None,
        norm_eps: float = 1e-6,
    ) -> Mixer: ...
    @property
    def state_floats(self) -> int: ...

class Predictor:
    """score = second . f(first . x), or second . x without `first`; f is ReLU with `relu`, else nothing."""

    def __new__(
        cls, first: Matrix | None, second: Matrix, threshold: F32, hot: int, relu: bool
    ) -> Predictor: ...

# The disk tier (csrc/storage/fetches.h).

NOT_FINITE: int  # `DiskError`'s of experts: a scale is no finite number
NO_BUNDLE: int  # `DiskRows(disable=…)`: each record in two reads
NO_CACHE: int  # nothing stays from one call to the next
NO_PIPELINE: int  # a read is waited for where it is made

class SlotPool:
    """`slots` places of `stride` bytes from `offset` of an arena on, for records that come and go; offset and
    stride are multiples of `slot_alignment`. `DiskRows` and `DiskExperts` take theirs from it; the last
    `passing` are the running call's (None: `stream_slots`, as `DiskRows` need them)."""

    def __new__(
        cls, arena: Arena, offset: int, stride: int, slots: int, passing: int | None = None
    ) -> SlotPool: ...
    @property
    def free(self) -> int:
        """Slots nobody has taken."""

class DiskRows:
    """The records of one layer (one expert), `pool.stride` bytes each from `file_offset` of the file on.

    [0, hot) are in memory from `load` on, the others take turns in `quota` slots: hot + quota slots of the
    pool are its. `crc`: CRC-32C of each record [neurons]. `name`: of the tensor, for `DiskError`. `disable`:
    NO_BUNDLE, NO_CACHE, NO_PIPELINE, added up. `likely` [neurons]: how likely a token needs the record, which
    is what slots go by at first.
    """

    def __new__(
        cls,
        pool: SlotPool,
        reader: Reader,
        file_offset: int,
        neurons: int,
        hot: int,
        quota: int,
        crc: U32,
        name: str = "",
        disable: int = 0,
        likely: F32 | None = None,
    ) -> DiskRows: ...
    def load(self) -> None:
        """Read the hot ones, and the next ones into all slots. DiskError."""

    def stats(self) -> dict[str, int]:
        """Since it was made: `needed` (records that up to 64 tokens asked for), `missed` (of those, not
        there), `reads` and `bytes` (of the disk, all), `streamed` (bytes, for many tokens), `waited_ns`
        (threads that waited for the disk with nothing else to do, added up)."""

class ExpertFiles:
    """The files of a model whose experts or FFNs come from disk (a GGUF's parts, or weights.bin): one queue.

    `files`: (path, state) as `begin_rows` has them. `depth`: reads in flight at most, each with a buffer of
    `piece_bytes` (whole pages): a row and twice the alignment of direct reads, 4096 at most, fit into it.
    Besides, each thread of a call takes the rows of the largest group. OSError: a file cannot be opened.
    DiskError: one has changed since its header was read.
    """

    def __new__(
        cls,
        files: Sequence[tuple[str, _FileState]],
        *,
        depth: int,
        piece_bytes: int,
        method: str = "",
        direct: bool = True,
    ) -> ExpertFiles: ...
    @property
    def how(self) -> str:
        """How it reads, for a person."""

    def begin_step(self, most_bytes: int | None = None, *, read_only: bool = False) -> None:
        """From now on, until the next step: its calls read at most so many bytes, and leave out what is more.

        Layers have equal parts, and what those before them left of theirs. `read_only`: calls leave the
        caches as they are.
        """

class DiskExperts:
    """The experts of one layer, that take turns in `quota` slots of a pool, a record each.

    `runs`: of each expert its slabs, as `begin_rows` takes them, `to` within the slot; slabs of one number
    have one shape in all experts. `names`: of each slab, for `DiskError`. `planar`: rows are as in a pack, so
    that nothing but groups is rearranged. `disable`: NO_CACHE, NO_PIPELINE, added up. `likely` [experts]: as
    of `DiskRows`. The call that the layer runs in takes more experts than there are slots in waves, of half
    of the pool's passing slots each.
    """

    def __new__(
        cls,
        pool: SlotPool,
        files: ExpertFiles,
        runs: Sequence[Sequence[_RowRun]],
        quota: int,
        names: Sequence[str],
        *,
        planar: bool = False,
        disable: int = 0,
        likely: F32 | None = None,
    ) -> DiskExperts: ...
    def load(self, threads: int = 1) -> None:
        """Read the first `quota` experts. Before the first call. DiskError."""

    def stats(self) -> dict[str, int]:
        """As of `DiskRows`; records are experts."""

# All rows of a matrix in a file, `to` 0; how many of them are in memory; a name for `DiskError`.
_StreamedMatrix = tuple[_RowRun, int, str]

class StreamedLayer:
    """One FFN of a stream."""

class DenseStream:
    """The rows of FFNs that do not fit in memory, read in the order in which a step needs them, step by step.

    They come in records: rows of gate and as many of up, or of down, each record into a piece of `files`, of
    which half may be under way. `ffns`: of each layer with some on disk (gate, and up where there is one;
    rows of a record; down; rows of a record). A record's rows of one matrix are one read. `threads`: of a
    call; a thread besides reads from now on. `planar`: as of `DiskExperts`. RuntimeError: the system has no
    more threads.
    """

    def __new__(
        cls,
        files: ExpertFiles,
        ffns: Sequence[tuple[Sequence[_StreamedMatrix], int, _StreamedMatrix, int]],
        threads: int,
        *,
        planar: bool = False,
    ) -> DenseStream: ...
    def layer(self, i: int) -> StreamedLayer: ...
    def stats(self) -> dict[str, int]:
        """As of `DiskRows`; records are those of a stream."""

class DiskError(Exception):
    """args: (errno, -1: the file ends early, 0: wrong checksum, CHANGED: another file than when its header
    was read, NOT_FINITE: a scale is no finite number; name; neuron, or -1 where the name says it all; whether
    the file has changed since it was opened). The caches live on.
    """

class FFN:
    """`activation`: an index of `spec.ACTIVATIONS`."""

    def __new__(
        cls,
        norm: Norm | None,
        gate: Linear,
        up: Matrix | None,
        down: Matrix,
        down_bias: F32 | None,
        activation: int,
        threshold: float,
        up_relu: bool,
        bundles: bool,
        sub_norm: Norm | None,
        join: Join,
        predictor: Predictor | None = None,
        disk: DiskRows | None = None,
        gate_disk: DiskRows | None = None,
        gate_bias: F32 | None = None,
        up_bias: F32 | None = None,
        alpha: float = 1.0,
        limit: float = 0.0,
        stream: StreamedLayer | None = None,
    ) -> FFN:
        """`disk`: up and down are matrices over its whole pool, [slots, dim]. `gate_disk`: gate is, without a
        bias, which is `gate_bias` [neurons] then. `up_bias` [neurons]: not of bundles. `alpha`, `limit`:
        swiglu_oai's. `stream`: gate, up and down are the first rows, and the gate's bias is `gate_bias`."""

    @property
    def neurons(self) -> int: ...
    @property
    def from_disk(self) -> bool: ...

class RouterRule:
    """`model.spec.Router`; score, weights and group_rule: numbers of its names."""

    def __new__(
        cls,
        *,
        score: int,
        weights: int,
        epsilon: float,
        epsilon_floor: bool,
        scale: float,
        groups: int,
        groups_kept: int,
        group_rule: int,
        scales_input: bool = False,
    ) -> RouterRule: ...

class Mixture:
    """Experts of one shape, without norm and with a plain join, `active` of which compute each token.

    `selection_bias` [experts] is added to scores for the choice. `shared`: takes every token; its matrices
    are plain. `shared_router`, f32 [1, dim]: its part is multiplied by sigmoid(w . x).
    `router_norm`: of the router's own input, the stream. `expert_scale` [experts]: times the weights.
    `experts_norm`: of the experts' sum, beside which the shared FFN has its own norm and join.
    `disk`: experts are plain matrices that come from disk; theirs say where they lie in slot 0 of its pool.
    Without a router calls have to be given the weights: as of some of a layer's experts.
    """

    def __new__(
        cls,
        norm: Norm | None,
        router: Linear | None,
        experts: tuple[FFN, ...],
        active: int,
        join: Join,
        *,
        rule: RouterRule,
        selection_bias: F32 | None = None,
        shared: FFN | None = None,
        shared_router: Matrix | None = None,
        router_norm: Norm | None = None,
        expert_scale: F32 | None = None,
        experts_norm: Norm | None = None,
        disk: DiskExperts | None = None,
    ) -> Mixture: ...
    def before(self, next: Mixture) -> None:
        """The next layer's is this one: its experts are guessed, and read ahead, beside calls of this one and
        of the one before. ValueError: not both are on disk, one behind the other in one queue of reads, or it
        has no router."""

    def route(self, logits: F32, weights: F32) -> None:
        """`weights`: how much of each expert tokens with these logits get; both [tokens, experts]."""

    @property
    def experts(self) -> int: ...
    @property
    def neurons(self) -> int:
        """Of all experts."""

    @property
    def from_disk(self) -> bool: ...
    @property
    def reads(self) -> tuple[int, int] | None:
        """Whole experts that few tokens asked for, and those of them that were not in memory, so far.

        None where experts are not on disk, or only some of their neurons are.
        """

def cache_page_bytes(type: int, dim: int, block: int) -> int:
    """Bytes of a page of one head's keys, or values: `block` positions."""

class KVPages:
    """A layer's keys and values, whose arrays it keeps. Types: numbers of `modes.CACHE_TYPES`.

    f16: k [heads * pages, dim, block], v [heads * pages, block, dim]; else u8 [heads * pages, bytes of a
    page]. Page p of head h is at r * heads + h * w + p - r, where r is p rounded down to a whole run of
    `limits().page_run` pages, and w is the pages of that run: fewer in the last one. v None: k is latents,
    f16 [pages, block, dim].
    """

    def __new__(
        cls, k: F16 | U8, v: F16 | U8 | None, k_type: int, v_type: int, heads: int, dim: int, block: int
    ) -> KVPages: ...

class Step:
    """The tokens of one step: where they are, and their angles.

    `window` 0: for any heads. Else for heads with a window of at most that: pages before it may be -1.
    `state_from`, `state_to` [sequences]: slots of states; -1: none yet. `ends` [tokens]: one more than the
    last position that a token attends to, which is its sequence's last; None: its own.
    """

    def __new__(
        cls,
        positions: I32,
        sequence: I32,
        table: I32,
        block: int,
        window: int,
        cos: F32 | None,
        sin: F32 | None,
        state_from: I32 | None = None,
        state_to: I32 | None = None,
        ends: I32 | None = None,
    ) -> Step: ...

class Context:
    """A thread pool and its scratch memory. `isa` "" is the best this CPU has."""

    def __init__(self, threads: int, isa: str = "") -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def group(self) -> int:
        """Rows of a group, in which rows are interleaved."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes that calls have taken so far, and keep."""

    def interleaves(self, w: Matrix) -> bool:
        """Return whether this matrix is multiplied faster with its rows interleaved."""
    def interleaved(self, arena: Arena, w: Matrix) -> Matrix:
        """Interleave a matrix's rows where they are. Other matrices over them see nonsense."""
    def embed(self, w: Matrix, ids: I32, out: F32) -> None: ...
    def norm(self, x: F32, weight: F32, bias: F32 | None, eps: float, layer: bool, out: F32) -> None: ...
    def matmul(self, w: Matrix, x: F32, bias: F32 | None, out: F32, add: bool) -> None: ...
    def attention(self, qkv: F32, heads: Heads, step: Step, kv: KVPages, out: F32) -> None:
        """`qkv` is worked on in place."""

    def attention_add(self, x: F32, h: F32, layer: Attention, step: Step, kv: KVPages) -> None: ...
    def mixer_add(self, x: F32, h: F32, layer: Mixer, step: Step, states: F32) -> None:
        """`states` [slots, state_floats]."""

    def per_layer_add(self, x: F32, layer: PerLayer, given: F32) -> None: ...
    @overload
    def read_ahead(self, h: F32, layer: FFN, sparsity: int) -> None:
        """Begins the reads that `ffn_add` or `moe_add` will need. `h`: the residual before attention."""

    @overload
    def read_ahead(self, h: F32, layer: Mixture, sparsity: int, weights: F32 | None = None) -> None: ...
    def routed(self, h: F32, layer: Mixture, out: F32) -> None:
        """How much of each expert every token of h gets, [tokens, experts], of a router that reads h."""

    def ffn_add(
        self, x: F32, h: F32, layer: FFN, sparsity: int, record: F32 | None = None
    ) -> tuple[int, int, int, int, int]:
        """-> (non-zero activations, up/down rows read, up/down rows of a dense pass, gate rows read, bytes of
        the predictor read). `sparsity`: a number of `sparsity.SPARSITIES`.

        `record` [tokens, neurons] takes h, what down is multiplied with (before a sub-norm); 0 where skipped.
        """

    def moe_add(
        self,
        x: F32,
        h: F32,
        layer: Mixture,
        sparsity: int,
        record: F32 | None = None,
        weights: F32 | None = None,
        used: F32 | None = None,
    ) -> tuple[int, int, int, int, int]:
        """As `ffn_add`; rows of a dense pass are all experts'. `record`: [tokens, experts * neurons].

        `weights`: what `routed` said; None: the router reads what experts do. `used` [tokens, experts] takes
        the weights that were computed with: 0 where a token did not go to an expert.
        """

# ---- parts of a step in another processor's queue

class StepSlot:
    """The step that tasks are about: set before each run."""

    def set(self, step: Step) -> None:
        """Not while a task runs."""

class HostTask:
    """Calls that a GPU's driver makes when its queue gets there, in the order in which they were added.

    Buffers may have more rows than the step has tokens, whose number is the slot's step's. Nothing is raised
    while it runs, and after a failure nothing is computed until `take`.
    """

    def __init__(self, context: Context, slot: StepSlot) -> None: ...
    def zero(self, out: F32) -> None:
        """The rows of the step's tokens become 0."""

    def copy(self, out: F32, x: F32) -> None:
        """The rows of the step's tokens become x's."""

    def attention(self, x: F32, h: F32, layer: Attention, slot: StepSlot, kv: KVPages) -> None:
        """`slot`: that of the attention's window."""

    def mixer(self, x: F32, h: F32, layer: Mixer, states: F32) -> None:
        """From the states that the step reads to those that it writes."""

    def matmul(self, w: Linear, x: F32, out: F32) -> None:
        """All rows of x."""

    def ffn(
        self,
        x: F32,
        h: F32,
        layer: FFN,
        sparsity: int,
        named: Any | None = None,
        record: F32 | None = None,
    ) -> None:
        """`named`: u8 [rows of x, neurons / 8], the bits of neurons that somebody has guessed.

        `record`: as `Context.ffn_add`'s.
        """

    def mixture(
        self,
        x: F32,
        h: F32,
        layer: Mixture,
        sparsity: int,
        weights: F32 | None = None,
        record: F32 | None = None,
    ) -> None:
        """`weights`: [rows of x, experts], how much of each a token gets; None: the layer's router says.

        `record`: as `Context.moe_add`'s.
        """

    def routed(self, h: F32, layer: Mixture, out: F32) -> None:
        """out: [rows of h, experts], what `mixture` takes as weights."""

    def per_layer(self, x: F32, layer: PerLayer, given: F32) -> None: ...
    def run(self) -> None: ...
    def take(self) -> tuple[int, int, int, int, int]:
        """Counts since the last time, as `Context.ffn_add` gives them; raises what a part raised."""

    @property
    def begun(self) -> int: ...
    @property
    def ended(self) -> int: ...
    @property
    def function(self) -> int:
        """Address of a void (*)(void*)."""

    @property
    def argument(self) -> int: ...

class Doorbell:
    """A thread that runs a task when a GPU's queue has written its number, and writes it back.

    `words`: u32 [queues, 32] in pinned memory. Word 0 of a row is what its queue asks for, 16 the answer.
    A queue writes a number to word 0, waits until the answer is that number, then writes 0 to the answer.
    """

    def __init__(self, words: U32) -> None: ...
    def expect(self, calls: list[tuple[int, int, int]]) -> None:
        """Number (not 0), function and argument of what queues will ask for, each once, in any order."""

    def settle(self) -> bool:
        """Forget what was not asked for; -> whether nothing runs. Only while the queues are empty."""

    @property
    def expected(self) -> int: ...

# ---- for planning and replays

class NativeLimits:
    """The core's own numbers (csrc/engine/limits.h)."""

    @property
    def pass_tokens(self) -> int:
        """Tokens of an FFN that are computed together."""

    @property
    def few_tokens(self) -> int:
        """Up to so many tokens predictors are asked."""

    @property
    def chunk_neurons(self) -> int:
        """Neurons that are worked on, and added up, together."""

    @property
    def stream_slots(self) -> int:
        """Slots at the end of a pool that belong to the running call."""

    @property
    def slot_alignment(self) -> int:
        """Offset and stride of a slot pool are multiples of so many bytes."""

    @property
    def arena_padding(self) -> int:
        """Bytes past the end of an arena that kernels may read."""

    @property
    def measured_bytes(self) -> int:
        """The least that `read_bandwidth` measures."""

    @property
    def page_run(self) -> int:
        """Pages of a kv head that lie side by side in a layer's keys or values."""

    @property
    def gap_bytes(self) -> int:
        """Two reads of a disk are one where at most so many bytes lie between."""

    @property
    def slot_table_bytes(self) -> int:
        """Tables beside each slot, at most."""

    @property
    def record_table_bytes(self) -> int:
        """Tables for each record that can be on disk, at most."""

    @property
    def half_life(self) -> float:
        """Calls after which the policy `lfu` counts a use half."""

def limits() -> NativeLimits: ...

class LayerShape:
    """`ffn_dim`: of a mixture, an expert's; `experts`: 1 where there is no router; a token takes `active`.

    `shared_dim`, `dense_dim`: neurons of the FFN of every token, and of layers with one plain FFN; 0: none.
    `bundles`: a mixture's experts are not plain matrices. `gated`: so is what attention gives. `mixer_…`: of
    recurrent layers what the first matrix gives and the last one takes, heads, a thread's inputs. The others
    are of a latent attention: what `q_b` takes (or all queries), a head's plain part, a latent without its
    turned part, a head's output.
    """

    def __new__(
        cls,
        *,
        dim: int,
        ffn_dim: int,
        experts: int,
        active: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        shared_dim: int = 0,
        dense_dim: int = 0,
        bundles: bool = False,
        gated: bool = False,
        mixer_in: int = 0,
        mixer_inner: int = 0,
        mixer_heads: int = 0,
        mixer_ring: int = 0,
        lower: int = 0,
        nope: int = 0,
        rank: int = 0,
        value: int = 0,
    ) -> LayerShape: ...

def scratch_bytes(shape: LayerShape, *, tokens: int, positions: int, threads: int) -> int:
    """Return the most that `Context.scratch_bytes` becomes, on any processor, in calls of up to `tokens` over
    up to `positions`."""

def disk_scratch_bytes(shape: LayerShape) -> int:
    """Return what calls over records on disk take besides."""

class CacheReplay:
    """A layer's cache without its disk, as `DiskRows` has it once it is loaded. ValueError: no such policy.

    `likely` [neurons]: how likely a token needs each. The policies: lfu (the engine's), lru, pinned,
    experts.
    """

    def __new__(
        cls, policy: str, *, neurons: int, hot: int, slots: int, likely: F32 | None
    ) -> CacheReplay: ...
    def step(self, needed: I32, missed: I32) -> int:
        """A step of few tokens needs these neurons, ascending. Those that the engine would read, with one
        thread, go into `missed`, which is as long at least; how many they are is returned."""

def replay_experts(
    policy: str,
    ids: I32,
    ends: I64,
    missed: I32,
    *,
    experts: int,
    slots: int,
    passing: int,
    likely: F32 | None,
) -> None:
    """A layer's experts without their disk, as `DiskExperts` has them once they are loaded.

    Step s needs the experts ids[ends[s - 1]:ends[s]], ascending; missed[s] is how many of them are read.
    `passing`: the slots of a running call. The policies: experts (the engine's), lfu, lru, pinned.
    ValueError: no such policy.
    """
