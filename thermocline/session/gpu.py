"""Which GPU a session uses, what the planner puts there, and the session's ops and weights over it.

torch is imported when a GPU is asked for or there is one, never before. Must not know requests or flags.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from thermocline.engine.kv_cache import in_ram
from thermocline.errors import DeviceFailure, OutOfBudget, Unsupported, UsageError
from thermocline.machine import disk_speed, hardware, this_machine, tiers
from thermocline.model import quant
from thermocline.model.spec import ModelSpec
from thermocline.pack.checksums import NeuronChecksums
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import Predictors
from thermocline.plan import plan_file
from thermocline.plan import planner as planning
from thermocline.plan.disk_split import Arrangement, arrange
from thermocline.plan.memory import GIB, context_for, device_limits
from thermocline.plan.plan_file import Subject
from thermocline.plan.planner import Plan
from thermocline.plan.problem import Ask, Problem
from thermocline.session import weights
from thermocline.session.store import Opened, Room, Store
from thermocline.session.weights import LoadedWeights

if TYPE_CHECKING:
    from thermocline.ops.device import Device
    from thermocline.session.gpu_weights import Places

STAND_IN = "stand-in"  # a device in RAM: to see what a GPU would be given, and to test with
STAND_IN_GIB = 1.0  # of it, unless --vram says
PRETENDED = tiers.GpuTier(
    1 << 30, 1000.0, 0.8, 80000.0, 0.0, 0.0, 25.0
)  # its speeds: all goes there that fits
RESERVE_BYTES = 256 << 20  # of free VRAM, left to whoever else draws on the screen


@dataclass(frozen=True)
class Gpu:
    """A device to plan for."""

    device: Device
    kernels: Any  # ops.triton_kernels, or for the stand-in ops.torch_kernels
    free_bytes: int
    others: int = 0  # GPUs beside it, which stay idle


@dataclass(frozen=True)
class Session:
    """What is loaded where, decided before a weight is read."""

    gpu: Gpu
    plan: Plan
    context: int
    max_batch: int
    send_from: int  # tokens of a step for which neurons are sent to the GPU
    arrangement: Arrangement | None = None  # of RAM, where the disk has neurons, too

    @property
    def room(self) -> Room:
        """Of RAM."""
        return Room(self.context, self.context, self.ram_bytes, self.arrangement, self)

    @property
    def ram_bytes(self) -> int:
        return self.plan.used("ram") if self.arrangement is None else self.arrangement.bytes

    @property
    def vram_bytes(self) -> int:
        return sum(self.plan.bytes["gpu"].values())

    def release(self) -> None:
        """Before what it computes with is freed."""
        self.gpu.device.release()

    def close(self) -> None:
        """When nothing uses it any more."""
        self.gpu.device.close()

    @property
    def places(self) -> Places:
        return places_of(self.plan)

    def opened(
        self,
        pack: Pack,
        predictors: Predictors | None,
        records: NeuronChecksums | None = None,
        *,
        threads: int,
        progress: Callable[[int, int], None] | None,
    ) -> Opened:
        """All that is ever taken is taken now. `records`: with an arrangement, what comes from disk."""
        import torch

        from thermocline.ops.gpu import GpuOps
        from thermocline.session.gpu_weights import load, load_in_part

        device, places = self.gpu.device, self.places
        ops = GpuOps(
            device, self.gpu.kernels, weights.new_ops(threads), pack.spec,
            device_limits(pack.spec, self.context, self.max_batch, predicted=predictors is not None),
            self.send_from
        )  # fmt: skip
        how: dict[str, Any] = {"predictors": predictors, "progress": progress}
        store: Store | None = None
        if self.arrangement is None:
            made = load(pack, places, device, ops.cpu, **how)
        else:
            assert records is not None
            made, store = load_in_part(pack, places, self.arrangement, records, device, ops.cpu, **how)

        def storage(layer: int, shape: tuple[int, ...]) -> Any:
            on_device = places.layers[layer].attention
            return device.zeros(shape, torch.float16) if on_device else in_ram(layer, shape)

        return Opened(LoadedWeights(made, ops, self.ram_bytes), store, storage)


def places_of(plan: Plan) -> Places:
    from thermocline.session.gpu_weights import LayerPlace, Places

    layers = tuple(LayerPlace(x.attention == "gpu", x.predictor == "gpu", x.gpu) for x in plan.layers)
    return Places(layers, plan.head == "gpu")


def find(
    asked: str, vram: float | None = None, told: Callable[[str], None] = lambda line: None
) -> Gpu | None:
    """`asked`: "off", "auto" (None where none can be used), a GPU's number, or STAND_IN.

    Raises Unsupported where one is asked for by number and cannot be used, and says why. `told`: why one that
    is there is not used.
    """
    if asked == "off":
        return None
    if asked == STAND_IN:
        from thermocline.ops import torch_kernels
        from thermocline.ops.device import StandIn

        return Gpu(StandIn(), torch_kernels, int((vram or STAND_IN_GIB) * GIB))
    if asked != "auto" and not asked.isdigit():
        raise UsageError(f"--gpu {asked}: it is off, auto, a GPU's number, or {STAND_IN}")
    board = hardware.gpu()
    index = int(asked) if asked.isdigit() else 0
    if why := unusable(board, index):
        if asked != "auto":
            raise Unsupported(f"--gpu {asked}: {why}")
        if board.found:  # else nobody misses it
            told(f"the GPU is not used: {why}")
        return None
    return _cuda(index, vram)


def unusable(board: hardware.GpuInfo, index: int = 0) -> str | None:
    """Why that GPU cannot be used here, or None; DeviceFailure where it does not answer.

    Loads torch only where there is a driver.
    """
    if not board.found:
        return board.why
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as e:
        return f"{e.name} is not installed: pip install 'thermocline[gpu]'"
    shown, built = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.version.cuda
    if built is None:
        return f"torch {torch.__version__} is built without CUDA: install one that is"
    if not torch.cuda.is_available():
        if shown is not None:
            return f"CUDA_VISIBLE_DEVICES={shown} leaves no GPU here: unset it, or let it name one there is"
        return f"torch {torch.__version__} (CUDA {built}) cannot use the driver: it may be too old"
    from thermocline.ops import cuda

    try:
        cuda.check(index)
    except Unsupported as e:
        return str(e)
    return None


def _cuda(index: int, vram: float | None) -> Gpu:
    from thermocline.ops import triton_kernels
    from thermocline.ops.cuda import Cuda

    device = Cuda(index)
    free = max(0, device.free_bytes() - RESERVE_BYTES)
    return Gpu(device, triton_kernels, free if vram is None else min(free, int(vram * GIB)), device.others)


def chosen(
    asked: str, vram: float | None, pack: Pack, *, told: Callable[[str], None], **how: Any
) -> Session | None:
    """`find` and `planned`. With "auto", what a GPU cannot hold or compute is the CPU's."""
    found, made = None, None
    try:
        found = find(asked, vram, told)
        if found is not None:
            made = planned(found, pack, told=told, **how)
    except (OutOfBudget, Unsupported, DeviceFailure) as e:
        if asked != "auto":
            raise
        told(f"the GPU is not used: {e}")
    finally:
        if found is not None and made is None:
            found.device.close()
    if made is not None and made.gpu.others:
        told(f"one of {made.gpu.others + 1} GPUs is used, the others stay idle; --gpu N says which")
    return made


