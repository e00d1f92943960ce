"""What a model is: `ModelSpec`, the one description every family is reduced to.

Facts only. Who fills it in: `models.py` (from a config.json) and `pack.py` (from a pack.json).
Nothing here knows a family's name beyond carrying it as a label.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

NORMS = ("rms", "layer")
POSITIONS = ("rope", "learned")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "fatrelu", "relu2")
UP_ACTIVATIONS = ("none", "relu")
# Exactly zero for gate <= threshold: their neurons can be skipped without changing the answer.
SPARSE_ACTIVATIONS = ("relu", "fatrelu", "relu2")


NORM_ORDERS = ("pre", "post", "sandwich")
ROPE_SCALINGS = ("linear", "yarn", "llama3", "longrope")


def later(default: Any) -> Any:
    """A field that the first packs of version 2 do not have, and mean `default` by that."""
    return field(default=default, metadata={"later": True})


@dataclass(frozen=True)
class RopeScaling:
    """How rope's frequencies differ from the plain ones. Llama 3 blends by wavelength, yarn by turns in the
    original context; longrope divides each frequency by its own factor, chosen by the session's context.
    """

    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_context: int = 1
    kind: str = later("llama3")
    attention_factor: float = later(1.0)  # yarn and longrope: cos and sin are multiplied by it
    beta_fast: float = later(32.0)  # yarn
    beta_slow: float = later(1.0)  # yarn
    truncate: bool = later(True)  # yarn: blend between whole elements
    short_factors: tuple[float, ...] = later(())  # longrope: contexts up to the original one
    long_factors: tuple[float, ...] = later(())  # longrope: longer ones


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only transformer. A dense FFN is a mixture with `n_experts == 1`.

    With more, a router picks `n_experts_active` for each token; their answers are added up, weighted by the
    softmax of the router's logits of those.

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
    norm_order: str = later(
        "pre"
    )  # x += f(norm(x)); post: x = norm(x + f(x)); sandwich: x += norm'(f(norm(x)))
    final_norm: bool = later(True)
    parallel: bool = later(False)  # attention and FFN read the same x
    embed_dim: int | None = later(None)  # projected to and from dim; None: dim itself
    embed_scale: float = later(1.0)
    residual_scale: float = later(1.0)  # x += residual_scale * f(x)
    logit_scale: float = later(1.0)
    logit_softcap: float | None = later(None)  # logits become cap * tanh(logits / cap)
    attention_scale: float | None = later(None)  # of scores; None: head_dim ** -0.5
    attention_softcap: float | None = later(None)
    qk_norm: bool = later(False)  # an RMS norm of every head's q and k, before rope
    sub_norms: bool = later(False)  # of what attn_out and down take
    rotary_dim: int | None = later(None)  # rope turns the first `rotary_dim` elements of a head; None: all
    window_layers: tuple[int, ...] | None = later(None)  # those with the sliding window; None: all
    local_rope_theta: float | None = later(None)  # of the layers with a window, unscaled; None: as the others

    @property
    def sparse(self) -> bool:
        """True where skipping inactive neurons is exact."""
        return self.activation in SPARSE_ACTIVATIONS

    def routed(self, tokens: int) -> float:
        """Of a mixture's experts, those that some of `tokens` go to where each chooses for itself."""
        return 1.0 - (1.0 - self.n_experts_active / self.n_experts) ** tokens

    def window(self, layer: int) -> int | None:
        """How many positions layer `layer` attends to; None: all."""
        return self.sliding_window if self.window_layers is None or layer in self.window_layers else None

    @property
    def windowed(self) -> float:
        """The fraction of layers with the sliding window."""
        return 1.0 if self.window_layers is None else len(self.window_layers) / self.n_layers

    @property
    def qkv_rows(self) -> int:
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
