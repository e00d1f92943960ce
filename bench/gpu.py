"""Is the GPU tier right, and how fast is it? One command; it goes on where the time of a call ended.

    python bench/gpu.py --build-dir /tmp/llama.cpp     # on a machine with an NVIDIA GPU, again and again
    python bench/gpu.py                                # without one: correctness, on a stand-in in RAM
    python bench/gpu.py --gpu stand-in --shape config.json --vram all         # its measurements, to try them

First every weight format, placement and number of tokens beside the specification (gpu_check.py); then the
card itself; then shapes, the most important figures first, alternating with llama.cpp (with CUDA, built where
there is nvcc), which is given as many layers as the same memory holds. Models are full-sized, their layers a
few on disk that are read again and again (gpu_models.py). Sparse ones (as active as PowerInfer published) run
with predictors made for them; llama.cpp computes a dense Llama of as many weights, since it does not know OPT
and its speed does not depend on numbers; a dense Llama is the same in both. Where memory does not hold both
engines they take turns; where it does not hold the file, llama.cpp's time is of fewer layers, scaled, and
said to be.

Each (shape, format, memory, engine) is a record in bench/results/GPU.json; those there are left as they are.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import re
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_check
import gpu_llama
import torch
from build_llamacpp import note
from gpu_models import Model, Shape
from gpu_report import LLAMA, OURS, key_of, table
from gpu_run import Loaded, sync_cost, timeline, write_timeline
from gpu_sides import Clock, Machine, Results, Rival, Side, alternate, speeds
from vs_llamacpp import HERE, commit

from thermocline import __version__, gpu, hardware
from thermocline.console import Progress
from thermocline.errors import DeviceFailure, OutOfBudget, ThermoclineError, Unsupported, UsageError

SPARE_BYTES = 4 << 30  # of RAM, for both runtimes
PACE_GBS, START_S = 1.0, 30.0  # of what is written or loaded, at least; of an engine
FALCON, OPT = Shape("falcon-40b", "f16", 0.05), Shape("opt-30b", "f16", 0.03)
LLAMA_70B = Shape("llama-2-70b", "q4_0", 0.18, 0.43)
DENSE_F16, DENSE_Q4 = Shape("llama-2-7b", "f16"), Shape("llama-2-7b", "q4_0")
FIRST = [
    (OPT, "24"), (OPT, "all"), (FALCON, "24"), (LLAMA_70B, "24"), (LLAMA_70B, "11"), (DENSE_F16, "all"),
    (DENSE_Q4, "all"),
]  # fmt: skip
SHAPES = [OPT, FALCON, LLAMA_70B, DENSE_F16, DENSE_Q4]
SHAPES += [replace(OPT, format="q4_0"), replace(FALCON, format="q4_0"), replace(LLAMA_70B, format="f16")]


def work_of(args: argparse.Namespace) -> list[tuple[Shape, str]]:
    if args.shape:
        shapes = [Shape(s, f, args.active) for s in args.shape for f in args.format]
        return [(s, v) for s in shapes for v in args.vram]
    return list(dict.fromkeys([*FIRST, *((s, v) for s in SHAPES for v in args.vram)]))


# ---- one shape in one memory


def measure(m: Machine, shape: Shape, vram: str) -> None:
    """Both engines' records that are missing."""
    ours, theirs = (key_of(shape.label, vram, engine) for engine in (OURS, LLAMA))
    wanted = m.missing(shape, vram)
    model = m.model_of(shape)
    if ours in wanted:
        try:
            measure_ours(m, model, vram, ours, theirs if theirs in wanted else None)
        except (OutOfBudget, DeviceFailure) as e:
            m.results.add(ours, {"refused": str(e)})
    if theirs in wanted and theirs not in m.results.items and (rival := rival_of(m, model, vram, theirs)):
        with rival:
            alternate([rival.side], m.args.runs)
            m.results.add(theirs, {"arrangement": "in turns"} | rival.record())


def measure_ours(m: Machine, model: Model, vram: str, ours: str, theirs: str | None) -> None:
    """And `theirs` beside it, where that is wanted and memory holds both."""
    session = m.session_of(model, vram)
    both = theirs is not None and fits_both(m, model, session)
    with ExitStack() as stack:
        x = Loaded(model, session, m.sparsity_of(model), m.args.threads)
        stack.callback(x.close)
        mine = Side(lambda: x.decode(m.args.gen)[0], lambda: x.prefill(m.args.prompt))
        rival = rival_of(m, model, vram, theirs) if both and theirs else None
        if rival:
            stack.enter_context(rival)
        alternate([mine, rival.side] if rival else [mine], m.args.runs)
        how = {"arrangement": "alternating" if rival else "in turns"}
        m.results.add(ours, how | record_of(m, x, mine, ours))
        if rival and theirs:
            m.results.add(theirs, how | rival.record())


