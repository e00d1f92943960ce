"""Queues latent attention on a device: its heads meet latents as they are kept (csrc/engine/latent.cpp).

Queries become queries for latents through matrices of each head, and what they find the heads' outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from thermocline.ops.device_ffn import Pair, PartQueue
from thermocline.ops.device_layers import DeviceAttention, DeviceLatent
from thermocline.ops.device_rows import Operand
from thermocline.ops.interface import KVLayer

if TYPE_CHECKING:
    from thermocline.ops.gpu import DeviceStep


class LatentQueue:
    """Queues on the device of a `PartQueue`, in buffers of a step."""

    def __init__(self, queue: PartQueue, pairs: Mapping[str, Pair]) -> None:
        self._queue, self._pairs = queue, pairs

    def attend(
        self, b: DeviceAttention, w: DeviceLatent, normed: Operand, step: DeviceStep, kv: KVLayer
    ) -> Operand:
        """Return the heads' outputs [tokens, heads * value]."""
        a, n, heads = b.heads.latent, len(normed), b.heads
        assert a is not None
        q, k = self._queue, self._queue.kernels
        run, latent = q.device.run, self._taken("latent", n)
        queries, absorbed, found, out = (
            self._taken(name, n).view(n, heads.n, -1) for name in ("queries", "qkv", "found", "attended")
        )
        q.times(latent, w.latent, normed)
        if w.q_b is None:
            q.times(queries.flatten(1), w.queries, normed)
        else:
            lower = self._taken("lower", n)
            q.times(lower, w.queries, normed)
            run(k.norm, lower, lower, w.q_norm, None, a.norm_eps, False)
            q.times(queries.flatten(1), w.q_b, Operand(lower))
        run(k.head_products, absorbed[:, :, : a.kv_rank], w.k_b, queries[:, :, : a.nope])
        where = (step.positions, step.sequence, step.table, kv.k)
        run(k.latent_store, absorbed, queries, latent, heads, w.kv_norm, step.cos, step.sin, *where)
        run(k.latent_attention, found, absorbed, heads, *where, q.scratch)
        run(k.head_products, out, w.v_b, found)
        return Operand(out.flatten(1))

    def _taken(self, name: str, tokens: int) -> Tensor:
        return self._pairs[name][0][:tokens]
