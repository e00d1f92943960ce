"""Is the GPU tier right, and how fast is it? One command; it goes on where the time of a call ended.

    python bench/gpu/gpu.py --build-dir /tmp/llama.cpp     # on a machine with an NVIDIA GPU, again and again
    python bench/gpu/gpu.py                                # without one: correctness, on a stand-in in RAM
    python bench/gpu/gpu.py --gpu stand-in --shape config.json --vram all     # its measurements, to try them
    python bench/gpu/gpu.py --gpu 0 --results /tmp/card.json --ram 118 --llama-source DIR    # without network

A GPU that is named and cannot be used ends the call; only --gpu auto takes the stand-in instead.

First every weight format, placement and number of tokens beside the specification (gpu_check.py); then the
card itself; then shapes, the most important figures first, alternating with llama.cpp (with CUDA, built where
there is nvcc), which is given as many layers as the same memory holds. Models are full-sized, their layers a
few on disk that are read again and again (gpu_models.py). Sparse ones (as active as PowerInfer published) run
with predictors made for them; llama.cpp computes a dense Llama of as many weights, since it does not know OPT
and its speed does not depend on numbers; a dense Llama is the same in both. Where memory does not hold both
engines they take turns; where it does not hold the file, llama.cpp's time is of fewer layers, scaled, and
said to be.

Each (shape, format, memory, engine) is a record in bench/results/GPU.json; those there are left as they are.
What does not fit the card is a record that says so, and what RAM was too small for is tried again by each
call. What failed otherwise (a full disk, a card or llama.cpp that ended), or was cut off, is tried once more
by the next call, and then left out with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

sys.path += [str(room) for room in Path(__file__).resolve().parents[1].iterdir()]  # what other rooms have

import gpu_check
import gpu_llama
import torch
from build_llamacpp import note
from engines import BENCH, commit
from gpu_models import Model, Shape
from gpu_report import LLAMA, OURS, key_of, table
from gpu_results import Results
from gpu_run import Loaded, sync_cost, timeline, write_timeline
from gpu_sides import Clock, Lost, Machine, NotOnThisCard, Rival, Side, alternate, speeds

from thermocline import __version__
from thermocline.cli.console import INTERRUPTED, ProgressBar
from thermocline.errors import (
    DeviceFailure,
    IOFailure,
    OutOfBudget,
    ThermoclineError,
    Unsupported,
    UsageError,
)
from thermocline.machine import hardware
from thermocline.options import switched
from thermocline.plan.memory import GIB
from thermocline.session import gpu
from thermocline.session.session import Session

SPARE_BYTES = 4 << 30  # of RAM, for both runtimes
PACE_GBS, START_S = 1.0, 30.0  # of what is written or loaded, at least; of an engine
SCRATCH = "thermocline-gpu-"  # and the process that made it
FALCON, OPT = Shape("falcon-40b", "f16", 0.05), Shape("opt-30b", "f16", 0.03)
LLAMA_70B = Shape("llama-2-70b", "q4_0", 0.18, 0.43)
DENSE_F16, DENSE_Q4 = Shape("llama-2-7b", "f16"), Shape("llama-2-7b", "q4_0")
FIRST = [  # the dense ones are the cheapest, and say most about the kernels
    (DENSE_F16, "all"), (DENSE_Q4, "all"), (OPT, "24"), (OPT, "all"), (FALCON, "24"), (LLAMA_70B, "24"),
    (LLAMA_70B, "11"),
]  # fmt: skip
SHAPES = [DENSE_F16, DENSE_Q4, OPT, FALCON, LLAMA_70B]
SHAPES += [replace(OPT, format="q4_0"), replace(FALCON, format="q4_0"), replace(LLAMA_70B, format="f16")]


def work_of(args: argparse.Namespace) -> list[tuple[Shape, str]]:
    if args.shape:
        shapes = [Shape(s, f, args.active) for s in args.shape for f in args.format]
        return [(s, v) for s in shapes for v in args.vram]
    return list(dict.fromkeys([*FIRST, *((s, v) for s in SHAPES for v in args.vram)]))


# ---- one shape in one memory


def measure(m: Machine, shape: Shape, vram: str) -> None:
    """Both engines' records that are missing. Raises DeviceFailure where the card answers no more."""
    ours, theirs = (key_of(shape.label, vram, engine) for engine in (OURS, LLAMA))
    wanted = [key for key in m.missing(shape, vram) if m.results.begin(key)]
    if not wanted:
        return
    try:
        model = m.model_of(shape)
        if ours in wanted:
            measure_ours(m, model, vram, ours, theirs if theirs in wanted else None)
        if theirs in m.results.begun:
            measure_theirs(m, model, vram, theirs)
    except (IOFailure, OSError) as e:  # a disk that is full
        m.clear()
        for key in wanted:
            if key in m.results.begun:
                m.results.refuse(key, e, again=True)


