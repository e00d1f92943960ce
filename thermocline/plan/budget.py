"""Without a GPU: all of a model in RAM, or as much of its FFNs as a budget has room for.

Here is nothing that a planner needs, since every session comes by.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from thermocline.errors import OutOfBudget, UsageError
from thermocline.model.sizes import ModelSizes
from thermocline.model.spec import ModelSpec
from thermocline.ops.interface import CPU
from thermocline.pack.stored_model import StoredModel
from thermocline.plan.contents import contents_of, pack_sizes, tables_of
from thermocline.plan.disk import dense_split, expert_split
from thermocline.plan.disk.dense_split import Dense, DenseSplit
from thermocline.plan.disk.disk_split import (
    Arrangement,
    Contents,
    arrange,
    arrangement_of,
    beside,
    in_part,
    least_bytes,
    predictors_in_memory,
)
from thermocline.plan.disk.expert_hits import OwnRouting, own_routing
from thermocline.plan.disk.expert_split import ExpertSplit, Mixture, divide, placed, split_of
from thermocline.plan.memory import HERE_BYTES as HERE_BYTES
from thermocline.plan.memory import Needs as Needs
from thermocline.plan.memory import chats_for, context_for, contexts_for, fit, others_of, reads_from_disk
from thermocline.plan.placement import DISK, LayerPlacement, NeuronRange, Placement

if TYPE_CHECKING:
    from thermocline.pack.predictor import Predictors
    from thermocline.plan.planner import Plan


@dataclass(frozen=True)
class Decision:
    """A placement, and what it was made of: `arrangement` needs that once more."""

    placement: Placement
    contents: Contents | None = None  # of RAM, where the disk has neurons
    plan: Plan | None = None  # with what is predicted, where there is a GPU
    mixture: Mixture | None = None  # where the disk has experts
    dense: Dense | None = None  # where it has rows of FFNs

    @staticmethod
    def of_plan(plan: Plan, contents: Contents, routing: Callable[[], OwnRouting | None]) -> Decision:
        """Return a plan with a GPU, as decided. `contents`: of the model, `routing`: a mixture's own."""
        placement, spec = plan.placement, contents.spec
        if not placement.from_disk:
            return Decision(placement, plan=plan)
        if reads_from_disk(spec, gpu=True) == "experts":
            mixture = Mixture(spec, contents.tensors, routing())
            return Decision(placement, plan=plan, mixture=mixture.beside(placement))
        return Decision(placement, contents, plan)

    @cached_property
    def arrangement(self) -> Arrangement | None:
        """The shares of RAM that the placement gives to neurons; None where none are on disk."""
        if self.contents is None or not self.placement.from_disk:
            return None
        return arrangement_of(beside(self.contents, self.placement), self.placement)

    @cached_property
    def experts(self) -> ExpertSplit | None:
        """The slots that the placement gives to experts; None where none are on disk."""
        return None if self.mixture is None else split_of(self.mixture, self.placement)

    @cached_property
    def rows(self) -> DenseSplit | None:
        """The rows of FFNs that the placement holds; None where none come in a stream."""
        return None if self.dense is None else dense_split.split_of(self.dense, self.placement)


def without_gpu(pack: StoredModel, predictors: Predictors | None, needs: Needs) -> Decision:
    """All weights in memory if they fit in the budget, else as `arrange` or `divide` has it; OutOfBudget.

    A default context is shorter where weights do not fit beside it.
    """
    spec, choices, left = pack.spec, tables_of(pack), reads_from_disk(pack.spec)
    contexts = contexts_for(spec, needs.context, needs.budget, needs.types)
    for context, tables in itertools.product(contexts, choices):
        sizes = pack_sizes(pack, predictors, tables)
        try:
            found = fit(spec, needs, weights_bytes=sizes.weights_bytes, context=context)
            return Decision(in_ram(spec, sizes, needs, context, needs.kv_tokens or found))
        except OutOfBudget as e:
            refused = e
            if needs.budget is None or (tables == choices[-1] and left is None):
                raise
    assert needs.budget is not None, "without a limit everything fits"
    whole = sizes.weights_bytes
    if left == "experts":
        mixture = Mixture(spec, pack.tensors, own_routing(pack), threads=needs.threads)
        more = {} if predictors is None else {"predictors": predictors_in_memory(spec, predictors.nbytes)}
        return _experts_on_disk(mixture, needs, context, whole, more, refused)
    if left == "rows":
        return _rows_on_disk(Dense(spec, pack.tensors, needs.threads), needs, context, whole, refused)
    kv_tokens = needs.kv_tokens or context
    others = _others(spec, needs, context, kv_tokens)
    contents = contents_of(pack, predictors, needs.sparsity)
    if least_bytes(contents, others) >= whole + sum(others.values()):
        raise refused  # a small model: what reads from disk takes more than its neurons
    a = arrange(contents, needs.budget, others, limit=needs.limit)
    return Decision(in_part(a, context, kv_tokens), contents)


