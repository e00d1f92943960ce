"""A model on a device and the CPU beside it: how fast it decodes and reads prompts, what waiting for each
other costs, and what one token's time is spent on. Must not know other engines.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gpu_models import Model

from thermocline.engine.request import Figures, Request, request_for
from thermocline.engine.sampler import SamplingParams
from thermocline.offline.bench import Script, random_tokens
from thermocline.ops.device import CPU_TASK, QueueSpan, StandIn
from thermocline.session.session import Session

WARM = 3  # tokens: queued, recorded, replayed


class Loaded:
    """A session's weights and engine; `close` gives the memory back."""

    def __init__(self, model: Model, session: Session) -> None:
        self.model, self.session, self.sparsity = model, session, session.options.sparsity
        begin = time.perf_counter()
        self.engine: Any = None
        try:
            self.engine = session.load()
        except BaseException:
            self.close()
            raise
        self.load_s = time.perf_counter() - begin
        self.seed = 0

    @property
    def ops(self) -> Any:
        return self.engine.ops

    def request(self, prompt: int, tokens: int) -> Request:
        """Random tokens, never the same twice: nothing of a prompt is in the cache."""
        self.seed += 1
        spec = self.model.pack.spec
        ids = random_tokens(spec, self.seed, prompt + tokens + 1)
        params = SamplingParams(max_tokens=tokens, temperature=0)
        request = request_for(spec, self.engine.context, None, ids[:prompt], params)
        request.sampler = Script(spec, ids[prompt:])
        queued: Request = self.engine.queue(request)
        return queued

    def until(self, request: Request, tokens: int) -> None:
        while len(request.token_ids) < tokens:
            self.engine.step()
            if request.error is not None:
                raise request.error

    def decode(self, tokens: int) -> tuple[int, Figures]:
        """Nanoseconds of `tokens` tokens, one by one."""
        request = self.request(1, tokens + WARM)
        self.until(request, WARM)
        begin = time.perf_counter_ns()
        self.until(request, tokens + WARM)
        return time.perf_counter_ns() - begin, request.figures()

    def prefill(self, tokens: int) -> int:
        """Nanoseconds of a prompt."""
        request = self.request(tokens, 1)
        begin = time.perf_counter_ns()
        self.until(request, 1)
        return time.perf_counter_ns() - begin

    def close(self) -> None:
        self.session.unload()
        self.engine = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# ---- what waiting costs


class Alone:
    """A device without the CPU's tasks, and without what goes to them and comes back."""

    def __init__(self, device: Any) -> None:
        self._device, self._aside = device, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def call(self, task: Any) -> None:
        pass

    def copy(self, to: Any, source: Any) -> None:
        if not self._aside:
            self._device.copy(to, source)

    @contextmanager
    def beside(self) -> Iterator[None]:
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    def join(self) -> None:
        pass


def sync_cost(x: Loaded, tokens: int, runs: int) -> dict[str, Any] | None:
    """A token's time, that of the GPU's part alone, and of the CPU's: what is above the longer is waiting.

    None where the CPU has no part. Of layers whose processors take turns, the shorter is counted as waiting.
    """
    x.decode(WARM)
    every = x.ops.recorded.items()
    tasks = next(p.tasks for k, p in every if (k.tokens, k.sparsity) == (1, x.sparsity))
    if not tasks:
        return None
    cpu_us = statistics.median(_cpu_us(tasks) for _ in range(runs))
    hybrid_us = _token_us(x, tokens, runs)
    device = x.ops.device
    try:
        x.ops.device = Alone(device)
        x.ops.forget()
        gpu_us = _token_us(x, tokens, runs)
    finally:
        x.ops.device = device
        x.ops.forget()
    waiting = hybrid_us - max(gpu_us, cpu_us)
    return {
        "token_us": hybrid_us,
        "gpu_alone_us": gpu_us,
        "cpu_alone_us": cpu_us,
        "handovers": len(tasks),
        "sync_us_per_layer": waiting / len(tasks),
    }


def _token_us(x: Loaded, tokens: int, runs: int) -> float:
    return statistics.median(x.decode(tokens)[0] for _ in range(runs)) / tokens / 1e3


def _cpu_us(tasks: Sequence[Any]) -> float:
    begin = time.perf_counter()
    for task in tasks:
        task.run()
    spent = time.perf_counter() - begin
    for task in tasks:
        task.take()
    return spent * 1e6


# ---- one token


def timeline(x: Loaded, scratch: Path) -> list[QueueSpan]:
    """What ran for one token, by begin; times from the first begin on."""
    request = x.request(1, WARM + 1)
    x.until(request, WARM)

    def token() -> None:
        x.until(request, WARM + 1)

    device = x.ops.device
    spans = _watched(device, token) if isinstance(device, StandIn) else _profiled(token, scratch)
    start = min((s.begin_us for s in spans), default=0.0)
    moved = (QueueSpan(s.name, s.stream, s.begin_us - start, s.end_us - start) for s in spans)
    return sorted(moved, key=lambda s: s.begin_us)


def _watched(device: StandIn, token: Callable[[], None]) -> list[QueueSpan]:
    found: list[QueueSpan] = []
    device.watched = found
    try:
        token()
    finally:
        device.watched = None
    return found


def _profiled(token: Callable[[], None], scratch: Path) -> list[QueueSpan]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        token()
        torch.cuda.synchronize()
    path = scratch / "trace.json"
    profiler.export_chrome_trace(str(path))
    return spans_of_trace(json.loads(path.read_text())["traceEvents"])


DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def spans_of_trace(events: Sequence[dict[str, Any]]) -> list[QueueSpan]:
    """The GPU's work, and the CPU's tasks: the profiler does not see these, but they lie between a copy to
    RAM and the next one from it (with the hand-over), whatever runs beside them. Streams tell nothing: work
    of a graph's side branch is said to be in the stream that the graph is launched in.
    """
    work = [e for e in events if e.get("ph") == "X" and e.get("cat") in DEVICE_WORK]
    work.sort(key=lambda e: float(e["ts"]))
    spans, sent = [], None
    for e in work:
        begin, name = float(e["ts"]), str(e["name"])
        stream, end = f"stream {e.get('args', {}).get('stream', e['tid'])}", begin + float(e["dur"])
        if "HtoD" in name and sent is not None:
            spans.append(QueueSpan(CPU_TASK, "CPU", sent, begin))
            sent = None
        if "DtoH" in name:
            sent = end
        spans.append(QueueSpan(name, stream, begin, end))
    return spans


def write_timeline(spans: Sequence[QueueSpan], path: Path) -> None:
    """JSON, and a PNG beside it where matplotlib is installed."""
    path.write_text(json.dumps([asdict(s) for s in spans], indent=0) + "\n")
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return
    streams = sorted({s.stream for s in spans})
    figure, axes = pyplot.subplots(figsize=(16, 1 + len(streams)))
    for row, stream in enumerate(streams):
        own = [s for s in spans if s.stream == stream]
        bars = [(s.begin_us / 1e3, (s.end_us - s.begin_us) / 1e3) for s in own]
        colours = [f"C{hash_of(s.name) % 10}" for s in own]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colours)
    axes.set_yticks(range(len(streams)), streams)
    axes.set_xlabel("ms of one token")
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=120)
    pyplot.close(figure)


def hash_of(name: str) -> int:
    """The same in every run, as `hash` is not."""
    return sum(name.encode())
