"""Several models at once in one budget of memory, to compare them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from thermocline.errors import OutOfBudget
from thermocline.plan.memory import runtime_bytes
from thermocline.session.session import Progress, Session, budget_for, silent

if TYPE_CHECKING:
    from thermocline.pack.stored_model import StoredModel
    from thermocline.session.options import EngineOptions


@dataclass(frozen=True)
class SideModel:
    """A model to open beside others. `beside`: bytes that the command takes for it."""

    model: StoredModel
    options: EngineOptions
    beside: int

    def open(self, progress: Progress, *, fits: bool = False) -> Session:
        return Session.open(self.model, self.options, progress=progress, beside=self.beside, fits=fits)


def open_sessions(sides: Sequence[SideModel], stack: ExitStack, progress: Progress = silent) -> list[Session]:
    """Open a session for each of the models, all in one budget, and let `stack` close them.

    The options of all have the same `ram`. Each model's share is in proportion to what it takes as a whole.
    So if the budget has room for all of them, each has what it takes. Raises as `Session.open` does.
    """
    budget, _ = budget_for(sides[0].options.ram)
    if len(sides) == 1 or budget is None:
        return [stack.enter_context(x.open(progress)) for x in sides]
    # Python and a tokenizer count in each session, and are there once.
    budget += (len(sides) - 1) * min(runtime_bytes(x.model.spec) for x in sides)
    wholes = [_whole_bytes(x) for x in sides]
    opened = []
    for x, whole in zip(sides, wholes, strict=True):
        share = budget * whole // sum(wholes)
        try:
            part = replace(x, options=replace(x.options, ram=share / 2**30))
            opened.append(stack.enter_context(part.open(progress)))
        except OutOfBudget as e:
            raise OutOfBudget(
                f"{x.model.path}: {whole / sum(wholes):.0%} of the memory is for it, the rest for the other "
                f"model: {e}"
            ) from None
    return opened


def _whole_bytes(x: SideModel) -> int:
    with x.open(silent, fits=True) as session:
        return session.memory_bytes
