"""Where PowerInfer's speed-up comes from, by this planner's model and as its paper measured it.

    python bench/plan/paper_ablation.py [-o bench/results/paper-ablation.json]

A simulation: nothing of it was run, here or on a card. The machine is the paper's PC-High by its published
bandwidths, the model Falcon-40B in FP16 (arXiv 2312.12456, figures 14 and 15). Steps, each over llama.cpp:
predictors and operators that skip neurons, in whole layers here or there (+PO); every layer divided between
both processors, its neurons drawn at random (+Engine); the hottest on the GPU (+Policy). "as theirs": with
what paper_plans.py takes PowerInfer's kernels and waiting to be. llama.cpp computes whole layers, densely.

Of a batch, tokens are taken to need neurons independently, which is more than real ones need together. This
engine asks predictors for up to 4 tokens; as theirs they are always asked, and "alike" is as how many
independent tokens the paper's batch then behaves (none: even the same token in all places is too slow here).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from paper_plans import CONTEXT, MODELS, PCS, in_turn, kept_in_ram_us, print_or_write, theirs

from thermocline.errors import OutOfBudget
from thermocline.machine.tiers import Tiers, read_tiers
from thermocline.model.sizes import PartSize
from thermocline.plan import cost
from thermocline.plan.cost import LayerWork, Reads, Speeds, Work
from thermocline.plan.hotness import Curve, independent
from thermocline.plan.planner import plan
from thermocline.plan.problem import Ask, Problem
from thermocline.plan.subject import Subject, of_shape

PAPER_STEPS = {"+PO": 3.32, "+Engine": 7.80, "+Policy": 11.69}  # Falcon-40B FP16, PC-High
PAPER_BATCHES = {1: 11.69, 4: 5.73, 8: 4.85, 16: 4.69, 32: 4.38}
# Of other models and formats: table 8, and figure 13's tokens/s (its bars mapped by matching ratios: they may
# be wrong).
PAPER_OTHERS = {
    ("OPT-30B", "f16", "PC-High"): 10.9,
    ("Llama-70B", "q4_0", "PC-High"): 3.4,
    ("OPT-66B", "q4_0", "PC-High"): 3.75,
    ("OPT-175B", "q4_0", "PC-High"): 2.66,
    ("Falcon-40B", "q4_0", "PC-High"): 1.7,
    ("OPT-30B", "q4_0", "PC-Low"): 3.4,
    ("Falcon-40B", "q4_0", "PC-Low"): 8.0,
    ("Llama-70B", "q4_0", "PC-Low"): 3.8,
}


@dataclass(frozen=True)
class Case:
    """A model on a PC, a batch at a time."""

    name: str
    format: str
    pc: str
    batch: int = 1

    @property
    def tiers(self) -> Tiers:
        return read_tiers(PCS[self.pc])

    def subject(self) -> Subject:
        m = MODELS[self.name]
        return in_turn(of_shape(m.shape, self.format, "predict", m.predictors, Curve(m.active, m.skew)))

    def problem(self, subject: Subject, tiers: Tiers, sparsity: str, objective: str = "time") -> Problem:
        ask = Ask(CONTEXT, batch=self.batch, sparsity=sparsity, objective=objective)
        return Problem(subject.spec, subject.sizes, subject.hotness, tiers, ask)


# ---- whole layers here or there


def in_layers_ts(p: Problem, *, dense: bool) -> float:
    """Tokens a second with as many whole layers on the GPU as fit there, one side after the other."""
    work = p.work()
    v, n = p.speeds(work), p.sizes.layers[0].neurons
    layers = [as_dense(x) for x in p.layers(work)] if dense else list(p.layers(work))
    room = p.room(disk=False).vram_bytes
    us = cost.TOKEN_US
    for layer, sizes in zip(layers, p.sizes.layers, strict=True):
        predictor = 0 if dense else sizes.predictor.bytes
        takes = sizes.attention.on_gpu + layer.kv_bytes + predictor + int(sizes.gpu_bytes(np.array(n)))
        here = takes <= room
        room -= takes if here else 0
        us += layer_us(layer, v, work, n if here else 0)
    head = cost.head_columns(p.sizes, v, gpu=True)
    return p.ask.batch * 1e6 / (us + float(head.us[0]) + v.sync(p.spec.dim))


def as_dense(layer: LayerWork) -> LayerWork:
    """Every row read, in order, no predictor asked."""
    every = Reads.of(np.ones(layer.sizes.neurons), Work("off"), skips=False)
    none = PartSize()
    return replace(layer, reads=every, sizes=replace(layer.sizes, predictor=none))


def layer_us(layer: LayerWork, v: Speeds, work: Work, gpu: int) -> float:
    """All of it on one side: `gpu` neurons, all or none."""
    there, counts, zero = np.array([gpu > 0]), np.array([gpu]), np.zeros(1, np.int64)
    return float(
        sum(x[0] for x in cost.layer_times(layer, v, work, there, there, counts, zero, ~there & there))
    )


def llama_ts(case: Case) -> float:
    return in_layers_ts(case.problem(case.subject(), case.tiers, "off"), dense=True)


# ---- divided layers


def divided_ts(
    case: Case, tiers: Tiers, subject: Subject, objective: str, *, kv_in_ram: bool
) -> float | None:
    """By the planner; None where it does not fit."""
    p = case.problem(subject, tiers, "predict", objective)
    try:
        found = plan(p.spec, p.sizes, p.hotness, tiers, p.ask)
    except OutOfBudget:
        return None
    us = case.batch * 1e6 / found.predicted[1].tokens_per_s
    more = case.batch * kept_in_ram_us(subject, tiers, found) if kv_in_ram else 0.0
    return case.batch * 1e6 / (us + more)


def at_random(subject: Subject, active: float) -> Subject:
    """Neurons in no order: whichever share of them is on the GPU does that share of the work."""
    each = np.full(subject.spec.ffn_dim, active)
    flat = independent([each] * subject.spec.n_layers, "none", measured=False, key=lambda layer: 0)
    return replace(subject, hotness=flat)


# ---- the paper's figures


def steps() -> Iterator[dict[str, Any]]:
    case = Case("Falcon-40B", "f16", "PC-High")
    subject, base = case.subject(), llama_ts(case)
    random = at_random(subject, MODELS[case.name].active)
    yield {"step": "llama.cpp", "ours_ts": base, "theirs_ts": base, "ours": 1.0, "theirs": 1.0, "paper": 1.0}
    slow = theirs(case.tiers, case.format)
    ours = {
        "+PO": in_layers_ts(case.problem(subject, case.tiers, "predict"), dense=False),
        "+Engine": divided_ts(case, case.tiers, random, "time", kv_in_ram=False),
        "+Policy": divided_ts(case, case.tiers, subject, "time", kv_in_ram=False),
    }
    like = {
        "+PO": in_layers_ts(case.problem(subject, slow, "predict"), dense=False),
        "+Engine": divided_ts(case, slow, random, "frequency", kv_in_ram=True),
        "+Policy": divided_ts(case, slow, subject, "frequency", kv_in_ram=True),
    }
    for name, paper in PAPER_STEPS.items():
        yield {"step": name, **both(ours[name], like[name], base), "paper": paper}


def both(ours: float | None, like: float | None, base: float) -> dict[str, Any]:
    def over(ts: float | None) -> float | None:
        return None if ts is None else ts / base

    return {"ours_ts": ours, "theirs_ts": like, "ours": over(ours), "theirs": over(like)}


def speedup(case: Case) -> dict[str, Any]:
    subject = case.subject()
    ours = divided_ts(case, case.tiers, subject, "time", kv_in_ram=False)
    slow = theirs(case.tiers, case.format)
    return both(ours, divided_ts(case, slow, subject, "frequency", kv_in_ram=True), llama_ts(case))


def batches() -> Iterator[dict[str, Any]]:
    for batch, paper in PAPER_BATCHES.items():
        case = Case("Falcon-40B", "f16", "PC-High", batch)
        found = speedup(case)
        with asking(batch):
            like = found["theirs_ts"] = as_many(case, batch)
            found["theirs"] = like / llama_ts(case) if like else None
            yield {"batch": batch, **found, "paper": paper, "alike": alike(case, paper * llama_ts(case))}


@contextmanager
def asking(tokens: int) -> Iterator[None]:
    """Predictors, in steps of that many."""
    before, cost.PREDICT_TOKENS = cost.PREDICT_TOKENS, tokens
    try:
        yield
    finally:
        cost.PREDICT_TOKENS = before


def as_many(case: Case, independent_tokens: float) -> float | None:
    """As theirs, where a batch needs the neurons of so many tokens that have nothing in common."""
    subject = case.subject()
    needs = replace(subject.hotness, at=lambda i, _: 1 - (1 - subject.hotness.at(i, 1)) ** independent_tokens)
    slow = theirs(case.tiers, case.format)
    return divided_ts(case, slow, replace(subject, hotness=needs), "frequency", kv_in_ram=True)


def alike(case: Case, ts: float) -> float | None:
    low, high = 1.0, float(case.batch)
    if (most := as_many(case, low)) is None or most < ts:
        return None
    for _ in range(6):
        middle = (low + high) / 2
        low, high = (middle, high) if (as_many(case, middle) or 0.0) > ts else (low, middle)
    return (low + high) / 2


def others() -> Iterator[dict[str, Any]]:
    for (name, weight_format, pc), paper in PAPER_OTHERS.items():
        case = Case(name, weight_format, pc)
        yield {
            "model": f"{name} {weight_format}, {pc}",
            **speedup(case),
            "llama_ts": llama_ts(case),
            "paper": paper,
        }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'':<26}{'plan':>8}{'as theirs':>11}{'paper':>8}   times llama.cpp"]
    for r in rows:
        what = r.get("step") or r.get("model") or f"batch of {r['batch']}"
        cells = ["-" if r[k] is None else f"{r[k]:.2f}" for k in ("ours", "theirs", "paper")]
        speeds = "" if r["ours_ts"] is None else f"{r['ours_ts']:.2f}"
        like = "" if r["theirs_ts"] is None else f"{r['theirs_ts']:.2f}"
        more = "" if r.get("alike") is None else f"; alike: {r['alike']:.1f}"
        lines.append(f"{what:<26}{cells[0]:>8}{cells[1]:>11}{cells[2]:>8}   {speeds}, {like} tok/s{more}")
    return "\n".join(lines) + "\n"


def simulated() -> tuple[Any, str]:
    found = {"steps": list(steps()), "batches": list(batches()), "others": list(others())}
    first = table([*found["steps"], *found["batches"]])
    text = f"Simulated, not measured. Falcon-40B FP16, PC-High:\n{first}\nOther models:\n"
    return found, text + table(found["others"])


def main() -> None:
    print_or_write(__doc__, simulated)


if __name__ == "__main__":
    main()