def check(spec: ModelSpec) -> None:
    if spec.embed_dim is not None:
        raise Unsupported(
            f"{spec.architecture}: embeddings of another width than its layers have no GPU ops; use --gpu off"
        )


def planned(
    gpu: Gpu,
    pack: Pack,
    *,
    sparsity: str,
    context: int | None,
    max_batch: int,
    threads: int,
    ram: int | None,
    told: Callable[[str], None],
    predictors: Predictors | None = None,
) -> Session | None:
    """The planner's placement; None where the GPU would not make a token faster.

    Neurons are left on disk where GPU and RAM together are too small. Raises OutOfBudget where that is not
    enough, or where the model has no neurons that could be skipped.
    """
    check(pack.spec)
    subject = plan_file.of_pack(pack.path, sparsity, plan_file.Curve())
    found = tiers_of(gpu, pack.weight_format, threads)
    how: dict[str, Any] = {"sparsity": sparsity, "context": context, "max_batch": max_batch, "ram": ram}
    how |= {"told": told, "predictors": predictors}
    try:
        return planned_of(gpu, subject, found, **how)
    except OutOfBudget:
        measured = (
            this_machine.disk_tier(disk_speed.measure_file(pack.weights_path)) if pack.spec.sparse else None
        )
        if measured is None:
            raise
    return planned_of(gpu, subject, replace(found, disk=measured), **how)