def check_read_budget(spec: ModelSpec, mb: float) -> None:
    """Raise UsageError where a token could leave out no whole expert, however much is on disk."""
    kind = reads_from_disk(spec)
    if kind == "experts":
        return
    why = (
        "neurons of this model come from disk, and only whole experts can be left out"
        if kind == "neurons"
        else "a token needs all of this model, which has no experts to leave out"
    )
    raise UsageError(f"--read-budget {mb:g}: {why}; leave it out")


def _experts_on_disk(
    m: Mixture, needs: Needs, context: int, whole: int, more: dict[str, int], refused: OutOfBudget
) -> Decision:
    """Place a mixture with the keys and values of as many chats as the budget bears.

    Raises `refused` where all of its weights, `whole`, take no more than what reads experts.
    """
    assert needs.budget is not None, "without a limit everything fits"

    def others(tokens: int) -> dict[str, int]:
        return _others(m.spec, needs, context, tokens) | more

    tokens = _chats_tokens(needs, context, whole, others, lambda x: expert_split.least_bytes(m, x), refused)
    split = divide(m, needs.budget, others(tokens), limit=needs.limit)
    return Decision(placed(split, context, tokens), mixture=m)


def _rows_on_disk(d: Dense, needs: Needs, context: int, whole: int, refused: OutOfBudget) -> Decision:
    """Do as `_experts_on_disk` for a dense model: chats at once share the stream of rows."""
    assert needs.budget is not None, "without a limit everything fits"

    def others(tokens: int) -> dict[str, int]:
        return _others(d.spec, needs, context, tokens)

    tokens = _chats_tokens(needs, context, whole, others, lambda x: dense_split.least_bytes(d, x), refused)
    rows = dense_split.divide(d, needs.budget, others(tokens), limit=needs.limit)
    return Decision(dense_split.placed(rows, context, tokens), dense=d)


def _chats_tokens(
    needs: Needs,
    context: int,
    whole: int,
    others: Callable[[int], dict[str, int]],
    least: Callable[[dict[str, int]], int],
    refused: OutOfBudget,
) -> int:
    """Return the positions of keys and values: of as many chats as the budget bears, if nobody says how many.

    `others`: what a session takes beside weights, by positions; `least`: the smallest budget with that.
    Raises `refused` where that is no less than with all weights, `whole`.
    """
    one = others(needs.kv_tokens or context)
    if least(one) >= whole + sum(one.values()):
        raise refused
    if needs.kv_tokens is not None:
        return needs.kv_tokens
    assert needs.budget is not None, "without a limit everything fits"
    return context * chats_for(needs.max_batch, needs.budget, lambda n: others(n * context), least)


def all_in_ram(pack: StoredModel, predictors: Predictors | None, needs: Needs) -> Decision:
    """Place all of a pack in RAM, for a caller that made sure that it fits."""
    context = context_for(pack.spec, needs.context)
    return Decision(in_ram(pack.spec, pack_sizes(pack, predictors), needs, context, needs.kv_tokens))


def _others(spec: ModelSpec, needs: Needs, context: int, kv_tokens: int) -> dict[str, int]:
    return others_of(
        spec,
        context=context,
        kv_tokens=kv_tokens,
        max_batch=needs.max_batch,
        threads=needs.threads,
        types=needs.types,
        beside=needs.beside,
        kept=needs.kept,
    )


def in_ram(
    spec: ModelSpec, sizes: ModelSizes, needs: Needs, context: int, kv_tokens: int | None = None
) -> Placement:
    """Place all of a model in RAM, whatever is free there."""
    kv_tokens = kv_tokens or context
    others = _others(spec, needs, context, kv_tokens)
    parts = {"embedding": sizes.embed.bytes, "buffers": others["buffers"], "runtime": others["runtime"]}

    def add(part: str, nbytes: int) -> None:
        if nbytes:
            parts[part] = parts.get(part, 0) + nbytes

    for x in sizes.layers:
        every = np.array(x.neurons)
        add("attention", x.attention.bytes)
        add("predictors", x.predictor.bytes)
        add("gate rows", int(x.gate_bytes(every)))
        add("up and down rows", int(x.bundle_bytes(every)))
    add("keys and values", others["keys and values"])
    for part in ("recurrent states", "prompt cache", "the command's own"):
        add(part, others.get(part, 0))
    add("head", sizes.head.bytes)
    predictor = CPU if needs.sparsity == "predict" else None
    widths = (spec.ffn(i).width for i in range(spec.n_layers))
    layers = tuple(LayerPlacement(CPU, predictor, (NeuronRange(CPU, n),)) for n in widths)
    nbytes = {CPU: parts} | ({DISK: {"embedding": sizes.left_bytes}} if sizes.tables else {})
    return Placement(layers, CPU, context, kv_tokens, nbytes, sizes.tables)
