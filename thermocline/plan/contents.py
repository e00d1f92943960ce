"""A pack as the planner sees it: the sizes of its parts, and what memory is divided for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from thermocline.model.sizes import ModelSizes, lookup_bytes, sizes_of
from thermocline.model.spec import ModelSpec
from thermocline.model.tensors import TensorSpec
from thermocline.pack import blocks
from thermocline.pack.predictor import Predictors, named_for_active
from thermocline.pack.stored_model import StoredModel, tensor_specs
from thermocline.plan import hotness
from thermocline.plan.disk.disk_split import Contents, looked_up
from thermocline.plan.hotness import Curve
from thermocline.plan.memory import reads_from_disk


def left_out(spec: ModelSpec, specs: Mapping[str, TensorSpec]) -> list[tuple[str, ...]]:
    """Return the tables to leave on disk: by default those of which nothing but rows is ever read, then all.

    By default a table of gigabytes: a row took 0.2 ms (LOG, "Rows of embeddings from disk"). Neurons that can
    be on disk have all tables there (`disk_split.looked_up`).
    """
    every = tuple(n for n in looked_up(spec, specs) if specs[n].bytes > lookup_bytes(specs[n].stride))
    always = tuple(n for n in every if n == "per_layer.embed.weight")
    return [always] if reads_from_disk(spec) == "neurons" or always == every else [always, every]


def tables_of(model: StoredModel) -> list[tuple[str, ...]]:
    """Return `left_out` of a model in files."""
    return left_out(model.spec, {n: t for n, t in tensor_specs(model).items() if model.has_rows(n)})


def shape_sizes(
    spec: ModelSpec, specs: Mapping[str, TensorSpec], weight_format: str, tables: tuple[str, ...] = ()
) -> ModelSizes:
    """Return the sizes of a model that has exactly these tensors, with `tables` on disk."""
    sizes = sizes_of(spec, {n: t for n, t in specs.items() if n not in tables}, weight_format)
    held = sizes.embed.bytes + sum(lookup_bytes(specs[n].stride) for n in tables)
    left = sum(specs[n].bytes - specs[n].stride for n in tables)
    embed = dataclasses.replace(sizes.embed, bytes=held)
    return dataclasses.replace(sizes, embed=embed, tables=tables, left_bytes=left)


def pack_sizes(pack: StoredModel, predictors: Predictors | None, tables: tuple[str, ...] = ()) -> ModelSizes:
    """Return the sizes of a pack's parts, with `tables` on disk.

    Whole blocks are read around tensors that are left out; what they add counts as the embedding's.
    """
    held = {n: t for n, t in tensor_specs(pack).items() if ".predictor." not in n}
    sizes = shape_sizes(pack.spec, held, pack.weight_format, tables)
    more = max(0, blocks.memory_bytes(pack, None, tables) - sizes.weights_bytes)
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
