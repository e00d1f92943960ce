"""What bench/gpu/gpu.py's figures say: the targets of the GPU tier, met or not, and a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

Items = Mapping[str, dict[str, Any]]
OURS, LLAMA = "thermocline", "llama.cpp"


def key_of(label: str, vram: str, engine: str) -> str:
    return f"{label}, {vram}, {engine}"


def ratio(items: Items, label: str, vram: str) -> float | None:
    return _over(items, key_of(label, vram, OURS), key_of(label, vram, LLAMA))


def _over(items: Items, a: str, b: str) -> float | None:
    speeds = [items.get(key, {}).get("tok_s") for key in (a, b)]
    return speeds[0] / speeds[1] if speeds[0] and speeds[1] else None


@dataclass(frozen=True)
class Target:
    what: str
    wanted: str
    least: float | None
    most: float | None
    found: float | None

    @property
    def met(self) -> bool | None:
        """None: not measured."""
        if self.found is None:
            return None
        return (self.least is None or self.found >= self.least) and (
            self.most is None or self.found <= self.most
        )


def targets(items: Items) -> Iterator[Target]:
    for label, vram, times in (
        ("falcon-40b f16", "24", 8.0),
        ("opt-30b f16", "24", 8.0),
        ("llama-2-70b q4_0", "24", 3.0),
        ("llama-2-70b q4_0", "11", 4.0),
    ):
        what = f"{label}, {vram} GiB, over llama.cpp"
        yield Target(what, f">= {times:g}", times, None, ratio(items, label, vram))
    for label in ("llama-2-7b f16", "llama-2-7b q4_0"):
        share = items.get(key_of(label, "all", OURS), {}).get("roof_share")
        yield Target(f"{label}, all in VRAM, of the roof", ">= 0.85", 0.85, None, share)
        found = ratio(items, label, "all")
        yield Target(f"{label}, all in VRAM, over llama.cpp", ">= 1", 1.0, None, found)
    opt = "opt-30b f16"
    kept = _over(items, key_of(opt, "24", OURS), key_of(opt, "all", OURS))
    loss = None if kept is None else 1 - kept
    yield Target(f"{opt}, loss of 24 GiB against all in VRAM", "<= 0.18", None, 0.18, loss)
    plans = [(k, x["plan_over_measured"]) for k, x in items.items() if x.get("plan_over_measured")]
    worst = max(plans, key=lambda p: abs(p[1] - 1), default=(None, None))
    what = "plan over measured" + (f", worst ({worst[0]})" if plans else "")
    yield Target(what, "0.85 to 1.15", 0.85, 1.15, worst[1])
    checked = [x for x in items.values() if "worst_over_limit" in x]
    worst_nmse = max((x["worst_over_limit"] for x in checked), default=None)
    yield Target("NMSE, worst", "<= its limit", None, 1.0, worst_nmse)
    same = all(x["same_tokens"] for x in checked) if checked else None
    yield Target("same tokens", "1", 1.0, None, None if same is None else float(same))


def targets_json(items: Items) -> list[dict[str, Any]]:
    return [asdict(t) | {"met": t.met} for t in targets(items)]


def table(items: Items) -> Iterator[str]:
    for key, x in items.items():
        if "refused" in x:
            yield f"{key}: {x['refused']}"
        elif "tok_s" in x:
            share = "" if x.get("roof_share") is None else f", {x['roof_share']:.0%} of the roof"
            scaled = f", scaled from {x['layers']} of {x['of_layers']} layers" if x.get("scaled") else ""
            yield f"{key}: {x['tok_s']:.2f} tok/s, prompt {x['prompt_tok_s']:.0f} tok/s{share}{scaled}"
    for t in targets(items):
        found = "not measured" if t.found is None else f"{t.found:.3g}, {'met' if t.met else 'NOT met'}"
        yield f"{t.what}: {found} (wanted: {t.wanted})"
