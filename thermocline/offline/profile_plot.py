"""Draw profiles and replays with matplotlib (extra `[plot]`), which is imported when it is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thermocline.errors import IOFailure, UsageError
from thermocline.pack.activity_profile import HOT_SHARE, Profile, concentration, hot_share, summary

KINDS = (".png", ".svg", ".pdf")
INCHES, DPI = (13.0, 5.2), 150
MAX_COLUMNS = 512  # of the heat map: neurons beside each other are averaged
INK, ACCENT, QUIET = "#1b1b1f", "#d1495b", "#8d99ae"


def check(path: Path) -> None:
    """Raise UsageError or IOFailure if a picture cannot be drawn, before anything is computed."""
    if path.suffix.lower() not in KINDS:
        raise UsageError(f"--plot {path}: must end in {', '.join(KINDS)}")
    if not path.absolute().parent.is_dir():
        raise IOFailure(f"--plot {path}: no such directory")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'thermocline[plot]'") from None


def draw(profile: Profile, path: Path, name: str) -> None:
    """Draw how few neurons make most activations, and in which layers they are. Raises IOFailure."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
    curve, heat = figure.subplots(1, 2, width_ratios=(1, 1.25))
    about = summary(profile)
    figure.suptitle(
        f"{name}: {about['active_fraction']:.1%} of {about['neurons']:,} neurons active for a token "
        f"({profile.tokens:,} tokens)",
        color=INK,
        fontsize=12,
    )
    _draw_curve(curve, profile)
    _draw_heat(figure, heat, profile)
    _save(figure, path)


def draw_replay(
    rows: Sequence[dict[str, Any]], path: Path, name: str, source: str, what: str = "neurons"
) -> None:
    """Draw hit rates over the size of the cache, one line for each policy. Raises IOFailure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5.2), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = sorted((row["places"], row["hit_rate"]) for row in rows if row["policy"] == policy)
        axes.plot(*zip(*own, strict=True), marker="o", markersize=3, linewidth=1.4, label=policy)
    axes.set(
        title=f"{name}: {source}", xlabel=f"share of {what} in memory", ylabel="found there", ylim=(0, 1)
    )
    axes.xaxis.set_major_formatter(_percent)
    axes.yaxis.set_major_formatter(_percent)
    axes.grid(color=QUIET, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path)
    except OSError as e:
        raise IOFailure(f"{path}: cannot write the picture: {e.strerror or e}") from None


def _draw_curve(axes: Any, profile: Profile) -> None:
    from matplotlib import colormaps

    numbers = [i for i, c in enumerate(profile.counts) if c.size]
    one = [profile.counts[i][0] for i in numbers]
    for i, counts in enumerate(one):
        colour = colormaps["viridis"](0.9 * i / max(1, len(one) - 1))
        label = f"layer {numbers[i]}" if i in (0, len(one) - 1) and len(one) > 1 else None
        axes.plot(*_thinned(counts), color=colour, linewidth=0.8, alpha=0.8, label=label)
    whole = np.stack(one)
    axes.plot(*_thinned(whole), color=INK, linewidth=2.4, label="whole model")
    hot = hot_share(whole)
    axes.plot([hot, hot, 0], [0, HOT_SHARE, HOT_SHARE], color=ACCENT, linewidth=1.0, linestyle="--")
    axes.plot([hot], [HOT_SHARE], marker="o", color=ACCENT)
    text = f"{hot:.0%} of neurons make\n{HOT_SHARE:.0%} of activations"
    axes.annotate(text, (hot, HOT_SHARE), (10, -12), textcoords="offset points", va="top", color=ACCENT)
    axes.set(
        xlim=(0, 1), ylim=(0, 1.01), xlabel="share of neurons, hottest first", ylabel="share of activations"
    )
    axes.xaxis.set_major_formatter(_percent)
    axes.yaxis.set_major_formatter(_percent)
    axes.grid(color=QUIET, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)


def _percent(value: float, _: float) -> str:
    return f"{value:.0%}"


def _thinned(counts: Any) -> tuple[Any, Any]:
    """Return at most 2000 points of the curve. All points would take megabytes in an .svg."""
    x, y = concentration(counts)
    at = np.unique(np.linspace(0, len(x) - 1, 2000).astype(np.int64))
    return x[at], y[at]


def _draw_heat(figure: Any, axes: Any, profile: Profile) -> None:
    from matplotlib.colors import LogNorm

    most = max(c[0].size for c in profile.counts)
    nothing = np.zeros(most)  # layers without an FFN
    rows = np.stack([profile.hotness(i) if c.size else nothing for i, c in enumerate(profile.counts)])
    step = math.ceil(rows.shape[1] / MAX_COLUMNS)
    starts = np.arange(0, rows.shape[1], step)
    widths = np.diff(np.append(starts, rows.shape[1]))
    binned = np.add.reduceat(rows, starts, axis=1) / widths
    low = max(1 / profile.tokens, 1e-4)
    shown = axes.imshow(
        np.maximum(binned, low),
        aspect="auto",
        interpolation="nearest",
        origin="lower",
        cmap="inferno",
        norm=LogNorm(low, max(float(binned.max()), 2 * low)),
        extent=(0, rows.shape[1], -0.5, len(rows) - 0.5),
    )
    axes.set(xlabel="neuron, hottest first", ylabel="layer")
    axes.yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(shown, ax=axes, label="how often it is active", format=lambda v, _: f"{100 * v:g}%")
