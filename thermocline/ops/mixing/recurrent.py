"""Queues recurrent layers on a device. `reference.mixer_add` says what they compute.

States lie there as slots [slots, floats], as in the reference: a step reads a sequence's from one slot and
writes the next to another.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from thermocline.model.spec import ModelSpec
from thermocline.ops.device_ffn import Pair, PartQueue
from thermocline.ops.device_layers import DeviceMixer
from thermocline.ops.device_rows import Operand
from thermocline.ops.interface import Batch


class MixerQueue:
    """Queues on the device of a `PartQueue`, in buffers of a step."""

    def __init__(self, queue: PartQueue, spec: ModelSpec, pairs: Mapping[str, Pair]) -> None:
        self._queue, self._spec, self._pairs = queue, spec, pairs

    def begin(self, batch: Batch) -> None:
        """Send the rows and slots of a step's sequences: as many in every step, some of them absent."""
        if batch.state_from is None or batch.state_to is None or "runs" not in self._pairs:
            return
        there, here = self._pairs["runs"]
        runs = np.full(tuple(here.shape), (0, 0, -1, -1), np.int32)
        for s, slots in enumerate(zip(batch.state_from, batch.state_to, strict=True)):
            mine = np.flatnonzero(batch.sequence == s)
            runs[s] = (mine[0] if len(mine) else 0, len(mine), *slots)
        here.copy_(torch.from_numpy(runs))
        self._queue.device.copy(there, here)

    def mix(self, b: DeviceMixer, normed: Operand, sequence: Tensor, states: Tensor) -> Tensor:
        """Return what the last matrix reads, [tokens, its columns]."""
        q, r, n = self._queue, self._spec.recurrent, len(normed)
        assert r is not None
        run, k, runs = q.device.run, q.kernels, self._pairs["runs"][0]
        into, at = self._taken("into", n, sum(p.weight.rows for p in b.first)), 0
        for part in b.first:
            q.times(into[:, at : at + part.weight.rows], part, normed)
            at += part.weight.rows
        if b.kind == "conv":
            out = self._taken("mixed", n, self._spec.dim)
            run(k.convolve, out, into, b.conv, None, sequence, runs, states, True)
            return out
        delta = b.kind == "deltanet"
        x, out = self._taken("convolved", n, r.channels), self._taken("mixed", n, r.inner)
        first = 0 if delta else r.inner
        assert b.decay is not None and b.dt_bias is not None and b.norm is not None
        run(k.convolve, x, into[:, first:], b.conv, b.conv_bias, sequence, runs, states, False)
        gates = into[:, r.channels + r.inner :]
        run(k.scan, out, x, gates, r, b.decay, b.dt_bias, b.skip, runs, states)
        z = into[:, r.channels : r.channels + r.inner] if delta else into[:, : r.inner]
        run(k.gated_norm, out, z, b.norm, r.heads if delta else r.groups, self._spec.norm_eps, not delta)
        return out

    def _taken(self, name: str, tokens: int, columns: int) -> Tensor:
        """Return the first rows of a buffer for so many columns; kinds of layers differ in width."""
        whole = self._pairs[name][0].view(-1)
        return whole[: tokens * columns].view(tokens, columns)
