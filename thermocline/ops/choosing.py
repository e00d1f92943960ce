"""Steps of one token for each sequence, whose next tokens are chosen on the GPU and stay for the next step.

Such a step needs nothing of the host but places, so it is queued while the one before it still runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from thermocline.model.spec import ModelSpec
from thermocline.ops.device_rows import DeviceRows
from thermocline.ops.interface import (
    BANNED,
    I32,
    Batch,
    ChosenToken,
    FFNStats,
    Logits,
    ResidualStream,
    TokenDraw,
    Weights,
)

if TYPE_CHECKING:
    from thermocline.ops.gpu import GpuOps, Program

log = logging.getLogger("thermocline")


def chooser(ops: GpuOps, spec: ModelSpec, weights: Weights) -> DeviceChooser | None:
    """Return what chooses tokens on the first GPU; None where a step begins or ends with the CPU."""
    table = weights.head.weight
    reasons = {
        "the head is in RAM": not isinstance(table, DeviceRows),
        "embeddings are in RAM": not spec.tied_head,
        "positions are learned, and looked up in RAM": weights.pos_embed is not None,
        "what tokens bring to layers is looked up in RAM": weights.token_inputs is not None,
        "the CPU bounds logits": spec.logit_softcap is not None,
        "several GPUs compute a step": ops.several,
    }
    why = [reason for reason, holds in reasons.items() if holds]
    if why or not isinstance(table, DeviceRows):
        log.debug("tokens are chosen on the CPU: %s", "; ".join(why))
        return None
    return DeviceChooser(ops, table, spec.embed_scale, spec.logit_scale)


@dataclass(frozen=True)
class DeviceChooser:
    ops: GpuOps
    table: DeviceRows  # of embeddings
    embed_scale: float
    logit_scale: float

    def begin(
        self,
        batch: Batch,
        draws: Sequence[TokenDraw],
        sparsity: str,
        stats: FFNStats,
        body: Callable[[ResidualStream, I32], Logits],
    ) -> QueuedStep:
        ops, n = self.ops, len(draws)
        if batch.after is None:
            ops.send("ids", batch.ids)
        ops.send("draws", as_numbers(draws))
        program, chosen = ops.choose(n, sparsity, self, cast("Callable[..., Tensor]", body))
        return QueuedStep(ops, program, ops.turn, ops.device.mark(), chosen, stats)


def as_numbers(draws: Sequence[TokenDraw]) -> NDArray[np.float64]:
    """Return draws as kernels read them, [rows, 5 + BANNED]."""
    filters = [(d.top_k, d.top_p, d.min_p, d.temperature, d.number) for d in draws]
    bans = [d.banned + (-1,) * (BANNED - len(d.banned)) for d in draws]
    return np.array([(*f, *b) for f, b in zip(filters, bans, strict=True)], np.float64)


@dataclass(frozen=True)
class QueuedStep:
    ops: GpuOps
    program: Program
    turn: int
    mark: object
    chosen: Tensor  # in RAM
    stats: FFNStats

    def choices(self) -> list[ChosenToken]:
        self.ops.device.wait(self.program.tasks, self.mark)
        self.ops.ended(self.program, self.stats)
        return [as_choice(*row) for row in self.chosen.tolist()]


def as_choice(token: int, digest: int, bits: int) -> ChosenToken:
    """Return what `torch_kernels.choose` says of a row."""
    odd = None if token >= 0 else float(np.array(bits, np.int32).view(np.float32))
    return ChosenToken(token if odd is None else ~token, digest & 0xFFFFFFFF, odd)
