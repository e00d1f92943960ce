"""A plan as a table for a person: where the bytes go, how fast a token is, what bounds it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from thermocline.report import size, table

if TYPE_CHECKING:
    from thermocline.plan import Plan, Prediction

TIERS = ("gpu", "ram", "disk")
PARTS = (
    "embedding", "attention", "keys and values", "predictors", "neurons", "gate rows", "up and down rows",
    "head", "buffers", "disk buffers", "runtime",
)  # fmt: skip


def plan_text(model: str, hardware: str, plan: Plan, more: Plan | None) -> str:
    facts = [("model", model), ("hardware", hardware)]
    speed = [("speed", _speed(plan)), ("time", _spent(plan.predicted[0]))]
    speed += [("batch", _batches(plan))]
    if any(plan.hot[1]):
        speed.append(("hot", _hot(plan)))
    speed.append(("with 25 % more", _more(plan, more)))
    notes = [("note" if i == 0 else "", line) for i, line in enumerate(plan.notes)]
    layers = [("layers" if i == 0 else "", line) for i, line in enumerate(_layers(plan))]
    return f"{table(facts)}\n{_byte_table(plan)}\n{table([*layers, *speed, *notes])}"


def _byte_table(plan: Plan) -> str:
    used = [t for t in TIERS if t == "ram" or plan.bytes[t]]
    rows = [["", *(t.upper() for t in used)]]
    for part in PARTS:
        if any(part in plan.bytes[t] for t in used):
            rows.append([part, *(size(plan.bytes[t][part]) if part in plan.bytes[t] else "-" for t in used)])
    rows.append(["together", *(size(plan.used(t)) for t in used)])
    limits = {"gpu": size(plan.budget.vram_bytes), "ram": size(plan.budget.ram_bytes), "disk": ""}
    rows.append(["allowed", *(limits[t] for t in used)])
    first = max(len(row[0]) for row in rows)
    return "".join(
        f"{row[0]:<{first}}" + "".join(f"{x:>13}" for x in row[1:]).rstrip() + "\n" for row in rows
    )


def _layers(plan: Plan) -> list[str]:
    """Like layers in one line: `0-17  attention gpu · 4096 neurons gpu, 6912 ram`."""
    lines, first = [], 0
    for i, layer in enumerate(plan.layers):
        if i + 1 < len(plan.layers) and plan.layers[i + 1] == layer:
            continue
        counts = ((n, t) for n, t in zip((layer.gpu, layer.ram, layer.disk), TIERS, strict=True) if n)
        neurons = ", ".join(f"{n} {t}" for n, t in counts) + " (gate rows too)" * (layer.disk_gates > 0)
        predictor = f" · predictor {layer.predictor}" if layer.predictor is not None else ""
        which = f"{first}-{i}" if i > first else f"{i}"
        lines.append(f"{which:<6} attention {layer.attention}{predictor} · neurons {neurons}")
        first = i + 1
    if len(lines) <= 8:
        return [*lines, f"head {plan.head}"]
    where = Counter(layer.attention for layer in plan.layers)
    gpu = sorted(layer.gpu for layer in plan.layers)
    disk = sorted(layer.disk for layer in plan.layers)
    return [
        "attention " + ", ".join(f"{n} {t}" for t, n in sorted(where.items())) + f" · head {plan.head}",
        f"neurons of a layer: {gpu[0]} to {gpu[-1]} gpu, {disk[0]} to {disk[-1]} disk"
        f"{_with_gates(plan)} (each: --json)",
    ]


def _with_gates(plan: Plan) -> str:
    layers = sum(layer.disk_gates > 0 for layer in plan.layers)
    return f", with their gate rows in {layers} layers" if layers else ""


def _speed(plan: Plan) -> str:
    start, half, full = plan.predicted
    share = f", {plan.share:.0%} of the neurons' work on the GPU" if plan.share else ""
    return (
        f"{start.tokens_per_s:.3g} tok/s, bound by the {start.bound}{share} "
        f"({half.tokens_per_s:.3g} after {half.depth} tokens, {full.tokens_per_s:.3g} after {full.depth})"
    )


def _spent(p: Prediction) -> str:
    times = (("GPU", p.gpu_us), ("CPU", p.cpu_us), ("disk", p.disk_us), ("sync", p.sync_us))
    total = sum(us for _, us in times)
    return (
        " + ".join(f"{name} {us / 1e3:.3g}" for name, us in times if us) + f" = {total / 1e3:.3g} ms a step"
    )


def _batches(plan: Plan) -> str:
    return ", ".join(f"of {p.batch} {p.tokens_per_s:.3g} tok/s" for p in plan.buckets)


def _hot(plan: Plan) -> str:
    neurons = sum(layer.gpu + layer.ram + layer.disk for layer in plan.layers)
    shares = (f"{sum(counts) / neurons:.1%} in a batch of {batch}" for batch, counts in plan.hot.items())
    return f"neurons not worth asking a predictor about: {', '.join(shares)}"


def _more(plan: Plan, more: Plan | None) -> str:
    if more is None:
        return "nothing changes: the budget is not what bounds it"
    was, now = plan.predicted[1].tokens_per_s, more.predicted[1].tokens_per_s
    vram = f"{size(more.budget.vram_bytes)} of VRAM, " if more.budget.vram_bytes else ""
    change = f"{now / was - 1:+.0%}" if abs(now / was - 1) >= 0.005 else "no faster"
    return f"{vram}{size(more.budget.ram_bytes)} of RAM: {more.tokens_per_s:.3g} tok/s ({change})"
