"""`thermocline trace`: what each token needs of a mixture, and the ceiling and hits of caches for it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thermocline.cli.commands.bench import CACHE_POLICIES
from thermocline.cli.commands.routing.routes import decoded
from thermocline.cli.console import ProgressBar, emit, emit_json
from thermocline.cli.fan_out import check_on_cpu, workers_of
from thermocline.cli.packs import find_model
from thermocline.cli.shared_options import (
    gpu_memory,
    json_output,
    on_ray,
    process_count,
    quiet_output,
    thread_count,
    which_activation,
    which_gpu,
)
from thermocline.cli.table import markdown_row
from thermocline.errors import UsageError
from thermocline.options import BY_POSITION, nonempty, opt, some_of, whole

if TYPE_CHECKING:
    from thermocline.offline.routing.ceilings import Ceiling
    from thermocline.offline.routing.statistics import Choices
    from thermocline.pack.stored_model import StoredModel
    from thermocline.plan.disk.expert_hits import OwnRouting

POLICIES = ("experts", *CACHE_POLICIES)


@dataclass(frozen=True)
class TraceOptions:
    """Say what each token needs of a mixture, and how much of that caches of every policy and size find."""

    model: str | None = opt(
        None, nonempty, "MODEL", "Model",
        "A mixture: a pack, a GGUF, a Hub name. Without --text, the trace stored with its profile is played, "
        "else random tokens are decoded.",
        flags="-m", shown="none, with --routes", given=BY_POSITION
    )  # fmt: skip
    activation: str | None = which_activation()
    gpu: str = which_gpu()
    vram: float | None = gpu_memory()
    threads: int = thread_count()
    processes: int | None = process_count("layers that are played")
    ray: str | None = on_ray()
    routes: str | None = opt(
        None, nonempty, "FILE", "Tokens", "Play a route trace (a .csv with `# route_trace v1`).", shown="none"
    )
    text: str | None = opt(None, nonempty, "FILE", "Tokens", "Decode this text.", shown="none")
    tokens: int = opt(
        512, whole(2, 1 << 20), "N", "Tokens", "Decode or play so many, the first ones.", flags="-n"
    )
    depth: int = opt(32, whole(1, 1 << 20), "N", "Tokens", "Decode after a prompt of so many.", flags="-d")
    seed: int = opt(1, whole(0, 2**63 - 1), "N", "Tokens", "Seed of the random tokens.", flags="-s")
    policy: tuple[str, ...] = opt(
        (), some_of(*POLICIES), ",".join(POLICIES), "Caches",
        "Policies: experts is the engine's, belady knows the future.", shown="all"
    )  # fmt: skip
    batch: int = opt(1, whole(1, 64), "N", "Caches", "Decode so many parts of the tokens together.")
    plot: str | None = opt(
        None, nonempty, "FILE", "Output", "Draw the hits into a .png, .svg or .pdf.", shown="none"
    )
    json: bool = json_output()
    quiet: bool = quiet_output("no remarks")


@dataclass(frozen=True)
class Played:
    """Tokens' choices to play. `expert_bytes`: of each layer, where the model is known."""

    found: Choices
    own: OwnRouting | None = None
    expert_bytes: tuple[int, ...] | None = None


def trace(o: TraceOptions) -> int:
    from thermocline.offline import profile_plot
    from thermocline.offline.routing.ceilings import ceilings

    if (o.model is None) == (o.routes is None):
        raise UsageError("name a mixture, or --routes FILE: one of them")
    if o.routes is not None and o.text is not None:
        raise UsageError(f"--text {o.text}: {o.routes} has tokens of its own; leave one of them out")
    if o.routes is not None and o.gpu != "off":
        raise UsageError(f"--gpu {o.gpu}: {o.routes} is played, and no model computes; leave it out")
    check_on_cpu(o)
    if o.plot is not None:
        profile_plot.check(Path(o.plot))
    with ProgressBar(quiet=o.quiet) as progress:
        p = _played(o, progress)
        tokens = len(p.found.chosen[0])
        if tokens < 2 * o.batch:
            raise UsageError(f"--batch {o.batch}: there are {tokens} tokens, two steps' at least are needed")
        likely = None if p.own is None else dict(enumerate(p.own.likely.values()))
        policies = o.policy or POLICIES
        bar = partial(progress.at, "playing", unit=" layers")
        with workers_of(o) as workers:
            played = ceilings(p.found, policies, likely, o.batch, across=workers, progress=bar)
        rows = [_row(p, c) for c in played]
    about = _about(p, o.batch)
    if o.plot is not None:
        drawn = [{"policy": r["policy"], "places": r["held"], "hit_rate": r["hit_rate"]} for r in rows]
        profile_plot.draw_replay(drawn, Path(o.plot), o.model or "route trace", p.found.source, "experts")
    if o.json:
        emit_json(about | {"caches": rows})
    else:
        emit(_text(about, rows, policies))
    return 0


