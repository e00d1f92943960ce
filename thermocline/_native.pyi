"""csrc/bindings.cpp, typed. Arrays are C-contiguous and never converted: a wrong dtype or layout is a
TypeError, a wrong shape or value a ValueError.
"""

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F16 = NDArray[np.float16]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]

def isa() -> str:
    """The instruction set the kernels use."""

def isa_levels() -> list[str]:
    """Instruction sets this CPU supports, best first."""

def cpu_features() -> dict[str, bool]: ...
def read_bandwidth(nbytes: int, threads: int, seconds: float) -> float:
    """GB/s of reading memory: the roof."""

def crc32c(buffer: bytes | memoryview | U8, seed: int = 0) -> int:
    """CRC-32C (Castagnoli); pass the last result as seed to continue."""

ARENA_PADDING: int  # bytes past the end of an arena that kernels may read
SIGNS: int  # a `Matrix` format for predictors: a bit a weight

class Arena:
    """Memory for weights. A `Matrix` in it keeps it alive."""

    def __init__(self, nbytes: int) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    def write(self, offset: int, data: U8) -> None: ...
    def load(self, path: str, begin: int, end: int, checksums: U32, block: int) -> tuple[int, int]:
        """File bytes [begin, end) to the same place, checked. -> (0, -1), or what the first bad block has:
        (errno, -1 for EOF or 0 for a wrong checksum; the block)"""

    def gather_pages(self) -> None:
        """Once filled: into huge pages what the system did not give as such."""

    def fence(self) -> None:
        """Tests: reading past the padding, where a page must begin, ends the process from now on."""

class Matrix:
    """Rows inside an arena, one every `stride` bytes. `format`: `quant.FORMATS[...].id`."""

    def __new__(cls, arena: Arena, offset: int, format: int, rows: int, cols: int, stride: int) -> Matrix: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

# Parts of a layer, validated when they are made; they keep the arrays and matrices they were given.

class Norm:
    """RMSNorm, or LayerNorm with `layer`."""

    def __new__(cls, weight: F32, bias: F32 | None, eps: float, layer: bool) -> Norm: ...

class Linear:
    def __new__(cls, weight: Matrix, bias: F32 | None) -> Linear: ...

class Heads:
    """How the heads of a layer attend. `window` 0: to all positions; `softcap` 0: none."""

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
    ) -> Heads: ...

class Join:
    """How a half of a layer joins the residual stream: x += scale * norm(y)."""

    def __new__(cls, norm: Norm | None, scale: float) -> Join: ...

class Attention:
    def __new__(
        cls, norm: Norm | None, qkv: Linear, out: Linear, heads: Heads, sub_norm: Norm | None, join: Join
    ) -> Attention: ...

class Predictor:
    """score = second . f(first . x), or second . x without `first`; f is ReLU with `relu`, else nothing."""

    def __new__(
        cls, first: Matrix | None, second: Matrix, threshold: F32, hot: int, relu: bool
    ) -> Predictor: ...

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
    ) -> FFN: ...
    @property
    def neurons(self) -> int: ...

class Mixture:
    """Experts of one shape, without norm and with a plain join, `active` of which compute each token."""

    def __new__(
        cls, norm: Norm | None, router: Matrix, experts: tuple[FFN, ...], active: int, join: Join
    ) -> Mixture: ...
    @property
    def neurons(self) -> int:
        """Of all experts."""

class Step:
    """The tokens of one step: where they are, and their angles.

    `window` 0: for any heads. Else for heads with a window of at most that: pages before it may be -1.
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
    ) -> Step: ...

class Context:
    """A thread pool and its scratch memory. `isa` "" is the best this CPU has."""

    def __init__(self, threads: int, isa: str = "") -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
    def embed(self, w: Matrix, ids: I32, out: F32) -> None: ...
    def norm(self, x: F32, weight: F32, bias: F32 | None, eps: float, layer: bool, out: F32) -> None: ...
    def matmul(self, w: Matrix, x: F32, bias: F32 | None, out: F32, add: bool) -> None: ...
    def attention(self, qkv: F32, heads: Heads, step: Step, k: F16, v: F16, out: F32) -> None: ...
    def attention_add(self, x: F32, h: F32, layer: Attention, step: Step, k: F16, v: F16) -> None: ...
    def ffn_add(
        self, x: F32, h: F32, layer: FFN, sparsity: int, record: F32 | None = None
    ) -> tuple[int, int, int, int, int]:
        """-> (non-zero activations, up/down rows read, up/down rows of a dense pass, gate rows read, bytes of
        the predictor read). `sparsity`: an index of `decoder.SPARSITIES`.

        `record` [tokens, neurons] takes h, what down is multiplied with (before a sub-norm); 0 where skipped.
        """

    def moe_add(
        self, x: F32, h: F32, layer: Mixture, sparsity: int, record: F32 | None = None
    ) -> tuple[int, int, int, int, int]:
        """As `ffn_add`; rows of a dense pass are all experts'. `record`: [tokens, experts * neurons]."""
