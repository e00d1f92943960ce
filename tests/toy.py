"""A two-layer random model in numpy and a tokenizer of ten lines: what engine and LLM tests run on."""

from __future__ import annotations

import numpy as np

from thermocline.engine.sampler import SamplingParams
from thermocline.model.spec import ModelSpec
from thermocline.ops.interface import F32, FFN, Layer, Linear, Norm, Weights

VOCAB = 97
EOS = 96
SPEC = ModelSpec(
    architecture="test",
    dim=32,
    ffn_dim=48,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    vocab_size=VOCAB,
    max_context=256,
    norm="rms",
    norm_eps=1e-5,
    activation="relu",
    bos_id=0,
    eos_ids=(EOS,),
)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def random_weights(spec: ModelSpec, seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)

    def matrix(rows: int, cols: int) -> F32:
        noise: F32 = rng.standard_normal((rows, cols), dtype=np.float32)
        return noise * np.float32(1.4 / np.sqrt(cols))

    def norm() -> Norm:
        return Norm(np.ones(spec.dim, np.float32), None)

    layers = tuple(
        Layer(
            attn_norm=norm(),
            qkv=Linear(matrix(spec.qkv_rows, spec.dim), None),
            attn_out=Linear(matrix(spec.dim, spec.n_heads * spec.head_dim), None),
            ffn_norm=norm(),
            experts=(
                FFN.whole(
                    gate=Linear(matrix(spec.ffn_dim, spec.dim), None),
                    up=matrix(spec.ffn_dim, spec.dim),
                    down=matrix(*((spec.ffn_dim, spec.dim) if spec.sparse else (spec.dim, spec.ffn_dim))),
                    down_bias=None,
                    bundles=spec.sparse,
                ),
            ),
        )
        for _ in range(spec.n_layers)
    )
    embed: F32 = rng.standard_normal((spec.vocab_size, spec.dim), dtype=np.float32)
    return Weights(embed, None, layers, norm(), Linear(matrix(spec.vocab_size, spec.dim), None))


def embedding(w: Weights) -> F32:
    """Return the array that `random_weights` made of it, to be damaged."""
    assert isinstance(w.embed, np.ndarray)
    return w.embed


WEIGHTS = random_weights(SPEC)


class Letters:
    """A tokenizer of ten lines: token i is the character chr(33 + i); 0 is special."""

    def is_special(self, token: int) -> bool:
        return token == 0

    def close(self) -> None:
        pass

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == 0 else chr(33 + token).encode()

    def _trim(self, data: bytes) -> bytes:
        return data

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        return [0, *(ord(c) - 33 for c in text)]
