"""Forecasts of `plan` for two machines with a GPU: no card has run any of it.

    python bench/plan/forecasts.py [-o FILE]

Each row is planned three times, with other assumptions about the GPU: the share of its memory's speed that
kernels reach, and the microseconds that a launch takes in a recorded step. Kernels a layer are those that the
engine queues for one token (`cost.launches`); a predictor on the GPU has five more. The depth is half of a
context of 640 tokens.

The RTX 4090's machine is the bundled hardware file. The H100's is an estimate: 3.35 TB/s as published, 150
TFLOP/s (30 % of its tf32 peak), PCIe 5.0, 16 cores of a Xeon with 100 GB/s and 128 GiB. A machine with other
cores or RAM has other figures wherever the CPU has a part.

A prompt of 512 tokens is two steps of 256. They are not recorded: Python needs 10 to 25 us for each launch,
beside the GPU's work, so the longer of the two counts. q4_0 meets int8, and its products are a quarter to
half of what issuing the compiled kernel's instructions allows (log, 2026-11-27: 623 and 706 a cycle and SM).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from paper_plans import MODELS, print_or_write

from thermocline.errors import OutOfBudget
from thermocline.machine.tiers import CpuTier, DiskTier, GpuTier, Kernel, Tiers, read_tiers
from thermocline.plan import cost
from thermocline.plan.hotness import Curve
from thermocline.plan.planner import plan
from thermocline.plan.problem import Ask, Problem
from thermocline.plan.subject import Subject, of_shape

CONTEXT, PROMPT, STEP = 640, 512, 256
GIB = 2**30
SPEEDS = {
    "f16": Kernel(85, 1300),
    "q8_0": Kernel(85, 1900),
    "q4_0": Kernel(80, 1900),
    "q4_k": Kernel(80, 1900),
}
H100 = Tiers(
    "H100 80 GB SXM, 16 cores",
    "estimates, see above",
    CpuTier(128 * GIB, 100, 16, 32 << 20, SPEEDS),
    GpuTier(80 * GIB, 3350, 0.8, 150000, 3, 30, 50),
    DiskTier(6.5, 800000),
)
MACHINES = {"RTX 4090": read_tiers("rtx4090-i9-13900k"), "H100": H100}
# (share of memory's speed, us a launch); the second is the hardware file's
ASSUMED = ((0.6, 3.0), (0.8, 3.0), (0.85, 1.5))
ISSUED = {
    "RTX 4090": 2 * 623 * 128 * 2.52,
    "H100": 2 * 706 * 132 * 1.755,
}  # GFLOP/s: a cycle and SM, SMs, GHz
REACHED = (0.25, 0.5)
PYTHON_US = (25.0, 10.0)  # a launch that is not recorded


@dataclass(frozen=True)
class Case:
    """A model in so much VRAM; `sparse`: a name in `MODELS`, with the paper's activity and predictors."""

    name: str
    shape: str
    format: str
    vram: float | None = None
    sparse: str | None = None

    def subject(self) -> Subject:
        if self.sparse is None:
            return of_shape(self.shape, self.format, "off", 0.0, Curve(None, 0.26))
        m = MODELS[self.sparse]
        return of_shape(m.shape, self.format, "predict", m.predictors, Curve(m.active, m.skew))

    @property
    def ask(self) -> Ask:
        vram = None if self.vram is None else int(self.vram * GIB)
        return Ask(CONTEXT, sparsity="off" if self.sparse is None else "predict", vram_bytes=vram)


CASES = (
    Case("7B f16, all in VRAM", "llama-2-7b", "f16"),
    Case("7B q4_0, all in VRAM", "llama-2-7b", "q4_0"),
    Case("OPT-30B f16, 24 GiB", "opt-30b", "f16", 24, "OPT-30B"),
    Case("Falcon-40B f16, 24 GiB", "falcon-40b", "f16", 24, "Falcon-40B"),
    Case("Llama-70B q4_0, 24 GiB", "llama-2-70b", "q4_0", 24, "Llama-70B"),
    Case("Llama-70B q4_0, 11 GiB", "llama-2-70b", "q4_0", 11, "Llama-70B"),
    Case("Qwen3-30B-A3B q4_k, 12 GiB", "qwen3-30b-a3b", "q4_k", 12),
    Case("Qwen3-30B-A3B q4_k, 8 GiB", "qwen3-30b-a3b", "q4_k", 8),
)


def assuming(tiers: Tiers, share: float, launch_us: float) -> Tiers:
    assert tiers.gpu is not None
    return dataclasses.replace(tiers, gpu=dataclasses.replace(tiers.gpu, share=share, launch_us=launch_us))


