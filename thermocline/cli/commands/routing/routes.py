"""`thermocline routes`: how a mixture's routers pick experts, of a model or of a trace."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from thermocline.cli.console import ProgressBar, emit, emit_json
from thermocline.cli.packs import find_model
from thermocline.cli.shared_options import (
    gpu_memory,
    json_output,
    quiet_output,
    thread_count,
    which_activation,
    which_gpu,
)
from thermocline.cli.table import finite, table
from thermocline.errors import UsageError
from thermocline.options import BY_POSITION, REQUIRED, nonempty, opt, whole

if TYPE_CHECKING:
    from thermocline.offline.routing.statistics import Choices, RoutingStatistics
    from thermocline.pack.stored_model import StoredModel


@dataclass(frozen=True)
class RoutesOptions:
    """Say how evenly and how lastingly a mixture's routers pick experts: what a cache of them can hit."""

    source: str = opt(
        "", nonempty, "SOURCE", "Model",
        "A mixture (a pack, a GGUF, a Hub name), which decodes, or a route trace (a .csv with `# route_trace "
        "v1`), whose decoded tokens are measured.",
        given=BY_POSITION | REQUIRED
    )  # fmt: skip
    activation: str | None = which_activation()
    gpu: str = which_gpu()
    vram: float | None = gpu_memory()
    threads: int = thread_count()
    tokens: int = opt(128, whole(2, 1 << 20), "N", "Tokens", "Decode so many.", flags="-n")
    depth: int = opt(32, whole(1, 1 << 20), "N", "Tokens", "After a prompt of so many.", flags="-d")
    text: str | None = opt(
        None, nonempty, "FILE", "Tokens", "Feed this text.", shown="random tokens"
    )  # fmt: skip
    seed: int = opt(1, whole(0, 2**63 - 1), "N", "Tokens", "Seed of the random tokens.", flags="-s")
    json: bool = json_output()
    quiet: bool = quiet_output("no remarks")


def routes(o: RoutesOptions) -> int:
    from thermocline.offline.routing import route_trace
    from thermocline.offline.routing.statistics import measure

    path = Path(o.source)
    if route_trace.is_route_trace(path):
        if o.text is not None:
            raise UsageError(f"--text {o.text}: {o.source} is a trace, which has tokens of its own")
        if o.gpu != "off":
            raise UsageError(f"--gpu {o.gpu}: {o.source} is a trace, and no model computes; leave it out")
        found = route_trace.read_route_trace(path)
    else:
        with ProgressBar(quiet=o.quiet) as progress:
            found = decoded(find_model(o.source, progress, activation=o.activation), o, progress)
    about = measure(found)
    if o.json:
        emit_json(finite({"source": found.source, **dataclasses.asdict(about)}))
    else:
        emit(table(_rows(found, about)))
    return 0


class Decoding(Protocol):
    """The options of tokens that are decoded."""

    @property
    def threads(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def text(self) -> str | None: ...
    @property
    def seed(self) -> int: ...
    @property
    def gpu(self) -> str: ...
    @property
    def vram(self) -> float | None: ...


def decoded(model: StoredModel, o: Decoding, progress: ProgressBar) -> Choices:
    """Return the experts that a model's tokens choose while it decodes."""
    from thermocline.machine import hardware
    from thermocline.offline import bench as benchmark
    from thermocline.offline.routing.recorder import check_routed
    from thermocline.offline.routing.route_profiler import recorder_of
    from thermocline.session.options import EngineOptions

    check_routed(model.spec)
    threads = hardware.threads_for(o.threads)
    test = benchmark.Test(threads, o.depth, 0, o.tokens)
    benchmark.check_context(model.spec, [test])
    feed = benchmark.feed_of(model, [test], o.text, o.seed)
    options = EngineOptions(gpu=o.gpu, vram=o.vram)
    with contextlib.closing(benchmark.Bench(model, [test], feed, options, progress.at)) as bench:
        recorder, _ = recorder_of(bench.session)
        bench.watch(test, recorder)
        return recorder.choices(feed.name)


def _rows(found: Choices, about: RoutingStatistics) -> list[tuple[str, str]]:
    def said(values: dict[str, float]) -> str:
        return "  ".join(f"{name} {v:.3f}" for name, v in values.items())

    return [
        ("tokens", f"{about.tokens} of {found.source}"),
        ("experts", f"{about.active} of {about.experts} in each of {about.layers} layers"),
        ("touched", f"{about.touched:.3f} of the experts"),
        ("skew", f"{said(about.skew)}  of choices on the hottest"),
        ("overlap", f"{said(about.overlap)}  with the token so far back"),
        ("LRU hits", f"{said(about.lru)}  if so many experts are held"),
        ("decayed hits", said(about.decayed)),
        ("alike", "-" if about.alike is None else f"{about.alike:.3f} between a layer and the next"),
    ]
