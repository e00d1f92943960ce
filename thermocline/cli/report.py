"""What the commands print: figures, tables and sizes. Facts in, text or JSON-ready values out."""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thermocline.engine.request import Completion
    from thermocline.hub.cache import Item
    from thermocline.llm import LLM
    from thermocline.machine.hardware import Hardware
    from thermocline.plan.planner import Plan


def finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def table(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:<{width}}  {value}".rstrip() + "\n" for name, value in rows)


def size(nbytes: float | None) -> str:
    if nbytes is None:
        return "unknown"
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def shelf_table(items: Sequence[Item]) -> str:
    rows = [("NAME", "FORMAT", "SIZE", "USED", "PATH")]
    for i in items:
        used = time.strftime("%Y-%m-%d", time.localtime(i.last_used)) if i.last_used else "-"
        rows.append((i.name, i.format, size(i.bytes), used, str(i.path)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{x:<{w}}" for x, w in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)


# ---- run


def answer_of(a: Completion) -> dict[str, Any]:
    """One of `run --n-best`'s."""
    return {"text": a.text, "seed": a.seed, "finish_reason": a.finish_reason, "mean_logprob": a.mean_logprob}


def figures_of(llm: LLM, done: Completion, first_token_s: float | None, model: str) -> dict[str, Any]:
    """The contract of `run --json` (docs/reference/keys.toml)."""
    from thermocline.engine.request import disk_figures
    from thermocline.machine import hardware  # the native core

    f = done.figures
    speed = f.bytes_per_token * f.tokens_per_s / 1e9 if f.bytes_per_token and f.tokens_per_s else None
    cache = hardware.cache_bytes()
    # Memory speed bounds nothing where the weights fit in the cache: a run is not kept waiting for it.
    roof = (
        llm.read_gbs()
        if speed is not None and not hardware.from_cache(llm.session.weights_bytes, cache, None)
        else None
    )
    share = speed / roof if speed and roof else None
    in_cache = hardware.from_cache(llm.session.weights_bytes, cache, share)
    figures: dict[str, Any] = {
        "model": model,
        "format": llm.weight_format,
        "text": done.text,
        "token_ids": done.token_ids,
        "finish_reason": done.finish_reason,
        "seed": done.seed,
        "prompt_tokens": f.prompt_tokens,
        "tokens": f.tokens,
        "tokens_per_s": f.tokens_per_s,
        "prompt_tokens_per_s": f.prompt_tokens_per_s,
        "bytes_per_token": f.bytes_per_token,
        "gb_per_s": speed,
        "roof_gb_per_s": roof,
        "roof_share": None if in_cache else share,
        "from_cache": in_cache,
        "active_fraction": f.active_fraction,
        "rows_fraction": f.rows_fraction,
        "predicted_fraction": f.predicted_fraction,
        "sparsity": llm.sparsity,
        "isa": hardware.isa().chosen,
        "threads": llm.threads,
        "context": llm.context,
        "load_s": llm.load_s,
        "first_token_s": first_token_s,
        "peak_rss_bytes": hardware.peak_rss_bytes(),
        "huge_page_bytes": hardware.huge_page_bytes(),
        "logits_hash": f.logits_hash,
        "token_ms_p99": f.token_ms_p99,
        "memory_bytes": llm.memory_bytes,
        "disk": None if llm.session.store is None else llm.session.store.how,
        "placement": llm.session.placement.json(),
        "gpu": None if llm.session.plan is None else gpu_figures(llm.session.plan),
        **disk_figures(f, llm.threads),
    }
    if done.logprobs is not None:
        pairs = zip(done.token_ids, done.logprobs, strict=True)
        figures["logprobs"] = [{"token_id": t, "logprob": p.logprob, "top": p.top} for t, p in pairs]
    return figures


def gpu_figures(plan: Plan) -> dict[str, Any]:
    """What a GPU is given, and what was expected of that."""
    return {
        "vram_bytes": plan.used("gpu"),
        "ram_bytes": plan.used("ram"),
        "attention_layers": sum(x.attention == "gpu" for x in plan.layers),
        "neurons": [x.gpu for x in plan.layers],
        "share": plan.share,
        "predicted_tokens_per_s": plan.tokens_per_s,
    }


def line_of(f: dict[str, Any]) -> str:
    """The figures for a person, on one line; what is not known is left out."""
    parts = [f"{f['tokens']} token{'s' * (f['tokens'] != 1)}"]
    if f["finish_reason"] == "cancelled":
        parts.append("cancelled")
    if f["tokens_per_s"]:
        parts.append(f"{f['tokens_per_s']:.1f} tok/s")
    if f["prompt_tokens_per_s"]:
        parts.append(f"prompt {f['prompt_tokens_per_s']:.0f} tok/s")
    if f["gb_per_s"]:
        parts.append(f"{f['gb_per_s']:.3g} GB/s{_roof_words(f)}")
        parts.append(f"{f['bytes_per_token'] / 1e6:.3g} MB/token")
    if f["active_fraction"] is not None:
        guessed = f"{_percent(f['predicted_fraction'])} predicted, " if f["sparsity"] == "predict" else ""
        parts.append(f"{guessed}{_percent(f['active_fraction'])} of neurons active")
    if f["disk_bytes_per_token"] is not None:
        parts += _disk_words(f)
    parts += [f["sparsity"], f["isa"], f"{f['threads']} thread{'s' * (f['threads'] > 1)}"]
    return " · ".join(parts)


def chat_line(done: Completion) -> str:
    """One turn's figures for a person."""
    f = done.figures
    parts = [f"{f.tokens} token{'s' * (f.tokens != 1)}"]
    if done.finish_reason == "cancelled":
        parts.append("stopped")
    if f.tokens_per_s:
        parts.append(f"{f.tokens_per_s:.1f} tok/s")
    speed = f", {f.prompt_tokens_per_s:.0f} tok/s" if f.prompt_tokens_per_s else ""
    parts.append(f"prompt {f.prompt_tokens} ({f.cached_tokens} known{speed})")
    return " · ".join(parts)


def _roof_words(f: dict[str, Any]) -> str:
    if f["from_cache"]:
        return " from cache"
    return f" ({_percent(f['roof_share'])} of {f['roof_gb_per_s']:.3g} measured)" if f["roof_share"] else ""


def _disk_words(f: dict[str, Any]) -> list[str]:
    hits = "nothing asked for" if f["cache_hit_rate"] is None else f"{f['cache_hit_rate']:.1%} in memory"
    speed = f"disk {f['disk_bytes_per_token'] / 1e6:.3g} MB/token, {f['disk_gb_per_s']:.2g} GB/s"
    mean, p99 = 1e3 / f["tokens_per_s"], f["token_ms_p99"]
    return [hits, speed, f"waiting {f['disk_wait_share']:.0%}", f"{mean:.3g} ms a token, P99 {p99:.3g}"]


def _percent(share: float) -> str:
    return f"{100 * share:.{0 if share >= 0.1 else 1}f} %"


# ---- bench: rows in, text as llama-bench prints it out, each row as it comes

Rows = Iterable[dict[str, Any]]
SAMPLES = ("samples_ns", "samples_ts")  # lists: in JSON only, as llama-bench has it


def bench_json(rows: Rows) -> Iterator[str]:
    before = "[\n"
    for row in rows:
        lines = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in finite(row).items()]
        yield before + "  {\n" + ",\n".join(lines) + "\n  }"
        before = ",\n"
    yield "\n]\n" if before == ",\n" else "[\n]\n"


def bench_jsonl(rows: Rows) -> Iterator[str]:
    for row in rows:
        yield json.dumps(finite(row)) + "\n"


def bench_csv(rows: Rows) -> Iterator[str]:
    for i, row in enumerate(rows):
        cells = {key: value for key, value in row.items() if key not in SAMPLES}
        text = io.StringIO()
        if i == 0:
            text.write(",".join(cells) + "\n")
        writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerow([int(v) if isinstance(v, bool) else "" if v is None else v for v in cells.values()])
        yield text.getvalue()


BenchColumn = tuple[str, int, Callable[[dict[str, Any]], str]]  # title, width (below 0: left), a row's cell
BENCH_COLUMNS: tuple[BenchColumn, ...] = (
    ("model", -30, lambda r: r["model_type"]),
    ("size", 10, lambda r: _binary(r["model_size"])),
    ("params", 10, lambda r: _decimal(r["model_n_params"])),
    ("backend", -10, lambda r: r["backends"]),
    ("threads", 7, lambda r: str(r["n_threads"])),
    ("test", 15, lambda r: r["test"]),
    ("t/s", 20, lambda r: f"{r['avg_ts']:.2f} ± {r['stddev_ts']:.2f}"),
    ("median", 9, lambda r: f"{r['median_ts']:.2f}"),
    ("first s", 7, lambda r: _known(r["first_token_s"], "{:.3f}")),
    ("MB/token", 9, lambda r: _known(r["bytes_per_token"], "{:.2f}", 1e-6)),
    ("GB/s", 6, lambda r: _known(r["gb_per_s"], "{:.1f}")),
    ("roof", 6, lambda r: _known(r["roof_gb_per_s"], "{:.1f}")),
    ("of roof", 7, lambda r: "cache" if r["from_cache"] else _known(r["roof_share"], "{:.0%}")),
    ("python", 6, lambda r: _known(r["python_share"], "{:.1%}")),
)

DISK_COLUMNS: tuple[BenchColumn, ...] = (
    ("in memory", 9, lambda r: _known(r["cache_hit_rate"], "{:.1%}")),
    ("disk MB", 8, lambda r: _known(r["disk_bytes_per_token"], "{:.2f}", 1e-6)),
    ("disk GB/s", 9, lambda r: _known(r["disk_gb_per_s"], "{:.2f}")),
    ("waiting", 7, lambda r: _known(r["disk_wait_share"], "{:.1%}")),
    ("P99 ms", 8, lambda r: _known(r["token_ms_p99"], "{:.2f}")),
)


def bench_markdown(rows: Rows) -> Iterator[str]:
    last = None
    for row in rows:
        columns = BENCH_COLUMNS if row["disk"] is None else BENCH_COLUMNS + DISK_COLUMNS
        if last is None:
            yield _cells(f"{title:{_align(width)}}" for title, width, _ in columns)
            yield _cells("-" * (abs(w) - 1) + ("-" if w < 0 else ":") for _, w, _ in columns)
        yield _cells(f"{cell(row):{_align(width)}}" for _, width, cell in columns)
        last = row
    if last is not None:
        facts = [f"load {last['load_s']:.2f} s", f"peak {size(last['peak_rss_bytes'])}"]
        facts += [f"tokens: {last['tokens']}", last["sparsity"], last["isa"]]
        if last["disk"] is not None:
            facts += [f"{size(last['memory_bytes'])} in all, the rest on disk: {last['disk']}"]
            facts += [f"without {last['disabled']}"] if last["disabled"] else []
        yield f"\n{' · '.join(facts)}\nbuild: {last['build_commit']} ({last['build_number']})\n"


BENCH_FORMATS = {"md": bench_markdown, "csv": bench_csv, "json": bench_json, "jsonl": bench_jsonl}


def replay_text(rows: Sequence[dict[str, Any]]) -> str:
    """`bench --replay` for a person: what each policy makes of each size of the cache."""
    first = rows[0]
    titles = ["budget", "in memory", "pinned", "policy", "hits", "unpinned", "MB/token"]
    lines = [[*titles, "tok/s", "mean ms", "P99 ms", "waiting"]]
    for r in rows:
        budget = "" if r["budget_gib"] is None else f"{r['budget_gib']:g} GiB"
        shares = [f"{r[key]:.1%}" for key in ("places", "pinned")]
        hits = [f"{r['hit_rate']:.1%}", f"{r['hit_rate_unpinned']:.1%}"]
        speed = [f"{r['disk_bytes_per_token'] / 1e6:.3g}", f"{r['tokens_per_s']:.2f}"]
        speed += [f"{r['mean_ms']:.1f}", f"{r['p99_ms']:.1f}", f"{r['waiting_share']:.0%}"]
        lines.append([budget, *shares, r["policy"], *hits, *speed])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = "".join(_cells(f"{c:>{w}}" for c, w in zip(line, widths, strict=True)) for line in lines[:1])
    text += _cells("-" * (w - 1) + ":" for w in widths)
    text += "".join(_cells(f"{c:>{w}}" for c, w in zip(line, widths, strict=True)) for line in lines[1:])
    facts = [f"{first['tokens']} tokens of {first['source']}", f"batch {first['batch']}"]
    facts += [f"{first['active_fraction']:.1%} of neurons needed", f"times predicted for {first['hardware']}"]
    return f"{text}\n{' · '.join(facts)}\n"


def _cells(cells: Iterable[str]) -> str:
    return "|" + "".join(f" {cell} |" for cell in cells) + "\n"


def _align(width: int) -> str:
    return f"<{-width}" if width < 0 else f">{width}"


def _known(value: float | None, format: str, scale: float = 1.0) -> str:
    return "" if value is None else format.format(value * scale)


def _binary(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:.2f} GiB"


def _decimal(count: int) -> str:
    return f"{count / 1e6:.2f} M" if count < 1e9 else f"{count / 1e9:.2f} B"


# ---- eval


def evaluation_rows(f: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("model", f"{f['model']} ({f['format']}, {f['sparsity']})"),
        ("text", f"{f['text']}, {f['windows']} windows of {f['context']}, {f['tokens']:,} tokens scored"),
        ("perplexity", _estimate(f["perplexity"])),
    ]
    if f["active_fraction"] is not None:
        guessed = f["predicted_fraction"]
        more = "" if guessed is None else f"; {_percent(guessed)} predicted and their gates computed"
        rows.append(("active", f"{_percent(f['active_fraction'])} of neurons{more}"))
    several = "s" * (f["threads"] > 1)
    rows.append(("speed", f"{f['tokens_per_s']:.0f} tok/s, {f['isa']}, {f['threads']} thread{several}"))
    if "against" not in f:
        return rows
    a = f["against"]
    return [
        *rows,
        ("", ""),
        ("against", f"{a['model']} ({a['sparsity']})"),
        ("its perplexity", _estimate(a["perplexity"])),
        ("change", _estimate({"value": a["ratio"]["value"] - 1, "error": a["ratio"]["error"]}, percent=True)),
        ("mean KLD", f"{_estimate(a['kld'], digits=6)} (99 %: {a['kld_p99']:.6f}, most: {a['kld_max']:.6f})"),
        ("same top token", _estimate(a["same_top"], percent=True)),
        (
            "mean Δp",
            f"{_estimate(a['delta_p'], percent=True)} (RMS: {_estimate(a['delta_p_rms'], percent=True)})",
        ),
    ]


def _estimate(e: dict[str, float], digits: int = 4, *, percent: bool = False) -> str:
    if percent:
        return f"{100 * e['value']:.3f} ± {100 * e['error']:.3f} %"
    return f"{e['value']:.{digits}f} ± {e['error']:.{digits}f}"


# ---- inspect, doctor


def pack_rows(about: dict[str, Any]) -> list[tuple[str, str]]:
    source = about["source"]
    rows = [
        ("pack", f"{about['path']} (version {about['version']})"),
        ("source", f"{source['name']} ({source['kind']}, {source['hash']})"),
        ("weights", f"{about['weight_format']}, {about['parameters'] / 1e6:,.2f} M parameters"),
        ("size", size(sum(about["files"].values()))),
        ("per token", f"{about['bytes_per_token_dense'] / 1e6:,.2f} MB, dense"),
        ("", ""),
    ]
    parts = about["parts"].items()
    rows += [(name, f"{size(p['bytes']):>10}  {p['parameters']:>14,} parameters") for name, p in parts]
    rows.append(("", ""))
    if about["predictor"] is not None:
        ranks, threshold = about["predictor"]["ranks"], about["predictor"]["threshold"]
        rows.append(("predictor", f"ranks {min(ranks)} to {max(ranks)}, threshold {threshold:g}"))
    if sidecars := [*_profile_rows(about.get("profile")), *_predictor_rows(about.get("predictors"))]:
        rows += [*sidecars, ("", "")]
    rows += [(name, _plain(value)) for name, value in about["spec"].items()]
    return rows


def _profile_rows(p: dict[str, Any] | None) -> list[tuple[str, str]]:
    if p is None:
        return []
    hot = f"{p['hot_share']:.1%} of the neurons make 80 % of the activations"
    rows = [("profile", f"{p['tokens']:,} tokens, {p['active_fraction']:.2%} active for one; {hot}")]
    rows.append(("corpus", p["corpus"]))
    if p["samples"]:
        rows.append(("samples", f"{p['samples']:,} tokens, {size(p['samples_bytes'])}"))
    return rows


def _predictor_rows(p: dict[str, Any] | None) -> list[tuple[str, str]]:
    if p is None:
        return []
    layers = ", ".join(f"{kind} in {n} layers" for kind, n in p["layers_by_kind"].items())
    return [("trained", f"{size(p['bytes'])} of predictors: {layers}"), *(_fidelity(p) if "kld" in p else [])]


# ---- train


def _fidelity(r: dict[str, Any]) -> list[tuple[str, str]]:
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
    """A line for each text, the furthest from exact first."""
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


def train_rows(r: dict[str, Any]) -> list[tuple[str, str]]:
    """Of the whole model."""
    samples = f"{r['samples']:,}, seed {r['seed']}, {r['seconds']:.0f} s, {r['tried']} trials"
    where = r["path"] if r["written"] else "nothing written"
    return [("pack", where), ("samples", samples), *_fidelity(r), ("", "")]


def train_layers(layers: Sequence[dict[str, Any]], fit_s: Sequence[float]) -> str:
    rows = [
        ("layer", "kind", "rank", "hot", "active", "predicted", "recall", "missed mass", "bytes", "fit s")
    ]
    for i, (x, seconds) in enumerate(zip(layers, fit_s, strict=True)):
        shares = (f"{x[k]:.2%}" for k in ("active", "predicted", "recall", "missed_mass"))
        bytes_ = f"{x['bytes'] / x['bytes_exact']:.0%} of gate"
        rows.append((str(i), x["kind"], str(x["rank"]), str(x["hot"]), *shares, bytes_, f"{seconds:.1f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{x:>{w}}" for x, w in zip(row, widths, strict=True)) for row in rows)
    return "".join(f"{line}\n" for line in lines)


def gguf_rows(about: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        (about["kind"], f"{about['path']} ({about['parts']} file{'s' * (about['parts'] > 1)})"),
        *((k, _plain(about[k])) for k in ("name", "architecture", "tokenizer")),
        ("size", f"{size(about['file_bytes'])}, {about['parameters'] / 1e6:,.2f} M parameters"),
        ("predictors", f"{about['predictors']} layers, threshold {_plain(about['sparse_threshold'])}"),
        ("", ""),
    ]
    types = about["types"].items()
    return rows + [(name, f"{size(t['bytes']):>10}  {t['parameters']:>14,} parameters") for name, t in types]


def _plain(value: Any) -> str:
    match value:
        case None | () | []:
            return "none"
        case list() | tuple():
            return ", ".join(map(str, value))
        case dict():
            return ", ".join(f"{k} {v}" for k, v in value.items())
    return str(value)


def hardware_rows(h: Hardware) -> list[tuple[str, str]]:
    c, m, d, g = h.cores, h.memory, h.disk, h.gpu
    quota = "" if c.quota is None else f", quota {c.quota:g}"
    rows = [
        ("cpu", c.name or "unknown"),
        ("cores", f"{c.usable_physical} usable of {c.physical or 'unknown'} ({c.logical} logical{quota})"),
        ("threads", f"{m.threads}"),
    ]
    if h.isa is not None:
        rows.append(("kernels", f"{h.isa.chosen} (possible: {', '.join(h.isa.levels)})"))
        rows.append(("cpu features", " ".join(name for name, has in h.isa.features.items() if has)))
    rows.append(("memory", f"{size(m.available_bytes)} free of {size(m.total_bytes)}"))
    rows.append(("last-level cache", size(m.cache_bytes)))
    several = f", {gbs(m.read_gbs)} with {m.threads}" if m.threads > 1 else ""
    rows.append(("memory read", f"{gbs(m.read_gbs_1_thread)} with 1 thread{several}"))
    rows.append(("disk", f"{d.path} ({size(d.free_bytes)} free)"))
    if d.sequential_gbs is not None:
        rows.append(("disk read", f"{gbs(d.sequential_gbs)}, {d.random_iops:,.0f} random 4 KiB reads/s"))
    if d.why:
        rows.append(("disk note", d.why))
    boards = [f"{name}, {size(nbytes)}" for name, nbytes in zip(g.names, g.memory_bytes, strict=True)]
    unused = f" (not used: {g.why})" if g.why else ""
    rows.append(("gpu", f"{'; '.join(boards)}{unused}" if g.found else f"none: {g.why}"))
    return rows


def gbs(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f} GB/s"


# ---- profile


def profile_rows(about: dict[str, Any]) -> list[tuple[str, str]]:
    layers, hot = about["active_per_layer"], about["hot_share_per_layer"]
    batches = ", ".join(f"of {b} {share:.1%}" for b, share in about["needed_by_batch"].items() if b != "1")
    speed = about["tokens_per_s"]
    spread = f"{min(hot):.1%} to {max(hot):.1%} of a layer's"
    rows = [
        ("tokens", f"{about['tokens']:,}" + (f", {speed:,.0f} a second" if speed else "")),
        ("active", f"{about['active_fraction']:.2%} of neurons for a token"),
        ("needed", f"by a batch {batches}"),
        (
            "hot",
            f"{about['hot_share']:.1%} of neurons make 80% of activations ({spread})",
        ),
        *(
            (f"{which} layer", f"{about[f'{which}_layer']}, {layers[about[f'{which}_layer']]:.2%} active")
            for which in ("hottest", "coldest")
        ),
        ("never active", f"{about['never_active']:,} of {about['neurons']:,} neurons"),
        ("samples", f"{about['samples']:,}, {size(about['samples_bytes'])}"),
        ("pack", f"{about['path']}, in order of hotness"),
    ]
    return rows
