"""What `plan` reads and writes: a pack or a shape as sizes and hotness; a plan as JSON, stamped.

Must not know how a plan is found, nor flags.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from thermocline.convert import synthetic
from thermocline.errors import UsageError
from thermocline.files.bounded import Json
from thermocline.files.whole import replacing
from thermocline.machine.tiers import Tiers, render
from thermocline.model.sizes import ModelSizes, sizes_of
from thermocline.model.spec import ModelSpec
from thermocline.model.tensors import expected_tensors, place
from thermocline.pack import blocks
from thermocline.pack.activity_profile import PROFILE
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import named_for_active, open_predictors
from thermocline.pack.sidecar import stamp
from thermocline.plan import hotness
from thermocline.plan.disk_split import Contents
from thermocline.plan.hotness import Curve as Curve
from thermocline.plan.hotness import Hotness
from thermocline.plan.planner import Plan
from thermocline.plan.problem import Ask

KIND, VERSION = "thermocline-plan", 1


@dataclass(frozen=True)
class Subject:
    """A model to plan for. `made_from`: sha256 of what says so, by name."""

    name: str
    spec: ModelSpec
    sizes: ModelSizes
    hotness: Hotness
    made_from: dict[str, str]
    contents: Contents


def of_pack(path: Path, sparsity: str, curve: Curve) -> Subject:
    pack = Pack.open(path)
    formats = {n: t.format for n, t in pack.tensors.items()}
    ranks = pack.predictor.ranks if pack.predictor is not None else ()
    expected = expected_tensors(pack.spec, pack.weight_format, formats, ranks)
    held = {n: t for n, t in expected.items() if n in pack.tensors and ".predictor." not in n}
    sizes = sizes_of(pack.spec, held, pack.weight_format)
    excess = None
    predictors = open_predictors(pack) if sparsity == "predict" and pack.spec.sparse else None
    if predictors is not None:
        with predictors:
            each, rest = divmod(predictors.nbytes, predictors.count)
            sizes = sizes.with_predictors([each + (i < rest) for i in range(predictors.count)])
            excess = named_for_active(predictors.report)
    # Whole blocks are read around what is left out: what that adds is counted too.
    more = blocks.memory_bytes(pack) - sizes_of(pack.spec, held, pack.weight_format).weights_bytes
    sizes = dataclasses.replace(
        sizes, embed=dataclasses.replace(sizes.embed, bytes=sizes.embed.bytes + max(0, more))
    )
    heat, made_from = hotness.of_pack(pack, curve, excess), {"pack": stamp(path)}
    if (path / PROFILE).exists():
        made_from["profile"] = hashlib.sha256((path / PROFILE).read_bytes()).hexdigest()
    nbytes = None if predictors is None else predictors.nbytes
    contents = Contents(pack.spec, pack.tensors, nbytes, sparsity, heat)
    return Subject(str(path), pack.spec, sizes, heat, made_from, contents)


def of_shape(
    shape: str,
    weight_format: str,
    sparsity: str,
    predictor_share: float,
    curve: Curve,
    activation: str | None = None,
) -> Subject:
    """A known shape or a config.json. `predictor_share`: predictors' numbers, of the model's."""
    name, spec, tensor_map = synthetic.read_shape(shape, activation)
    if curve.active is not None and not spec.sparse:
        spec = dataclasses.replace(spec, activation="relu")
    expected = expected_tensors(spec, weight_format)
    held = {n: t for n, t in expected.items() if not t.optional or n in tensor_map.tensors}
    sizes = sizes_of(spec, held, weight_format)
    nbytes = None
    if predictor_share and spec.sparse and sparsity == "predict":
        numbers = predictor_share * sum(t.parameters for t in held.values() if not t.vector)
        each = round(numbers / spec.n_layers) * 34 // 32  # int8, a scale for each 32
        nbytes = each * spec.n_layers
        sizes = sizes.with_predictors([each] * spec.n_layers)
    digest = hashlib.sha256(repr((spec, sorted(held))).encode()).hexdigest()
    heat = curve.hotness(spec)
    contents = Contents(spec, place(held)[0], nbytes, sparsity, heat)
    return Subject(f"{name} {weight_format}", spec, sizes, heat, {"shape": digest}, contents)


# ---- out


def plan_json(subject: Subject, tiers: Tiers, ask: Ask, plan: Plan) -> Json:
    """The contract of `plan --json` and of the file (docs/reference/keys.toml)."""
    hardware = hashlib.sha256(render(tiers).encode()).hexdigest()
    return {
        "kind": KIND,
        "version": VERSION,
        "model": subject.name,
        "made_from": {**subject.made_from, "hardware": hardware},
        "hardware": tiers.name,
        "hotness": {"source": subject.hotness.source, "measured": subject.hotness.measured},
        "ask": dataclasses.asdict(ask),
        "budget": dataclasses.asdict(plan.budget),
        "bytes": plan.bytes,
        "head": plan.head,
        "layers": [dataclasses.asdict(layer) for layer in plan.layers],
        "hot": {str(batch): list(counts) for batch, counts in plan.hot.items()},
        "gpu_share": plan.share,
        "predicted": [{**dataclasses.asdict(p), "bound": p.bound} for p in plan.predicted],
        "batches": [{**dataclasses.asdict(p), "bound": p.bound} for p in plan.buckets],
        "objective": plan.objective_us,
        "greedy_objective": plan.greedy_us,
        "notes": list(plan.notes),
    }


def write(path: Path, about: Json, *, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists; --force replaces it")
    with replacing(path) as new:
        new.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