def rival_of(m: Machine, model: Model, vram: str, key: str) -> Rival | None:
    try:
        return Rival(m, model, vram)
    except (OutOfBudget, Unsupported, SystemExit) as e:  # a driver that ends says so
        m.results.add(key, {"refused": str(e)})
        return None


def fits_both(m: Machine, model: Model, session: gpu.Session) -> bool:
    room = min(hardware.available_bytes() or 0, shutil.disk_usage(m.directory).free)
    return session.plan.used("ram") + model.weights_bytes + m.args.spare < room


def record_of(m: Machine, x: Loaded, side: Side, key: str) -> dict[str, Any]:
    plan, said = x.session.plan, speeds(side, m.args)
    figures = x.decode(m.args.gen)[1]
    moved = figures.bytes_per_token or 0
    whole = all(p.attention == "gpu" and p.ram == 0 for p in plan.layers) and plan.head == "gpu"
    card = m.results.items["card"]
    spans = timeline(x, m.directory)
    drawn = m.results.path.with_name(f"{m.results.path.stem}-{re.sub('[^a-z0-9.]+', '-', key)}.timeline.json")
    write_timeline(spans, drawn)
    return said | {
        "sparsity": x.sparsity,
        "layers_on_disk": len(
            {t.offset for n, t in x.model.pack.tensors.items() if n.endswith("qkv.weight")}
        ),
        "weights_bytes": x.model.weights_bytes,
        "load_s": x.load_s,
        "all_in_vram": whole,
        "vram_bytes": plan.used("gpu"),
        "ram_bytes": plan.used("ram"),
        "gpu_share": plan.share,
        "bytes_per_token": moved,
        "roof_share": moved * said["tok_s"] / 1e9 / card["read_gbs"] if whole else None,
        **{k: getattr(figures, k) for k in ("active_fraction", "rows_fraction", "predicted_fraction")},
        "planned_tok_s": plan.tokens_per_s,
        "plan_over_measured": plan.tokens_per_s / said["tok_s"],
        "sync": sync_cost(x, m.args.gen, m.args.runs),
        "handover_us": card["sync_us"],
        "timeline": drawn.name,
    }


# ---- all of it


def estimate_s(shape: Shape) -> float:
    """Of a shape in one memory: written, loaded, both engines; at least 1 GB/s is assumed."""
    spec = shape.spec()
    gates = 3 if spec.gated else 2
    heads = (spec.n_heads + 2 * spec.n_kv_heads + spec.n_heads) * spec.head_dim
    weights = spec.n_layers * spec.dim * (gates * spec.ffn_dim + heads) + 2 * spec.vocab_size * spec.dim
    nbytes = weights * (2 if shape.format in ("f16", "bf16") else 4 if shape.format == "f32" else 1)
    return 3 * nbytes / 1e9 / PACE_GBS + (2 * START_S if nbytes > 1e9 else 0)


def run(m: Machine) -> None:
    items = m.results.items
    if "check" not in items or items["check"]["wrong"]:
        found = gpu_check.check(m.device, m.directory, m.args.size, m.args.check, m.progress)
        said = gpu_check.summary(found)
        m.results.add("check", said)
        if said["wrong"]:
            raise DeviceFailure(
                f"{len(said['wrong'])} of {said['compared']} comparisons are wrong: nothing is measured "
                f"(see {m.results.path})"
            )
        note(f"{said['compared']} comparisons, all right; NMSE at most {said['worst_nmse']:.1e}")
    if m.device.device.name == gpu.STAND_IN and not m.args.shape:
        note(
            "no GPU is measured: correctness is checked on a stand-in in RAM (--shape measures that one, too)"
        )
        return
    if "card" not in items:
        tier = gpu.tiers_of(m.device, "f16", m.args.threads).gpu
        assert tier is not None
        m.results.add("card", dataclasses.asdict(tier))
    m.driver = gpu_llama.prepared(m.args.build_dir, m.args.llama_source, max(1.0, m.clock.left))
    if isinstance(m.driver, str):
        note(f"llama.cpp is left out: {m.driver}")
        m.results.facts["without_llama"] = m.driver
    work = [x for x in work_of(m.args) if m.missing(*x)]
    for at, (shape, vram) in enumerate(work):
        needs = min(estimate_s(shape), max(0.0, m.args.budget_s - START_S))  # else never begun
        if m.clock.left < needs:
            note(
                f"{m.clock.left:.0f} s are left, {shape.label} needs up to {needs:.0f}: run again, it goes on"
            )
            break
        m.progress("measuring", at, len(work))
        measure(m, shape, vram)
    m.progress("measuring", len(work), len(work))