def launches(p: Problem) -> int:
    """Return a layer's kernels of one token, without a predictor's, where all layers are the GPU's."""
    layer = next(p.layers(p.work()))
    work = layer.own(p.work())
    most = cost.launches(layer.on_gpu, layer.shared, p.sizes.format, work, layer.apart)
    guesses = work.predicts and layer.sizes.predictor.bytes > 0  # it reads a norm that is whole
    return sum(most) - max(0, layer.begun - guesses)


def decode(case: Case, tiers: Tiers) -> dict[str, Any]:
    """Return tokens a second by `ASSUMED`, and what the second one's time is spent on."""
    s, speeds, found = case.subject(), list[float](), None
    for share, launch_us in ASSUMED:
        assumed = assuming(tiers, share, launch_us)
        try:
            found = plan(s.spec, s.sizes, s.hotness, assumed, case.ask)
        except OutOfBudget as e:
            return {"refused": str(e)}
        speeds.append(found.predicted[1].tokens_per_s)
        if (share, launch_us) == ASSUMED[1]:
            spent, work = found.predicted[1], found.share
    p = Problem(s.spec, s.sizes, s.hotness, tiers, case.ask)
    ms = {tier: getattr(spent, f"{tier}_us") / 1e3 for tier in ("gpu", "cpu", "disk", "sync")}
    return {"launches": launches(p), "tokens_per_s": speeds, "ms": ms, "gpu_share": work}


def prompt(name: str, tiers: Tiers) -> dict[str, Any]:
    """Return tokens a second of a prompt of a 7B in q4_0, all of it on the GPU: (least, most)."""
    case, speeds = CASES[1], list[float]()
    assert case.format == "q4_0" and tiers.gpu is not None
    s = case.subject()
    for reached, python_us in zip(REACHED, PYTHON_US, strict=True):
        g = dataclasses.replace(tiers.gpu, gflops=reached * ISSUED[name], launch_us=0.0)
        p = Problem(s.spec, s.sizes, s.hotness, dataclasses.replace(tiers, gpu=g), case.ask)
        work = dataclasses.replace(p.work(batch=STEP), depth=0)
        on, off, zero = np.ones(1, np.bool_), np.zeros(1, np.bool_), np.zeros(1, np.int64)
        us, count = 0.0, 0
        for layer in p.layers(work):
            every = np.array([layer.sizes.neurons])
            us += float(cost.layer_times(layer, p.speeds(work), work, on, off, every, zero, off)[0][0])
            count += sum(cost.launches(layer.on_gpu, layer.shared, p.sizes.format, work, layer.apart))
        speeds.append(STEP * 1e6 / max(us, count * python_us))
    return {"launches": count // s.spec.n_layers, "tokens_per_s": speeds}


def rows() -> list[dict[str, Any]]:
    made = [
        {"case": case.name, "machine": name, **decode(case, tiers)}
        for case in CASES
        for name, tiers in MACHINES.items()
    ]
    for name, tiers in MACHINES.items():
        made.append({"case": f"7B q4_0, prompt of {PROMPT}", "machine": name, **prompt(name, tiers)})
    return made


def table(found: list[dict[str, Any]]) -> str:
    assumed = ", ".join(f"{share:.2g} and {us:g} us" for share, us in ASSUMED)
    lines = [
        f"FORECASTS: nothing of this was run. tok/s by share of memory's speed and us a launch: {assumed}."
    ]
    lines.append(f"{'':<28}{'':<10}{'kernels':>8}{'tok/s':>22}  ms a token, the second")
    for r in found:
        at = f"{r['case']:<28}{r['machine']:<10}"
        if "refused" in r:
            lines.append(f"{at}{'-':>8}{'-':>22}  {r['refused']}")
            continue
        speeds = ", ".join(f"{x:,.3g}" if x < 1000 else f"{x:,.0f}" for x in r["tokens_per_s"])
        spent = ""
        if "ms" in r:
            each = (f"{tier.upper()} {ms:.3g}" for tier, ms in r["ms"].items() if ms)
            spent = f"  {' + '.join(each)}; {r['gpu_share']:.0%} of the neurons' work on the GPU"
        lines.append(f"{at}{r['launches']:>8}{speeds:>22}{spent}")
    return "\n".join(lines) + "\n"


def forecast() -> tuple[Any, str]:
    found = rows()
    return found, table(found)


def main() -> None:
    print_or_write(__doc__, forecast)


if __name__ == "__main__":
    main()