def measure_ours(m: Machine, model: Model, vram: str, ours: str, theirs: str | None) -> None:
    """And `theirs` beside it, where that is wanted and memory holds both."""
    try:
        session = m.session_of(model, vram)
        both = theirs is not None and fits_both(m, model, session)
        with ExitStack() as stack:
            x = Loaded(model, session)
            stack.callback(x.close)
            rival = rival_of(m, model, vram, theirs) if both and theirs else None
            if rival:
                stack.enter_context(rival)
            mine, beside = together(m, x, rival, theirs)
            how = {"arrangement": "alternating" if beside else "in turns"}
            record = how | record_of(m, x, mine)
            m.results.add(ours, record)  # whatever becomes of what follows
            if beside and rival and theirs:
                m.results.add(theirs, how | rival.record())
            m.results.add(ours, record | looked_into(m, x, ours))
    except NotOnThisCard as e:
        m.results.refuse(ours, e)
    except OutOfBudget as e:  # of RAM, which the next call may find
        m.results.refuse(ours, e, always=True)
    except DeviceFailure as e:
        m.results.refuse(ours, e, again=True)
        m.check_card()


def together(m: Machine, x: Loaded, rival: Rival | None, theirs: str | None) -> tuple[Side, bool]:
    """(our side, measured; was llama.cpp beside it to the end?)"""

    def side() -> Side:
        return Side(lambda: x.decode(m.args.gen)[0], lambda: x.prefill(m.args.prompt))

    if rival and theirs:
        mine = side()
        try:
            alternate([mine, rival.side], m.args.runs, m.more)
            return mine, True
        except Lost as e:
            m.results.refuse(theirs, e, again=True)
    mine = side()
    alternate([mine], m.args.runs, m.more)
    return mine, False


def measure_theirs(m: Machine, model: Model, vram: str, theirs: str) -> None:
    rival = rival_of(m, model, vram, theirs)
    if rival is None:
        return
    with rival:
        try:
            alternate([rival.side], m.args.runs, m.more)
            m.results.add(theirs, {"arrangement": "in turns"} | rival.record())
        except Lost as e:
            m.results.refuse(theirs, e, again=True)


def rival_of(m: Machine, model: Model, vram: str, key: str) -> Rival | None:
    try:
        return Rival(m, model, vram)
    except Unsupported as e:
        m.results.refuse(key, e)
    except OutOfBudget as e:
        m.results.refuse(key, e, always=True)
    except Lost as e:
        m.results.refuse(key, e, again=True)
    return None


def fits_both(m: Machine, model: Model, session: Session) -> bool:
    room = min(hardware.available_bytes() or 0, shutil.disk_usage(m.directory).free)
    spare: int = m.args.spare
    return session.memory_bytes + model.weights_bytes + spare < room


def record_of(m: Machine, x: Loaded, side: Side) -> dict[str, Any]:
    plan, said = x.session.plan, speeds(side, m.args)
    assert plan is not None, "a session of this bench has a GPU"
    figures = x.decode(m.args.gen)[1]
    moved = figures.bytes_per_token or 0
    whole = all(p.attention == "gpu" and p.ram == 0 for p in plan.layers) and plan.head == "gpu"
    card = m.results.items["card"]
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
        "handover_us": card["sync_us"],
    }


def looked_into(m: Machine, x: Loaded, key: str) -> dict[str, Any]:
    """What waiting costs and one token's timeline: without them where time is over or they fail."""
    found: dict[str, Any] = {}
    try:
        if m.more():
            found["sync"] = sync_cost(x, m.args.gen, m.args.runs)
        if m.more():
            spans = timeline(x, m.directory)
            name = f"{m.results.path.stem}-{re.sub('[^a-z0-9.]+', '-', key)}.timeline.json"
            write_timeline(spans, m.results.path.with_name(name))
            found["timeline"] = name
    except (DeviceFailure, RuntimeError, OSError, ValueError) as e:  # such as a profiler that may not look
        found["not_looked_into"] = m.results.said(e)
    return found


# ---- all of it


def estimate_s(shape: Shape) -> float:
    """Of a shape in one memory: written, loaded, both engines; at least 1 GB/s is assumed."""
    spec = shape.spec()
    gates = 3 if spec.gated else 2
    heads = (spec.n_heads + 2 * spec.n_kv_heads + spec.n_heads) * spec.head_dim
    weights = spec.n_layers * spec.dim * (gates * spec.ffn_dim + heads) + 2 * spec.vocab_size * spec.dim
    nbytes = weights * (2 if shape.format in ("f16", "bf16") else 4 if shape.format == "f32" else 1)
    return 3 * nbytes / 1e9 / PACE_GBS + (2 * START_S if nbytes > 1e9 else 0)