def vram_of(text: str) -> str:
    if text != "all" and not re.fullmatch(r"[0-9]*\.?[0-9]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither all nor a number of GiB")
    return text


def arguments(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gpu", default="auto", help="its number, auto, or stand-in")
    p.add_argument("--kernels", choices=["triton", "torch"], help="the stand-in's: torch")
    p.add_argument("--size", choices=gpu_check.SIZES, help="of the models that are checked")
    p.add_argument(
        "--check", nargs="+", choices=gpu_check.FORMATS, default=gpu_check.FORMATS, metavar="FORMAT"
    )
    p.add_argument("--shape", nargs="+", help="instead of all: a known shape or a config.json")
    p.add_argument("--format", nargs="+", default=["f16", "q4_0"], help="of --shape")
    p.add_argument("--active", type=float, help="of --shape's neurons; without, dense")
    p.add_argument("--sparsity", choices=["predict", "exact"], default="predict", help="of sparse shapes")
    p.add_argument(
        "--vram", nargs="+", type=vram_of, default=["24", "11", "all"], help="GiB that a model may take"
    )
    p.add_argument("--gen", type=int, default=64)
    p.add_argument("--prompt", type=int, default=512)
    p.add_argument("--runs", type=int, default=5)
    p.add_argument("--threads", type=int, default=hardware.default_threads())
    p.add_argument("--budget-s", type=float, default=540, help="nothing is begun that may take longer")
    p.add_argument("--dir", type=Path, help="for models; default: /dev/shm where there is one")
    p.add_argument("--build-dir", type=Path, default=Path(tempfile.gettempdir()) / "llama.cpp-cuda")
    p.add_argument("--llama-source", type=Path, help="an unpacked llama.cpp tree, instead of fetching one")
    p.add_argument("--spare", type=int, default=SPARE_BYTES, help="bytes of RAM to leave")
    p.add_argument("--results", type=Path, help="the file; default: bench/results/GPU.json")
    p.add_argument("--json", action="store_true", help="all records to stdout, not a table")
    return p.parse_args(argv)


def device_of(args: argparse.Namespace) -> gpu.Gpu:
    found = gpu.find(args.gpu)
    if found is None:
        note(f"no GPU: {gpu.unusable(hardware.gpu())}")
        found = gpu.find(gpu.STAND_IN)
    assert found is not None
    stand_in = found.device.name == gpu.STAND_IN
    if args.kernels == "triton" and stand_in:
        from triton import knobs

        if not knobs.runtime.interpret:
            raise UsageError("--kernels triton on the stand-in needs TRITON_INTERPRET=1 in the environment")
        from thermocline.ops import triton_kernels

        found = replace(found, kernels=triton_kernels)
    if args.size is None:
        args.size = "wide" if not stand_in else "interpreted" if args.kernels == "triton" else "tiny"
    return found


def facts_of(device: gpu.Gpu) -> dict[str, Any]:
    versions = {"thermocline": __version__, "torch": torch.__version__, "python": platform.python_version()}
    kernels = device.kernels.__name__.rsplit(".", 1)[-1]
    return {
        "card": device.device.name,
        "cpu": hardware.cores().name,
        "commit": commit(),
        "versions": versions,
        "kernels": kernels,
    }


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    clock = Clock(time.monotonic() + args.budget_s)
    try:
        device = device_of(args)
        name = re.sub("[^a-z0-9]+", "-", device.device.name.lower())
        path = args.results or HERE / "results" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        results = Results.of(path, facts_of(device))
        shm = Path("/dev/shm")
        base = args.dir or (shm if shm.is_dir() else None)
        bar = Progress(quiet=False)
        with tempfile.TemporaryDirectory(dir=base) as scratch:
            run(Machine(
                args, device, results, clock, Path(scratch), "not looked for",
                lambda what, done, total: bar.at(what, done, total, ""),
            ))  # fmt: skip
    except ThermoclineError as e:
        note(f"bench/gpu.py: {e}")
        return e.exit_code
    print(json.dumps(results.items, indent=1) if args.json else "\n".join(table(results.items)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
