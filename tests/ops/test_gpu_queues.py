"""The queues of a card, on `fake_cuda.py`: what they wait for, what a recording forbids, and what is left of
a step that was broken off at any point of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import numpy as np
import placements
import pytest
import test_gpu
import test_gpu_parallel
import torch
from fake_cuda import ANY, ORDERS, Card, Order, Words

from thermocline.engine.decoder import bind, forward
from thermocline.engine.kv_cache import KVCache
from thermocline.errors import DeviceFailure
from thermocline.ops import cuda
from thermocline.ops.cuda import Cuda
from thermocline.ops.interface import F32, Batch, FFNStats
from thermocline.pack.pack import Pack
from thermocline.plan.placement import Placement
from thermocline.session import gpu_weights

pytestmark = pytest.mark.oracle

PROMPT = 5  # tokens: few enough for a recording


class Lab:
    """A model of three layers: divided, all on the card, its neurons all in RAM.

    If both halves of its layers read the same stream, the second one is divided, too, behind two norms.
    """

    def __init__(self, pack: Pack, card: Card) -> None:
        self.card = card
        counts = (96, 96, 0) if pack.spec.parallel else (96, 512, 0)
        each = tuple(placements.layer(pack.spec, True, False, n) for n in counts)
        self.places = Placement(each, "gpu:0")
        self.device = cuda.Cuda()
        self.ops = test_gpu.gpu_ops(self.device, pack.spec)  # type: ignore[arg-type]
        made = gpu_weights.load(pack, self.places, (self.device,), self.ops.cpu)
        if pack.spec.parallel:
            made = test_gpu_parallel.two_norms(made, 1)
        self.model = bind(pack.spec, made, self.ops)
        self.kv = KVCache(pack.spec, 1, storage=test_gpu.storage(self.places, self.device))
        at = np.arange(PROMPT, dtype=np.int32)
        self.batch = Batch(at + 3, at, np.zeros_like(at), np.zeros((1, 1), np.int32), at)
        self.step()  # makes the model's vectors
        self.placed = 0  # items queued, and
        self.begun = 0  # calls, when a step's places are there and the step itself begins
        queue = self.ops.queue

        def noted(*args: Any) -> Any:
            self.placed, self.begun = card.queues.count, card.faults.seen[ANY]
            return queue(*args)

        self.ops.queue = noted  # type: ignore[method-assign,assignment]

    def step(self, stats: FFNStats | None = None) -> F32:
        """Return the logits of a prompt's tokens."""
        return forward(self.model, self.kv, self.batch, self.ops, sparsity="exact", stats=stats or FFNStats())

    def prepare(self, how: str) -> None:
        """Let the next step be queued, recorded or replayed."""
        self.ops.forget()
        for _ in range(("queued", "recorded", "replayed").index(how)):
            self.step()


@contextlib.contextmanager
def lab(
    path: Path, order: Order, patch: pytest.MonkeyPatch, words: Words = "taken", model: str = "in turn"
) -> Iterator[Lab]:
    path.mkdir(exist_ok=True)
    card = Card(order=order, words=words)
    fake_cuda.install(patch, card)
    made = Lab(test_gpu.pack_of(path, "f32") if model == "in turn" else test_gpu_parallel.falcon(path), card)
    assert made.device.hand_over == ("words in pinned memory" if words == "taken" else "host functions")
    yield made
    card.slow = False
    made.device.close()
    assert not card.queues.count and card.now is None and not card.cut_off


MODELS = ("in turn", "parallel")  # how halves of a layer follow each other
KINDS = ("queued", "recorded", "replayed")


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, F32]:
    """Of each model, its FFNs begun behind attention."""
    found = {}
    for model in MODELS:
        path = tmp_path_factory.mktemp("m")
        with (
            pytest.MonkeyPatch.context() as patch,
            test_gpu_parallel.in_turn(),
            lab(path, "at once", patch, model=model) as x,
        ):
            found[model] = x.step()
    return found


