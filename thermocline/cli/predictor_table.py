"""The figures of trained predictors, as `train` and `inspect` print them."""

from __future__ import annotations

from typing import Any

from thermocline.cli.table import size


def fidelity_rows(r: dict[str, Any]) -> list[tuple[str, str]]:
    fewer = 1 - r["ffn_bytes_per_token"] / r["ffn_bytes_per_token_exact"]
    words = f"{abs(fewer):.1%} {'fewer' if fewer >= 0 else 'more'} than exact"
    return [
        *_divergences(r),
        ("same likeliest", f"{r['same_top']['value']:.2%} of {r['tokens']:,} tokens"),
        ("perplexity", f"{r['perplexity']['value']:.4f}, {r['perplexity_change_percent']:+.3f}% from exact"),
        (
            "gate rows",
            f"{r['predicted_fraction']:.1%} read; {r['active_fraction']:.2%} of neurons are active",
        ),
        ("FFN bytes", f"{size(r['ffn_bytes_per_token'])} per token, {words}"),
        ("predictors", f"{size(r.get('predictor_bytes_per_token'))} of them{_reading(r)}"),
    ]


def _divergences(r: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a row for each text, the furthest from exact first."""
    whole = [
        {"name": None, "kld": r["kld"], "kld_p99": r["kld_p99"]}
    ]  # of a file made before there were several
    texts = sorted(r.get("texts") or whole, key=lambda t: -t["kld"]["value"])
    lines = [
        f"{t['kld']['value']:.5f} ± {t['kld']['error']:.5f} nats from exact, 99 % below {t['kld_p99']:.3f}"
        + (f", on {t['name']}" if t["name"] else "")
        for t in texts
    ]
    return list(zip(["divergence"] + [""] * (len(lines) - 1), lines, strict=True))


def _reading(r: dict[str, Any]) -> str:
    us = r.get("predictor_us_at_memory_speed")
    return "" if us is None else f", {us / 1e3:.3g} ms of reading at memory's speed (estimated)"
