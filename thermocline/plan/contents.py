"""A pack as the planner sees it: the sizes of its parts, and what memory is divided for."""

from __future__ import annotations

import dataclasses

from thermocline.model.sizes import ModelSizes, sizes_of
from thermocline.pack import blocks
from thermocline.pack.predictor import Predictors, named_for_active
from thermocline.pack.stored_model import StoredModel, tensor_specs
from thermocline.plan import hotness
from thermocline.plan.disk_split import Contents
from thermocline.plan.hotness import Curve


def pack_sizes(pack: StoredModel, predictors: Predictors | None) -> ModelSizes:
    """Return the sizes of a pack's parts. Whole blocks are read around tensors that are left out.

    The bytes that those blocks add count as the embedding's.
    """
    held = {n: t for n, t in tensor_specs(pack).items() if ".predictor." not in n}
    sizes = sizes_of(pack.spec, held, pack.weight_format)
    more = max(0, blocks.memory_bytes(pack) - sizes.weights_bytes)
    sizes = dataclasses.replace(sizes, embed=dataclasses.replace(sizes.embed, bytes=sizes.embed.bytes + more))
    if predictors is not None:
        each, rest = divmod(predictors.nbytes, predictors.count)
        sizes = sizes.with_predictors([each + (i < rest) for i in range(predictors.count)])
    return sizes


def contents_of(
    pack: StoredModel, predictors: Predictors | None, sparsity: str, curve: Curve | None = None
) -> Contents:
    """Return what memory is divided for, with the pack's hotness, or `curve`'s where that says so."""
    excess = None if predictors is None else named_for_active(predictors.report)
    heat = hotness.of_pack(pack, curve or Curve(), excess)
    nbytes = None if predictors is None else predictors.nbytes
    return Contents(pack.spec, pack.tensors, nbytes, sparsity, heat)
