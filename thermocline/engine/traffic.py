"""The bytes that one decode step reads from memory, by part of the model."""

from __future__ import annotations

from dataclasses import dataclass, fields

from thermocline.engine.kv_cache import bytes_for
from thermocline.model.modes import PLAIN, CacheTypes
from thermocline.model.spec import ModelSpec
from thermocline.ops.interface import F32, FFN, Mixer, Norm, WeightMatrix, Weights


@dataclass(frozen=True)
class Traffic:
    """The bytes that one decode step reads from memory."""

    fixed_bytes: int  # all but experts' gate, up and down, with norms and biases: once per step
    gate_bytes: float  # one gate row, as the mean of all layers
    row_bytes: float  # one up or down row, likewise
    position_bytes: int  # keys and values of one position
    state_bytes: int = 0  # a sequence's states in recurrent layers

    @staticmethod
    def of(spec: ModelSpec, weights: Weights, types: CacheTypes = PLAIN) -> Traffic:
        gates, rows, ffns = 0.0, 0.0, 0
        fixed = _nbytes(weights.head.weight, weights.head.bias) + _norm_bytes(weights.out_norm)
        for layer in weights.layers:
            fixed += _norm_bytes(layer.attn_norm) + _norm_bytes(layer.ffn_norm)
            for linear in (layer.qkv, layer.attn_out):
                fixed += 0 if linear is None else _nbytes(linear.weight, linear.bias)
            fixed += _nbytes(layer.attn_gate) + _mixer_bytes(layer.mixer)
            if (w := layer.latent) is not None:
                fixed += _nbytes(w.q_norm, w.q_b, w.kv_norm, w.k_b, w.v_b)
            if layer.router is not None:
                fixed += _nbytes(layer.router.weight, layer.router.bias, layer.shared_router)
            for p in () if layer.shared is None else layer.shared.parts:
                fixed += _nbytes(p.gate.weight, p.up, p.down)
            ffns += len(layer.experts)
            for f in layer.experts:
                fixed += _nbytes(f.down_bias)
                row = f.parts[-1].gate.weight  # on disk, gate rows take turns in slots
                gates += _nbytes(row) / row.shape[0]
                gates += 4.0 * any(p.gate.bias is not None for p in f.parts)
                gates += 4.0 * any(p.up_bias is not None for p in f.parts)
                rows += _row_bytes(f)
            if layer.per_layer is not None:
                fixed += _nbytes(layer.per_layer.gate, layer.per_layer.down)
        if weights.token_inputs is not None:
            fixed += _nbytes(weights.token_inputs.project)
        states = 4 * sum(map(spec.state_floats, range(spec.n_layers)))
        return Traffic(fixed, gates / ffns, rows / ffns, bytes_for(spec, 1, types), states)


def _row_bytes(f: FFN) -> float:
    """Return the mean bytes of an up or down row: each tensor has its own format."""
    part = f.parts[-1]
    slots = part.down.shape[0 if f.bundles else 1]  # on disk, rows take turns in them
    return _nbytes(part.up, part.down) / (slots * (2 if part.up is not None else 1))


def _nbytes(*arrays: WeightMatrix | F32 | None) -> int:
    return sum(a.nbytes for a in arrays if a is not None)


def _mixer_bytes(mixer: Mixer | None) -> int:
    return 0 if mixer is None else _nbytes(*(getattr(mixer, f.name) for f in fields(mixer)))


def _norm_bytes(norm: Norm | None) -> int:
    return 0 if norm is None else _nbytes(norm.weight, norm.bias)
