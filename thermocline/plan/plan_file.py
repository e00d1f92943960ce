"""A plan as JSON: what `plan --json` prints and a plan file holds, stamped with what it was made from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from thermocline.errors import UsageError
from thermocline.files.bounded import Json
from thermocline.files.whole import replacing
from thermocline.machine.tiers import Tiers, render
from thermocline.plan.planner import Plan
from thermocline.plan.problem import Ask
from thermocline.plan.subject import Subject

KIND, VERSION = "thermocline-plan", 1


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
        "placement": plan.placement.json(),
        "bytes": plan.bytes,
        "gpus": [_on_gpu(plan, device) for device in plan.allowed],
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


def _on_gpu(plan: Plan, device: str) -> Json:
    neurons = [plan.neurons(layer, device) for layer in range(len(plan.layers))]
    parts = dict(plan.placement.bytes.get(device, {}))
    return {"device": device, "vram_bytes": plan.allowed[device], "bytes": parts, "neurons": neurons}


def write(path: Path, about: Json, *, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists; --force replaces it")
    with replacing(path) as new:
        new.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
