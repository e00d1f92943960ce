"""Every call that a session makes to its GPU fails once: one line, its exit code, nothing left behind, and
the next session works.

On a card of `fake_cuda.py`, with what CUDA raises, and on the stand-in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import fake_cuda
import pytest
import torch
from fake_cuda import Card, Faults

from thermocline import LLM, SamplingParams
from thermocline.errors import DeviceFailure, ThermoclineError, Unsupported
from thermocline.machine import gpu_speed, hardware, tiers
from thermocline.ops import device, kernels
from thermocline.ops.cuda import Cuda
from thermocline.ops.device import StandIn
from thermocline.ops.gpu import GpuOps, Program
from thermocline.ops.interface import FFNStats
from thermocline.ops.kernels import torch_kernels
from thermocline.session import gpu

pytestmark = pytest.mark.oracle

OUT_OF_MEMORY = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nSee docs.")
ILLEGAL = RuntimeError(
    "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ..."
)
GONE = RuntimeError("CUDA error: unspecified launch failure\nFor debugging consider CUDA_LAUNCH_BLOCKING=1")
NOT_READY, OUT_OF_HOST_MEMORY = 600, 304  # CUresult
TOKENS = 6
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
PROMPT = "Once upon a time"


class TooLong(BaseException):
    """Not an Exception: nothing takes it for a device's."""


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """A minute, then a traceback instead of a hang."""

    def late(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 60)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Not over all that other tests and libraries have made."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def here() -> tiers.Tiers:
    """A CPU as fast as an idle one: measured on a busy machine, another plan would be made of it."""
    torch.set_num_threads(1)
    cpu = tiers.CpuTier(8 << 30, 20.0, 1, 32 << 20, {"f32": tiers.Kernel(15.0, 60.0)})
    return tiers.Tiers("this machine", "a test", cpu, None, None)


@pytest.fixture(autouse=True)
def measured_before(here: tiers.Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the CPU reaches; the device is still asked for what it is asked for, in small."""

    def tiers_of(found: gpu.OpenGpu, formats: Sequence[str], threads: int) -> tiers.Tiers:
        gpu_speed.gpu_tier(found.device, found.kernels, 4 << 20, formats[0])
        fast = dataclasses.replace(gpu.PRETENDED, vram_bytes=found.free_bytes)
        return dataclasses.replace(here, gpu=fast)

    monkeypatch.setattr(gpu, "tiers_of", tiers_of)
    for name, value in {"RUNS": 1, "LAUNCHES": 3, "HANDOVERS": 2, "COLUMNS": 256, "LEAST_S": 0}.items():
        monkeypatch.setattr(gpu_speed, name, value)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card(order="first stream first")
    fake_cuda.install(monkeypatch, made)
    return made


@pytest.fixture(scope="module")
def part(tiny_pack: Path, here: tiers.Tiers) -> float:
    """GiB of VRAM with which each layer's neurons are divided."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "tiers_of", lambda g, *_: dataclasses.replace(
            here, gpu=dataclasses.replace(gpu.PRETENDED, vram_bytes=g.free_bytes)
        ))  # fmt: skip
        with LLM(tiny_pack, gpu="stand-in", context=64, max_batch=2, threads=3, lazy=True) as llm:
            plan = llm.session.plan
            assert plan is not None
            least = plan.used("gpu") - plan.bytes["gpu"]["neurons"] * 3 // 4
    return float(least) / 2**30


def opened(pack: Path, vram: float, which: str = "0", **how: Any) -> LLM:
    return LLM(pack, gpu=which, vram=vram, context=64, max_batch=2, threads=3, **how)


def tokens(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY).token_ids


def gpu_ops(llm: LLM) -> GpuOps:
    ops = llm.engine.ops
    assert isinstance(ops, GpuOps)
    return ops