def _played(o: TraceOptions, progress: ProgressBar) -> Played:
    from thermocline.offline.routing.recorder import check_routed
    from thermocline.offline.routing.route_trace import read_route_trace
    from thermocline.offline.routing.statistics import Choices
    from thermocline.plan.disk.expert_hits import own_routing

    if o.routes is not None:
        found = read_route_trace(Path(o.routes))
        return Played(dataclasses.replace(found, chosen=tuple(c[: o.tokens] for c in found.chosen)))
    model = find_model(o.model, progress, activation=o.activation)
    check_routed(model.spec)
    own, nbytes = own_routing(model), _expert_bytes(model)
    if own is not None and o.text is None:
        chosen = tuple(c[: o.tokens].astype("int64") for c in own.chosen.values())
        return Played(Choices(chosen, own.experts, f"its profile of {own.tokens:,} tokens"), own, nbytes)
    return Played(decoded(model, o, progress), own, nbytes)


def _expert_bytes(model: StoredModel) -> tuple[int, ...] | None:
    from thermocline.plan.disk.expert_split import Mixture
    from thermocline.plan.memory import reads_from_disk

    if reads_from_disk(model.spec) != "experts":
        return None
    return tuple(r.bytes for r in Mixture(model.spec, model.tensors).records.values())


def _about(p: Played, batch: int) -> dict[str, Any]:
    import numpy as np

    from thermocline.plan.disk.expert_hits import needs_of

    chosen, nbytes = p.found.chosen, p.expert_bytes
    tokens, active = chosen[0].shape
    needs = [needs_of(c, p.found.experts, batch) for c in chosen]
    steps = [float(n.sum(axis=1).mean()) for n in needs]
    new = np.mean([1 - (n[1:] & n[:-1]).sum() / n[1:].sum() for n in needs])
    needed = None if nbytes is None else sum(s * b for s, b in zip(steps, nbytes, strict=True)) / batch
    return {
        "source": p.found.source,
        "tokens": tokens,
        "batch": batch,
        "layers": len(chosen),
        "experts": p.found.experts,
        "active": active,
        "needed_per_step": sum(steps),
        "new_share": float(new),
        "bytes_per_token": needed,
    }


def _row(p: Played, c: Ceiling) -> dict[str, Any]:
    row: dict[str, Any] = {
        "held": c.held, "slots": c.slots, "policy": c.policy, "hit_rate": c.hit_rate,
        "missed_per_token": c.missed_per_token, "held_bytes": None, "disk_bytes_per_token": None,
    }  # fmt: skip
    if p.expert_bytes is not None:
        row["held_bytes"] = c.slots * sum(p.expert_bytes)
        each = zip(c.missed_by_layer, p.expert_bytes, strict=True)
        row["disk_bytes_per_token"] = sum(missed * b for missed, b in each)
    return row


def _text(about: dict[str, Any], rows: list[dict[str, Any]], policies: tuple[str, ...]) -> str:
    """Return a row for each size, with the hits of every policy."""
    known = rows[0]["held_bytes"] is not None
    lines = [["held", *(["GiB"] if known else []), *policies, *(["MB/token"] if known else [])]]
    for at in range(0, len(rows), len(policies)):
        some = rows[at : at + len(policies)]
        first = some[0]
        line = [f"{first['held']:.0%}", *([f"{first['held_bytes'] / 2**30:.2f}"] if known else [])]
        line += [f"{r['hit_rate']:.1%}" for r in some]
        lines.append(line + ([f"{first['disk_bytes_per_token'] / 1e6:.3g}"] if known else []))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * (w - 1) + ":" for w in widths]
    text = "".join(
        markdown_row(f"{c:>{w}}" for c, w in zip(line, widths, strict=True))
        for line in (lines[0], rule, *lines[1:])
    )
    facts = [f"{about['tokens']} tokens of {about['source']}", f"batch {about['batch']}"]
    facts.append(f"{about['active']} of {about['experts']} experts in each of {about['layers']} layers")
    facts.append(f"{about['new_share']:.0%} of them not the step's before")
    if known:
        facts.append(f"{about['bytes_per_token'] / 1e6:.3g} MB needed a token; MB/token: {policies[0]}'s")
    return f"{text}\n{' · '.join(facts)}\n"