def tiers_of(gpu: Gpu, weight_format: str, threads: int) -> tiers.Tiers:
    """This machine with that GPU, measured now."""
    here = this_machine.tiers_here(threads, formats=[weight_format])
    if gpu.device.name == STAND_IN:
        return replace(here, gpu=replace(PRETENDED, vram_bytes=gpu.free_bytes))
    return this_machine.with_gpu(here, gpu.device, gpu.kernels, gpu.free_bytes, weight_format)


def planned_of(
    gpu: Gpu,
    subject: Subject,
    found: tiers.Tiers,
    *,
    sparsity: str,
    context: int | None,
    max_batch: int,
    ram: int | None,
    told: Callable[[str], None],
    predictors: Predictors | None = None,
) -> Session | None:
    """`planned`, of a model that need not be a pack's, on a machine that is measured already."""
    asked = Ask(
        context=context_for(subject.spec, context),
        sparsity=sparsity if subject.spec.sparse else "off",
        vram_bytes=gpu.free_bytes,
        ram_bytes=ram,
        max_batch=max_batch,
    )
    made = planning.plan(subject.spec, subject.sizes, subject.hotness, found, asked)
    if not made.bytes["gpu"]:
        told(f"the GPU is not used: {' '.join(n for n in made.notes if 'GPU' in n)}")
        return None
    rest = None
    if any(x.disk for x in made.layers):
        rest = arranged(Problem(subject.spec, subject.sizes, subject.hotness, found, asked), subject, made,
                        predictors)  # fmt: skip
    session = Session(gpu, made, asked.context, max_batch, send_from(found, subject), rest)
    on_gpu, most = made.used("gpu") / GIB, gpu.free_bytes / GIB
    told(
        f"{gpu.device.name}: {on_gpu:.3g} of {most:.3g} GiB, {made.share:.0%} of the neurons' work; "
        f"{session.ram_bytes / GIB:.3g} GiB of RAM; {made.tokens_per_s:.3g} tok/s predicted"
    )
    return session


def arranged(p: Problem, subject: Subject, made: Plan, predictors: Predictors | None) -> Arrangement:
    """RAM divided among what the plan does not have on the GPU: as without one, for fewer neurons."""
    from thermocline.session.gpu_weights import cut, splits

    places = places_of(made)
    held = {s.name for s in splits(p.spec, subject.contents.tensors, places) if s.kept}
    others = p.fixed_ram(disk=False)
    others.pop("embedding")  # one row of it
    on_cpu = [i for i, x in enumerate(places.layers) if not x.attention]
    others["keys and values"] = sum(map(p.kv_layer_bytes, on_cpu))
    nbytes: int | None = None
    if predictors is not None:
        stored = ((predictors.stored(i), x) for i, x in enumerate(places.layers) if not x.predictor)
        cold = (cut(s, x.neurons // s.experts) for s, x in stored if s is not None)
        nbytes = sum(s.nbytes for s in cold if s is not None)
    c = replace(
        subject.contents,
        tensors={n: t for n, t in subject.contents.tensors.items() if n in held},
        predictor_bytes=nbytes,
        on_gpu=tuple(x.neurons // p.spec.n_experts for x in places.layers),
    )
    return arrange(c, p.ram, others)


def send_from(here: tiers.Tiers, subject: Subject) -> int:
    """Tokens for which a weight is sent faster than the CPU multiplies by it, as both were measured: in a
    mixture by some of them.
    """
    assert here.gpu is not None
    weight_format, share = subject.sizes.format, subject.spec.routed(1)
    weight_bytes = quant.row_bytes(weight_format, 4096) / 4096
    return math.ceil(here.kernel(weight_format).gflops * weight_bytes / (2 * share * here.gpu.link_gbs))
