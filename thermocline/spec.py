"""What a model is: `ModelSpec`, the one description every family is reduced to.

Facts only. Who fills it in: `models.py` (from a config.json) and `pack.py` (from a pack.json).
Nothing here knows a family's name beyond carrying it as a label.
"""

from __future__ import annotations

from dataclasses import dataclass

NORMS = ("rms", "layer")
POSITIONS = ("rope", "learned")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "fatrelu", "relu2")
UP_ACTIVATIONS = ("none", "relu")
# Exactly zero for gate <= threshold: their neurons can be skipped without changing the answer.
SPARSE_ACTIVATIONS = ("relu", "fatrelu", "relu2")


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3's frequency scaling (the only kind so far; others are refused by name)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only transformer. A dense FFN is a mixture with `n_experts == 1`.

    FFN of neuron i (`gated`): h_i = act(gate_i . x + b_i) * up_act(up_i . x);  y = sum_i h_i * down_i + b.
    Ungated: h_i = act(gate_i . x + b_i): what others call fc1 is the gate here.
    """

    architecture: str
    dim: int
    ffn_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    norm: str
    norm_eps: float
    activation: str
    activation_threshold: float = 0.0  # fatrelu only: active means gate > threshold
    up_activation: str = "none"  # "relu" makes it dReLU
    gated: bool = True
    position: str = "rope"  # rope is the half-rotation layout (element i pairs with i + head_dim/2)
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None  # attend to the last `sliding_window` positions only
    tied_head: bool = False
    n_experts: int = 1
    n_experts_active: int = 1
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    @property
    def sparse(self) -> bool:
        """True where skipping inactive neurons is exact."""
        return self.activation in SPARSE_ACTIVATIONS

    @property
    def qkv_rows(self) -> int:
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