def check(m: Machine) -> bool:
    """Every format that has not been found right; False where there is no time for the next one."""
    longest = 0.0
    for weight_format in m.args.check:
        key, begin = f"check {weight_format}", time.monotonic()
        if m.results.items.get(key, {}).get("wrong") == []:
            continue
        if longest and m.clock.left < longest:
            note(f"{m.clock.left:.0f} s are left, checking {weight_format} needs {longest:.0f}: run again")
            return False
        try:
            found = gpu_check.check(m.device, m.directory, m.args.size, [weight_format], m.progress)
        except DeviceFailure as e:
            m.results.refuse(key, e, again=True)
            raise
        said = gpu_check.summary(found)
        m.results.add(key, said)
        if said["wrong"]:
            raise DeviceFailure(
                f"{len(said['wrong'])} of {said['compared']} comparisons are wrong: nothing is measured "
                f"(see {m.results.path})"
            )
        note(f"{weight_format}: {said['compared']} comparisons, all right; NMSE <= {said['worst_nmse']:.1e}")
        longest = max(longest, time.monotonic() - begin)
    return True


def run(m: Machine) -> None:
    items = m.results.items
    if not check(m):
        return
    if m.device.device.name == gpu.STAND_IN and not m.args.shape:
        note(
            "no GPU is measured: correctness is checked on a stand-in in RAM (--shape measures that one, too)"
        )
        return
    if "card" not in items:
        tier = gpu.tiers_of(m.device, ("f16",), m.args.threads).gpu
        assert tier is not None
        m.results.add("card", dataclasses.asdict(tier))
    m.driver = gpu_llama.prepared(m.args.build_dir, m.args.llama_source, max(1.0, m.clock.left))
    if isinstance(m.driver, str):
        note(f"llama.cpp is left out: {m.driver}")
        m.results.facts["without_llama"] = m.results.said(m.driver)
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
    p.add_argument("--ram", type=float, metavar="GIB", help="of a machine whose RAM grows as it is used")
    p.add_argument("--results", type=Path, help="the file, anywhere; default: bench/results/GPU.json")
    p.add_argument("--commit", default=commit(), help="of every record; default: git's")
    p.add_argument("--json", action="store_true", help="all records to stdout, not a table")
    return p.parse_args(argv)


def device_of(args: argparse.Namespace) -> gpu.OpenGpu:
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
        from thermocline.ops.kernels import triton_kernels

        found = replace(found, kernels=triton_kernels)
    if args.size is None:
        args.size = "wide" if not stand_in else "interpreted" if args.kernels == "triton" else "tiny"
    return found


def grow_to(nbytes: int) -> None:
    """From now on the system has so much RAM, whatever it says now. Limits of this process stay."""
    true = hardware._system_memory

    def system_memory(root: Path) -> tuple[int | None, int | None]:
        total, free = true(root)
        if total is None or free is None:
            return nbytes, nbytes
        return max(total, nbytes), max(free, nbytes - (total - free))

    hardware._system_memory = system_memory


def facts_of(device: gpu.OpenGpu, commit: str | None) -> dict[str, Any]:
    versions = {"thermocline": __version__, "torch": torch.__version__, "python": platform.python_version()}
    kernels = cast(ModuleType, device.kernels).__name__.rsplit(".", 1)[-1]
    return {
        "card": device.device.name,
        "cpu": hardware.cores().name,
        "commit": commit,
        "versions": versions,
        "kernels": kernels,
        "overlap": switched(os.environ, "overlap"),
    }


def scratch_in(base: Path | None) -> tempfile.TemporaryDirectory[str]:
    """For models, in RAM where there is /dev/shm. What calls left there that were killed goes."""
    shm = Path("/dev/shm")
    base = base or (shm if shm.is_dir() else Path(tempfile.gettempdir()))
    for left in base.glob(f"{SCRATCH}*"):
        pid = left.name.removeprefix(SCRATCH).partition("-")[0]
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            shutil.rmtree(left, ignore_errors=True)
        except (PermissionError, ValueError):  # another's
            continue
    return tempfile.TemporaryDirectory(dir=base, prefix=f"{SCRATCH}{os.getpid()}-")


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # the plan of each placement
    clock = Clock(time.monotonic() + args.budget_s)
    if args.ram is not None:
        grow_to(int(args.ram * GIB))
    try:
        device = device_of(args)
        name = re.sub("[^a-z0-9]+", "-", device.device.name.lower())
        path = args.results or BENCH / "results" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        bar = ProgressBar(quiet=False)
        with scratch_in(args.dir) as scratch:
            private = (Path(scratch), args.build_dir, BENCH.parent, Path.home())
            results = Results.of(
                path, facts_of(device, args.commit), tuple(d for d in private if len(str(d)) > 1)
            )
            run(Machine(
                args, device, results, clock, Path(scratch), "not looked for",
                lambda what, done, total: bar.at(what, done, total, ""),
            ))  # fmt: skip
    except ThermoclineError as e:
        note(f"bench/gpu/gpu.py: {e}")
        return e.exit_code
    except OSError as e:
        note(f"bench/gpu/gpu.py: {e}")
        return IOFailure.exit_code
    except KeyboardInterrupt:
        note("bench/gpu/gpu.py: stopped; what was measured is kept, run again and it goes on")
        return INTERRUPTED
    print(json.dumps(results.items, indent=1) if args.json else "\n".join(table(results.items)))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` sends it: models in RAM are removed
    sys.exit(main())