def argv(pack: Path, vram: float, which: str) -> list[str]:
    given = ["run", "-m", str(pack), "--gpu", which, "--vram", f"{vram:.9f}", "-c", "64", "-n", str(TOKENS)]
    return [*given, "-t", "3", "--temp", "0", "--ignore-eos", "-q", PROMPT]


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Of threads (the kernels' pools, too: a session's end with it; two of these sessions' three)."""

    def running() -> int:
        gc.collect()
        return len(list(Path("/proc/self/task").iterdir())) if Path("/proc/self/task").exists() else 0

    before, queues = running(), threading.active_count()
    yield
    assert threading.active_count() == queues
    end = time.monotonic() + 10  # the system takes its time to remove a thread that has ended
    while running() > before + 1 and time.monotonic() < end:
        time.sleep(0.05)
    assert running() <= before + 1  # torch starts one for itself, once, when it likes


# ---- a card: what CUDA raises


AT_LOAD: dict[str, tuple[Any, int]] = {  # what fails, how, and the exit code
    "device_count": (ILLEGAL, 8),
    "get_device_capability": (ILLEGAL, 8),
    "set_device": (ILLEGAL, 8),
    "libcuda": (OSError("libcuda.so.1: cannot open shared object file: No such file or directory"), 6),
    "Stream": (ILLEGAL, 8),
    "mem_get_info": (GONE, 8),
    "zeros": (OUT_OF_MEMORY, 8),
    "pinned": (RuntimeError("CUDA error: out of memory"), 8),
    "put": (GONE, 8),
}
IN_A_STEP: dict[str, tuple[Any, int]] = {
    "kernel": (ILLEGAL, 8),
    "copy": (GONE, 8),
    "stream": (GONE, 8),
    "cuStreamWaitValue32": (NOT_READY, 8),
    "cuLaunchHostFunc": (NOT_READY, 8),
    "wait_stream": (GONE, 8),
    "CUDAGraph": (GONE, 8),
    "capture_begin": (RuntimeError("CUDA error: operation not permitted when stream is capturing"), 8),
    "capture_end": (RuntimeError("CUDA error: operation failed due to a previous error during capture"), 8),
    "replay": (ILLEGAL, 8),
    "Event": (GONE, 8),
    "Event.record": (GONE, 8),
    "Event.query": (ILLEGAL, 8),
}
# So many of these are made when a card is opened: what fails there is not asked for again.
TRIED = {
    "cuStreamWaitValue32": 2,
    "CUDAGraph": 1,
    "capture_begin": 1,
    "capture_end": 1,
}
AT_THE_END = {"synchronize", "empty_cache", "cuMemHostUnregister"}


@pytest.fixture(scope="module")
def calls(tiny_pack: Path, part: float, here: tiers.Tiers) -> dict[str, int]:
    """How often a run makes each call."""
    with pytest.MonkeyPatch.context() as patch:
        card = Card(order="first stream first")
        fake_cuda.install(patch, card)
        patch.setattr(gpu, "tiers_of", lambda g, *_: dataclasses.replace(
            here, gpu=dataclasses.replace(gpu.PRETENDED, vram_bytes=g.free_bytes)
        ))  # fmt: skip
        with opened(tiny_pack, part) as llm:
            tokens(llm)
        seen = dict(card.faults.seen)
        card.words = "unknown"
        card.faults.set("", 0, None)
        with opened(tiny_pack, part) as llm:
            tokens(llm)
    return seen | {"cuLaunchHostFunc": card.faults.seen["cuLaunchHostFunc"]}


def taken(card: Card, name: str) -> None:
    """Let the driver know words, or not know them, so that it is asked for that call."""
    card.words = "unknown" if name == "cuLaunchHostFunc" else "taken"


def test_the_card_is_asked_for_all_that_is_made_to_fail(calls: dict[str, int]) -> None:
    words = {"cuMemHostGetDevicePointer", "cuStreamWriteValue32"}  # as "cuStreamWaitValue32"
    asked = {*AT_LOAD, *IN_A_STEP, *AT_THE_END, "cuMemHostRegister", *words}
    assert set(calls) - {"is_available", "get_device_name", fake_cuda.ANY} == asked
    assert calls["cuLaunchHostFunc"] > 2 and calls["replay"] > 2, (
        "the plan divides layers, steps are replayed"
    )


def spread(n: int, first: int = 1) -> list[int]:
    """First, midst, last."""
    return sorted({first, (first + n) // 2, n} & set(range(first, n + 1)))


@pytest.mark.parametrize("name", [*AT_LOAD, *IN_A_STEP])
def test_a_call_that_fails_ends_a_run_with_a_line(
    name: str,
    card: Card,
    calls: dict[str, int],
    tiny_pack: Path,
    part: float,
    thermocline: Callable[..., Any],
) -> None:
    """Wherever in a run it is; once, and ever after, as when CUDA does not recover from it."""
    command = argv(tiny_pack, part, "0")
    error, code = (AT_LOAD | IN_A_STEP)[name]
    taken(card, name)
    want = thermocline(*command).out
    with nothing_left():
        each = spread(calls[name], TRIED.get(name, 0) + 1)
        for at, sticky in [*((n, False) for n in each), (each[len(each) // 2], True)]:
            card.faults.set(name, at, error, sticky and code == 8)
            ran = thermocline(*command)
            assert card.faults.struck, at
            assert ran.code == code, (at, ran)
            assert ran.err.startswith("thermocline: ") and ran.err.count("\n") == 1, (at, ran.err)
            assert "internal error" not in ran.err and want.startswith(ran.out.rstrip("\n")), (at, ran)
            assert not card.registered, at
        card.faults.set("", 0, None)
        assert thermocline(*command).out == want


@pytest.mark.parametrize("name", sorted(AT_THE_END))
def test_what_fails_at_the_end_changes_no_answer(
    name: str,
    card: Card,
    calls: dict[str, int],
    tiny_pack: Path,
    part: float,
    thermocline: Callable[..., Any],
) -> None:
    command, want = argv(tiny_pack, part, "0"), thermocline(*argv(tiny_pack, part, "off")).out
    for at in range(max(1, calls[name] - 2), calls[name] + 1):
        card.faults.set(name, at, 1 if name.startswith("cu") else GONE)
        ran = thermocline(*command)
        assert (ran.code, ran.out, ran.err) == (0, want, "") or (ran.code, ran.err.count("\n")) == (8, 1), at
        assert not card.registered


def test_ram_that_cannot_be_pinned_is_not_sent_from(
    card: Card, tiny_pack: Path, part: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit on locked memory, an IOMMU: the CPU computes its part of prompts, too."""
    with opened(tiny_pack, part) as llm:
        want = tokens(llm)
    card.faults.set("cuMemHostRegister", 1, OUT_OF_HOST_MEMORY)
    caplog.clear()
    with nothing_left(), opened(tiny_pack, part) as llm:
        assert tokens(llm) == want
    (said,) = [m for m in caplog.messages if "the CPU computes its part of prompts, too: " in m]
    assert "cannot pin" in said and "ulimit -l" in said
    assert card.faults.struck and not card.registered


def test_one_line_says_what_the_card_has_left(card: Card, tiny_pack: Path, part: float) -> None:
    """Taken by another program between the plan and the allocation."""
    card.faults.set("zeros", 40, OUT_OF_MEMORY)
    card.free_bytes = 3 << 28
    with pytest.raises(DeviceFailure) as raised:
        opened(tiny_pack, part)
    assert str(raised.value) == (
        f"{fake_cuda.NAME}: 0.75 of 2.00 GiB are free, less than was planned with: end what else uses it, or "
        "allow less with --vram"
    )


def test_a_driver_that_is_gone_when_memory_is_asked_for_is_said(
    card: Card, tiny_pack: Path, part: float
) -> None:
    """What is free cannot be asked any more, either."""
    card.faults.set("zeros", 40, OUT_OF_MEMORY, sticky=True)
    with pytest.raises(DeviceFailure, match="its memory is full, less than was planned with"):
        opened(tiny_pack, part)


# ---- sessions that go on


@pytest.mark.parametrize("name", [n for n in IN_A_STEP if n not in ("capture_begin", "CUDAGraph")])
def test_a_session_works_again_after_a_fault_that_passes(
    name: str, card: Card, tiny_pack: Path, part: float
) -> None:
    """With the same answer, and its steps are recorded again."""
    taken(card, name)
    with nothing_left(), opened(tiny_pack, part) as llm:
        card.faults.set("", 0, None)
        want = tokens(llm)
        for at in spread(card.faults.seen[name]):
            gpu_ops(llm).forget()  # as many calls as the first time
            card.faults.set(name, at, IN_A_STEP[name][0])
            with pytest.raises(DeviceFailure):
                tokens(llm)
            assert not llm._open().running
            assert tokens(llm) == want, at
            llm._open().check_integrity()


def test_a_card_that_is_lost_fails_each_request_at_once_and_closes(
    card: Card, tiny_pack: Path, part: float
) -> None:
    with nothing_left():
        with opened(tiny_pack, part) as llm:
            tokens(llm)
            card.faults.set("kernel", 1, GONE, sticky=True)
            gpu_ops(llm).forget()
            for _ in range(3):
                with pytest.raises(DeviceFailure, match="unspecified launch failure"):
                    tokens(llm)
        assert not card.registered
        card.faults.set("", 0, None)
        with opened(tiny_pack, part) as llm:
            assert len(tokens(llm)) == TOKENS


def test_others_go_on_with_a_step_that_failed_once(card: Card, tiny_pack: Path, part: float) -> None:
    """Whoever was waiting is told; the same step is made again for the next one that asks."""
    with opened(tiny_pack, part) as llm:
        want = tokens(llm)
        first, second = (llm.stream(PROMPT, GREEDY) for _ in range(2))
        next(first)
        card.faults.set("Event.query", 1, ILLEGAL)
        with pytest.raises(DeviceFailure), first:
            list(first)
        assert [c.token_id for c in second] == want


def test_a_load_that_failed_can_be_tried_again(card: Card, tiny_pack: Path, part: float) -> None:
    """What was registered with the driver before is not any more: registered twice, it refuses."""
    with opened(tiny_pack, part, lazy=True) as llm:
        card.faults.set("", 0, None)
        llm.load()
        calls = card.faults.seen["zeros"]
    with opened(tiny_pack, part, lazy=True) as llm:
        for at in (1, calls // 2):
            card.faults.set("zeros", at, OUT_OF_MEMORY)
            with pytest.raises(DeviceFailure):
                tokens(llm)
            assert not card.registered
        card.faults.set("zeros", calls, OUT_OF_MEMORY)  # of keys and values: the weights are there, and stay
        with pytest.raises(DeviceFailure):
            tokens(llm)
        kept = dict(card.registered)
        assert kept
        assert len(tokens(llm)) == TOKENS
        assert card.registered == kept
    assert not card.registered


def test_what_a_step_computes_with_is_there_until_it_has_ended(
    card: Card, tiny_pack: Path, part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that Ctrl-C gave up is still under way when the session is closed: its tasks are called with
    addresses, which keep nothing.
    """
    llm = opened(tiny_pack, part)
    ops = weakref.ref(llm._open().ops)
    there: list[bool] = []
    synchronize = torch.cuda.synchronize
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda d: (there.append(ops() is not None), synchronize(d))
    )
    llm.close()
    gc.collect()
    assert there == [True, True] or there[0]
    assert ops() is None


def test_ctrl_c_while_a_step_is_queued_leaves_nothing_to_the_next(
    card: Card, tiny_pack: Path, part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was queued by then is waited for before buffers are written again."""
    with opened(tiny_pack, part) as llm:
        want, ops = tokens(llm), gpu_ops(llm)
        for at in (3, 9):
            ops.forget()
            card.faults.set("kernel", at, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                tokens(llm)
            assert ops._under_way
            assert tokens(llm) == want


def test_ctrl_c_while_a_step_is_recorded_is_ctrl_c(card: Card, tiny_pack: Path, part: float) -> None:
    """Although a recording that is broken off ends with an error of CUDA's own."""
    with opened(tiny_pack, part) as llm:
        want = tokens(llm)

        def work() -> None:
            card.faults.set("capture_end", 1, GONE)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            gpu_ops(llm).device.record(work)
        assert tokens(llm) == want


def test_kernels_that_cannot_be_made_are_said_in_a_line(card: Card) -> None:
    """Triton's errors, a compiler that is missing, a cache that cannot be written: no common base class."""

    class OutOfResources(Exception):
        pass

    errors = [
        OutOfResources("out of resource: shared memory, Required: 147456, Hardware limit: 101376"),
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable or set knobs"),
        PermissionError(13, "Permission denied", "cache"),
        AssertionError(),
    ]
    found = gpu.find("0")
    assert found is not None
    for e in errors:
        card.faults.set("kernel", 1, e)
        with pytest.raises(DeviceFailure) as raised:
            found.device.run(torch.zeros(1).zero_)
        said = str(raised.value)
        assert said.startswith(f"{fake_cuda.NAME}: ") and (str(e) or "AssertionError") in said


def test_all_tasks_of_a_step_are_asked_what_they_met(card: Card, tiny_pack: Path, part: float) -> None:
    """Also behind one that failed: counts and errors would else be the next step's."""

    class Done:
        taken = 0

        def __init__(self, error: Exception | None) -> None:
            self.error = error

        def take(self) -> tuple[int, ...]:
            self.taken += 1
            if self.error is not None:
                raise self.error
            return (1, 2, 3, 4, 5)

    with opened(tiny_pack, part) as llm:
        tasks, stats = [Done(None), Done(MemoryError("first")), Done(ValueError()), Done(None)], FFNStats()
        with pytest.raises(MemoryError, match="first"):
            gpu_ops(llm)._tell(Program(tasks=tasks), stats)  # type: ignore[arg-type]
    assert [t.taken for t in tasks] == [1] * 4 and stats.predictor_bytes == 10


# ---- which card


def refused(pack: Path, thermocline: Callable[..., Any], *gpu: str) -> Any:
    return thermocline("run", "-m", str(pack), "-c", "64", "-n", "2", "-t", "3", *gpu, "Once")


def test_a_card_that_is_too_old_is_refused_by_number_and_left_out_by_auto(
    card: Card, tiny_pack: Path, thermocline: Callable[..., Any]
) -> None:
    card.capability = (7, 0)
    why = f"{fake_cuda.NAME} is too old: its compute capability is 7.0, torch needs 7.5 (RTX 20, T4 or later)"
    ran = refused(tiny_pack, thermocline, "--gpu", "0")
    assert (ran.code, ran.err) == (6, f"thermocline: --gpu 0: {why}\n")
    ran = refused(tiny_pack, thermocline, "--gpu", "auto")
    assert ran.code == 0 and f"the GPU is not used: {why}\n" in ran.err
    assert gpu.unusable(hardware.gpu()) == why  # and so does doctor
    with pytest.raises(Unsupported, match="too old"):
        Cuda(0)


def test_a_card_that_triton_makes_no_kernels_for_computes_with_torch(
    card: Card, tiny_pack: Path, thermocline: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """RTX 20: the CPU's answer, one line, and no step recorded. `doctor` has the line, too."""
    monkeypatch.setattr(kernels, "triton_kernels", None)
    card.capability, card.free_bytes = (7, 5), 2 << 30
    slower = f"{fake_cuda.NAME} has compute capability 7.5, which Triton makes no kernels for: torch's"
    ran, alone = (refused(tiny_pack, thermocline, "--temp", "0", "--gpu", g) for g in ("0", "off"))
    assert ran.code == 0 and ran.out == alone.out
    assert ran.err.count(slower) == 1 and "untested on a card" in ran.err and slower not in alone.err
    assert slower in thermocline("doctor").out
    with LLM(tiny_pack, context=64, threads=3, gpu="0") as llm:
        llm.generate(PROMPT, GREEDY)
        ops = gpu_ops(llm)
        assert ops.kernels is torch_kernels and not any(ops._programs.values())
    card.capability = (8, 0)
    assert gpu.slower() is None and Cuda(0).records


def test_of_two_cards_the_named_one_computes_and_the_other_is_said_to_be_idle(
    card: Card, tiny_pack: Path, thermocline: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    card.count = 2
    named: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: named.append(d.index))
    for which in ("0", "1"):
        ran = refused(tiny_pack, thermocline, "--gpu", which)
        said = "one of 2 GPUs is used, the others stay idle; --gpu N says which\n"
        assert ran.code == 0 and ran.err.count(said) == 1, ran.err
    assert named == [0, 1]
    ran = refused(tiny_pack, thermocline, "--gpu", "2")
    assert (ran.code, ran.err) == (
        6,
        "thermocline: --gpu 2: there is no GPU 2: this process sees 2\n",
    )


@pytest.mark.parametrize("shown", ["", "-1"])
def test_cards_that_are_hidden_are_said_to_be(
    shown: str, card: Card, tiny_pack: Path, thermocline: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvidia-smi lists them all the same."""
    listed = hardware.gpu()
    monkeypatch.setattr(hardware, "gpu", lambda: listed)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    card.count = 0
    why = f"CUDA_VISIBLE_DEVICES={shown} leaves no GPU here: unset it, or let it name one there is"
    ran = refused(tiny_pack, thermocline, "--gpu", "0")
    assert (ran.code, ran.err) == (6, f"thermocline: --gpu 0: {why}\n")
    ran = refused(tiny_pack, thermocline, "--gpu", "auto")
    assert ran.code == 0 and f"the GPU is not used: {why}\n" in ran.err


def test_numbers_are_of_the_cards_that_are_visible(
    card: Card, tiny_pack: Path, thermocline: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two, as the only one: it is 0, and there is no 1."""
    listed = hardware.GpuInfo(True, [fake_cuda.NAME] * 2, [2 << 30] * 2, "")
    monkeypatch.setattr(hardware, "gpu", lambda: listed)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert refused(tiny_pack, thermocline, "--gpu", "0").code == 0
    ran = refused(tiny_pack, thermocline, "--gpu", "1")
    said = "there is no GPU 1: this process sees 1 (CUDA_VISIBLE_DEVICES=1 hides others)"
    assert (ran.code, ran.err) == (6, f"thermocline: --gpu 1: {said}\n")


def test_a_full_card_is_left_out_by_auto(
    card: Card, tiny_pack: Path, thermocline: Callable[..., Any]
) -> None:
    """Taken by another program before the plan, or while it is measured: the CPU answers."""
    card.free_bytes = 100 << 20  # less than what is left to others
    ran = refused(tiny_pack, thermocline, "--gpu", "auto")
    assert ran.code == 0 and "the GPU is not used: 0.00 GiB of it may be taken" in ran.err
    card.free_bytes = 1 << 30
    card.faults.set("zeros", 1, OUT_OF_MEMORY)
    ran = refused(tiny_pack, thermocline, "--gpu", "auto")
    assert ran.code == 0 and f"the GPU is not used: {fake_cuda.NAME}: 1.00 of 2.00 GiB are free" in ran.err
    card.faults.set("zeros", 1, OUT_OF_MEMORY)
    ran = refused(tiny_pack, thermocline, "--gpu", "0")
    assert ran.code == 8 and ran.err.count("\n") == 1


# ---- the stand-in


class Failing(StandIn):
    """A stand-in whose calls fail as `faults` says: at once, or a kernel in its queue, which a wait says."""

    faults: ClassVar[Faults] = Faults()
    made: ClassVar[weakref.WeakSet[Failing]] = weakref.WeakSet()

    def __init__(self) -> None:
        super().__init__()
        self.made.add(self)

    def zeros(self, *args: Any) -> Any:
        self.faults.met("zeros")
        return super().zeros(*args)

    def pinned(self, *args: Any) -> Any:
        self.faults.met("pinned")
        return super().zeros(*args)

    def put(self, *args: Any) -> None:
        self.faults.met("put")
        super().put(*args)

    def run(self, kernel: Any, *args: Any) -> None:
        self.faults.met("run")
        super().run(self._bad("kernel", kernel), *args)

    def copy(self, to: Any, source: Any) -> None:
        self.faults.met("copy")
        super().copy(to, source)

    def call(self, task: Any) -> None:
        self.faults.met("call")
        super().call(task)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        self.faults.met("beside")
        with super().beside():
            yield

    def join(self) -> None:
        self.faults.met("join")
        super().join()

    def record(self, work: Any) -> Any:
        self.faults.met("record")
        replay = super().record(work)

        def replayed() -> None:
            self.faults.met("replay")
            replay()

        return replayed

    def wait(self, tasks: Any, mark: object = None) -> None:
        self.faults.met("wait")
        super().wait(tasks, mark)

    def _bad(self, name: str, work: Any) -> Any:
        def run(*args: Any) -> None:
            self.faults.met(name)
            work(*args)

        return run


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    monkeypatch.setattr(device, "StandIn", Failing)
    made = Faults()
    monkeypatch.setattr(Failing, "faults", made)
    return made


STAND_INS = (
    "zeros", "pinned", "put", "run", "copy", "call", "beside", "join", "record", "replay", "wait",
    "kernel",
)  # fmt: skip


@pytest.mark.parametrize("name", STAND_INS)
def test_a_call_that_fails_on_the_stand_in_ends_a_run_with_a_line(
    name: str, faults: Faults, tiny_pack: Path, part: float, thermocline: Callable[..., Any]
) -> None:
    command = argv(tiny_pack, part, "stand-in")
    with nothing_left():
        faults.set("", 0, None)
        want = thermocline(*command).out
        count = faults.seen[name] - 2 * (name == "wait")  # the last two are the end's
        assert count
        for at in spread(count):
            error = GONE if name == "kernel" else DeviceFailure("stand-in: it failed")
            faults.set(name, at, error)
            ran = thermocline(*command)
            assert faults.struck and ran.code == 8, (at, ran)
            assert ran.err.startswith("thermocline: stand-in: ") and ran.err.count("\n") == 1, (at, ran.err)
            assert want.startswith(ran.out.rstrip("\n"))
        faults.set("", 0, None)
        assert thermocline(*command).out == want
    gc.collect()
    assert not Failing.made


@pytest.mark.parametrize(
    "name", ["run", "copy", "call", "beside", "join", "record", "replay", "wait", "kernel"]
)
def test_a_session_on_the_stand_in_goes_on_after_a_fault(
    name: str, faults: Faults, tiny_pack: Path, part: float
) -> None:
    with nothing_left(), opened(tiny_pack, part, "stand-in") as llm:
        faults.set("", 0, None)
        want, made = tokens(llm), dict(faults.seen)
        for at in spread(made[name]):
            if name == "record" or at % 2:
                gpu_ops(llm).forget()
            faults.set(name, at, GONE if name == "kernel" else DeviceFailure("stand-in: it failed"))
            with contextlib.suppress(DeviceFailure):  # queued anew, a run has fewer replays
                tokens(llm)
            assert tokens(llm) == want, at
            llm._open().check_integrity()


def test_a_cpu_that_is_stuck_ends_a_run_and_does_not_hang_it(
    faults: Faults, tiny_pack: Path, part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said once after STUCK_S; from then on at once, and closing does not wait for what does not end."""
    monkeypatch.setattr(device, "STUCK_S", 0.3)
    stuck = threading.Event()
    faults.set("", 0, None)
    llm = opened(tiny_pack, part, "stand-in")
    want = tokens(llm)
    monkeypatch.setattr(Failing, "call", lambda self, task: self._work("stuck", stuck.wait))
    gpu_ops(llm).forget()
    try:
        for _ in range(2):
            with pytest.raises(DeviceFailure, match=r"has not ended for 0\.3 s; this process cannot go on"):
                tokens(llm)
        llm.close()
    finally:
        stuck.set()
    monkeypatch.undo()
    with opened(tiny_pack, part, "stand-in") as again:
        assert tokens(again) == want


@pytest.mark.parametrize("which", ["0", "stand-in"])
def test_sessions_that_fail_leave_no_memory_behind(
    which: str, card: Card, faults: Faults, tiny_pack: Path, part: float
) -> None:
    """Their weights and buffers, a third of a MiB at least, go with them."""
    alive: list[weakref.ref[GpuOps]] = []
    true = GpuOps.__init__

    def noted(self: GpuOps, *args: Any, **how: Any) -> None:
        alive.append(weakref.ref(self))
        true(self, *args, **how)

    with pytest.MonkeyPatch.context() as patch, nothing_left():
        patch.setattr(GpuOps, "__init__", noted)
        for name, at in (("put", 3), ("zeros", 35), ("copy", 30)):
            card.faults.set(name, at, GONE)
            faults.set(name, at, DeviceFailure("stand-in: it failed"))
            with pytest.raises(ThermoclineError), opened(tiny_pack, part, which) as llm:
                tokens(llm)
        del llm
    assert len(alive) >= 2 and all(a() is None for a in alive)