@pytest.fixture
def truth(truths: dict[str, F32]) -> F32:
    return truths["in turn"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("order", ORDERS)
def test_a_step_is_the_same_whichever_queue_comes_first(
    order: Order, model: str, truths: dict[str, F32], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lab(tmp_path, order, monkeypatch, model=model) as x:
        for how in KINDS:
            x.prepare(how)
            assert np.array_equal(x.step(), truths[model]), how


# ---- hand-over by words


@pytest.mark.parametrize("words", ["unknown", "refused", "refused in a recording"])
def test_where_the_driver_takes_no_words_tasks_are_host_functions(
    words: Words,
    truth: F32,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with lab(tmp_path, "first stream first", monkeypatch, words) as x:
        (said,) = [m for m in caplog.messages if "the CPU's tasks are host functions of the driver" in m]
        assert ("in a recording" in said) == (words == "refused in a recording")
        for how in KINDS:
            x.prepare(how)
            assert np.array_equal(x.step(), truth), how
        assert x.card.faults.seen["cuLaunchHostFunc"]


def test_a_step_leaves_nothing_in_the_words(
    truth: F32, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next replay asks with the same numbers: an answer that is left would be taken for its own."""
    with lab(tmp_path, "first stream first", monkeypatch) as x:
        words = x.device._words
        assert words is not None
        for how in KINDS:
            x.prepare(how)
            assert np.array_equal(x.step(), truth), how
            assert not words.words.any() and not words.expected
        assert not x.card.faults.seen["cuLaunchHostFunc"]


class Slow:
    """A task that runs until it is let go."""

    def __init__(self) -> None:
        self.running, self.over = threading.Event(), threading.Event()
        self.begun = self.ended = 0

        def go(_: int) -> None:
            self.running.set()
            assert self.over.wait(20)

        self._kept, self.argument = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(go), 0
        self.function = ctypes.cast(self._kept, ctypes.c_void_p).value or 0

    def run(self) -> None: ...
    def take(self) -> None: ...


def test_a_task_that_was_asked_for_is_waited_for_although_its_step_was_broken_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C comes between the question and the wait for the answer: no stream waits for the task."""
    card = Card(order="first stream first")
    fake_cuda.install(monkeypatch, card)
    device, task = cuda.Cuda(), Slow()
    card.faults.set("cuStreamWaitValue32", 1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        device.call(task)
    card.advance()
    assert task.running.wait(20)
    waiting = threading.Thread(target=device.wait, args=([task],))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive() and not card.queues.count
    task.over.set()
    waiting.join(20)
    assert not waiting.is_alive()
    device.close()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["beside", "join"])
@pytest.mark.parametrize("how", KINDS)
def test_a_wait_between_queues_that_is_missing_is_seen(
    how: str,
    name: str,
    model: str,
    truths: dict[str, F32],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the tests themselves: in one order at least the answer is another, or a recording is refused."""

    @contextlib.contextmanager
    def beside(self: Cuda) -> Iterator[None]:
        self._on = self._side
        yield
        self._on = self._main

    changed = {"beside": beside, "join": lambda self: None}[name]
    seen, truth = [], truths[model]
    for i, order in enumerate(ORDERS):
        with pytest.MonkeyPatch.context() as patch, lab(tmp_path / str(i), order, patch, model=model) as x:
            patch.setattr(Cuda, name, changed)
            try:
                x.prepare(how)
                x.device.wait([])
                x.ops._cold[0].fill_(float("nan"))  # else the step before has left the same sum
                seen.append(not np.array_equal(x.step(), truth))
            except DeviceFailure:
                seen.append(True)
            x.ops._settle()
    assert any(seen)


# ---- what a recording forbids


def pageable(x: Lab) -> None:
    x.device.copy(x.device.zeros((4,), torch.float32), torch.zeros(4))


FORBIDDEN: dict[str, Callable[[Lab], Any]] = {
    "memory": lambda x: x.device.zeros((4,), torch.float32),
    "pinned memory": lambda x: x.device.pinned((4,), torch.float32),
    "a wait": lambda x: x.device.wait([]),
    "free bytes": lambda x: x.device.free_bytes(),
    "a copy that is waited for": lambda x: x.device.put(
        x.ops._rows[0], torch.zeros(PROMPT, dtype=torch.int32)
    ),
    "a copy from memory that is not pinned": lambda x: x.device.copy(
        x.ops._rows[0][:4], torch.zeros(4, dtype=torch.int32)
    ),
    "a kernel that was not loaded": lambda x: x.device.run(x.ops._sum[0].cos_),
    "a kernel over RAM": lambda x: x.device.run(torch.zeros(4).zero_),
    "a queue that nobody joins": lambda x: beside_alone(x),
    "a mark from before": lambda x: x.device.after(x.marked),  # type: ignore[attr-defined]
    "a recording": lambda x: x.device.record(lambda: None),
}


def beside_alone(x: Lab) -> None:
    with x.device.beside():
        x.device.run(x.ops._sum[0].zero_)


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_cuda_forbids_in_a_recording_is_refused_and_over_then(
    what: str, truth: F32, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lab(tmp_path, "first stream first", monkeypatch) as x:
        x.marked = x.device.mark()  # type: ignore[attr-defined]
        with pytest.raises(DeviceFailure, match="CUDA error"):
            x.device.record(lambda: FORBIDDEN[what](x))
        assert x.card.now is None, "the thread's stream is as before"
        for how in KINDS:
            x.prepare(how)
            assert np.array_equal(x.step(), truth), how


# ---- a step that is broken off


def settled(x: Lab, left: int = 0) -> None:
    """Nothing runs and no more than `left` is queued, once the ops have settled."""
    x.card.faults.set("", 0, None)
    x.ops._settle()
    assert x.card.queues.count <= left and x.card.now is None and x.card.capture is None
    if (words := x.device._words) is not None:
        assert not words.expected, "nobody looks at the words any more"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("order", ORDERS[1:])
def test_a_step_that_is_broken_off_at_any_call_leaves_nothing_running(
    order: Order,
    how: str,
    model: str,
    truths: dict[str, F32],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its tasks go when the next step has settled; the driver calls none of them later (`fake_cuda`).

    Where a recording is broken off, only its places are on their way; the next step's follow them.
    """
    with lab(tmp_path, order, monkeypatch, model=model) as x:
        x.prepare(how)
        x.card.faults.set("", 0, None)
        x.step()
        calls, begun = x.card.faults.seen[ANY], x.begun
        assert calls - begun > (4 if how == "replayed" else 60)
        for at in range(begun + 1, calls + 1):
            x.prepare(how)
            x.card.faults.set(ANY, at, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                x.step()
            settled(x, x.placed if how == "recorded" else 0)
        assert np.array_equal(x.step(), truths[model])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("how", ["queued", "replayed"])
@pytest.mark.parametrize("order", ORDERS[1:])
def test_a_step_that_is_given_up_at_any_point_of_it_leaves_nothing_running(
    order: Order,
    how: str,
    model: str,
    truths: dict[str, F32],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each time somebody looks, one kernel, copy or task has run: Ctrl-C comes after 0, 1, 2 ... of them."""
    with lab(tmp_path, order, monkeypatch, model=model) as x:
        x.prepare(how)
        x.card.slow = True
        x.card.faults.set("", 0, None)
        first, again, truth = FFNStats(), FFNStats(), truths[model]
        assert np.array_equal(x.step(first), truth)
        looks = x.card.faults.seen["Event.query"]
        assert looks > 40
        for at in range(1, looks + 1):
            x.card.slow = False
            x.prepare(how)
            x.card.slow = True
            x.card.faults.set("Event.query", at, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                x.step()
            settled(x)
        assert np.array_equal(x.step(again), truth) and again == first
