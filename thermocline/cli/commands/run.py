"""`thermocline run`: continue a prompt."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from thermocline.cli.console import INTERRUPTED, CtrlC, ProgressBar, emit, emit_json, stdin_bytes
from thermocline.cli.generation import (
    GenerationOptions,
    GrammarOptions,
    grammar_of,
    open_llm,
    params_for,
)
from thermocline.cli.shared_options import json_output
from thermocline.cli.table import percent
from thermocline.errors import BadFile, UsageError
from thermocline.options import BY_POSITION, nonempty, opt, switch, whole

if TYPE_CHECKING:
    from thermocline.engine.request import Completion
    from thermocline.engine.sampler import SamplingParams
    from thermocline.llm import LLM
    from thermocline.plan.planner import Plan

log = logging.getLogger(__name__)

MAX_PROMPT_BYTES = 64 << 20


@dataclass(frozen=True)
class RunOptions(GrammarOptions, GenerationOptions):
    """Generate text from a prompt."""

    prompt: str | None = opt(
        None, str, "TEXT", "Prompt", "Text to continue; `-` reads stdin. The flag may be left out.",
        flags="-p", given=BY_POSITION
    )  # fmt: skip
    file: str | None = opt(None, nonempty, "PATH", "Prompt", "Read the prompt from a file.", flags="-f")

    n_best: int = opt(
        1,
        whole(1, 64),
        "N",
        "Sampling",
        "Generate N answers with consecutive seeds and print the most likely one.",
    )
    logprobs: int | None = opt(
        None, whole(0, 100), "N", "Output", "With --json: log-probabilities of each token and its N rivals.",
        shown="none"
    )  # fmt: skip
    json: bool = json_output()
    display_prompt: bool = opt(True, switch, None, "Output", "Print the prompt before its continuation.")


def run(o: RunOptions) -> int:
    begin = time.perf_counter()
    prompt = read_prompt(o)
    grammar = grammar_of(o)
    with ProgressBar(quiet=o.quiet) as progress, open_llm(o, progress, max_batch=o.n_best) as llm:
        params = replace(params_for(llm, o, grammar), logprobs=o.logprobs)
        answers: list[Completion] = []
        if o.n_best > 1:
            answers = best_of(llm, prompt, params, o)
            done, first_token_s = answers[0], None
        else:
            done, first_token_s = generate(llm, prompt, params, o, begin)
        if o.json or not o.quiet:
            figures = figures_of(llm, done, first_token_s, o.model or "bundled")
            if answers:
                figures["answers"] = [answer_of(a) for a in answers]
                if o.logprobs is None:  # only asked for to compare the answers
                    del figures["logprobs"]
            if o.json:
                emit_json(figures)
            if not o.quiet:
                log.info(line_of(figures))
    return INTERRUPTED if done.finish_reason == "cancelled" else 0


def read_prompt(o: RunOptions) -> str:
    if o.prompt is not None and o.file is not None:
        raise UsageError("both a prompt and --file are given; choose one")
    if o.file is not None:
        with open(o.file, "rb") as f:
            return _decoded(f.read(MAX_PROMPT_BYTES + 1), o.file)
    if o.prompt == "-":
        return _decoded(stdin_bytes().read(MAX_PROMPT_BYTES + 1), "stdin")
    if o.prompt is None:
        raise UsageError('no prompt; try `thermocline run "Once upon a time"`, -f FILE, or -p - for stdin')
    return o.prompt


def _decoded(data: bytes, name: str) -> str:
    if len(data) > MAX_PROMPT_BYTES:
        raise UsageError(f"{name}: a prompt of more than {MAX_PROMPT_BYTES >> 20} MiB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise BadFile(f"{name}: not UTF-8 text: byte {e.start} is 0x{data[e.start]:02x}") from None


def generate(
    llm: LLM, prompt: str, params: SamplingParams, o: RunOptions, begin: float
) -> tuple[Completion, float | None]:
    """Stream the answer to stdout. Return it, and the seconds from `begin` to its first token."""
    first_token_s = None
    with CtrlC() as ctrl_c, llm.stream(prompt, params) as stream:
        ctrl_c.computing = lambda: stream.computing
        try:
            for chunk in stream:
                if first_token_s is None:
                    first_token_s = time.perf_counter() - begin
                    ctrl_c.patient = True
                    if o.display_prompt and not o.json:
                        emit(prompt)
                if chunk.text and not o.json:
                    emit(chunk.text)
                if ctrl_c.asked:
                    break
        except KeyboardInterrupt:
            pass  # closing the stream makes the answer "cancelled"
        stream.close()
        if not o.json:
            emit("\n")
        return stream.completion, first_token_s


def best_of(llm: LLM, prompt: str, params: SamplingParams, o: RunOptions) -> list[Completion]:
    """Return the answers, the likeliest first, which is printed."""
    with CtrlC():
        answers = llm.best_of(o.n_best, prompt, params)
    if not o.json:
        emit((prompt if o.display_prompt else "") + answers[0].text + "\n")
    return answers


# ---- the figures


def answer_of(a: Completion) -> dict[str, Any]:
    """Return the keys of one answer of several."""
    return {"text": a.text, "seed": a.seed, "finish_reason": a.finish_reason, "mean_logprob": a.mean_logprob}


def figures_of(llm: LLM, done: Completion, first_token_s: float | None, model: str) -> dict[str, Any]:
    """Return the keys of `run --json`, which are a contract (docs/reference/keys.toml)."""
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
        "in_place": llm.in_place,
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
        "cache_type_k": llm.session.options.cache_type_k,
        "cache_type_v": llm.session.options.cache_type_v,
        "load_s": llm.load_s,
        "first_token_s": first_token_s,
        "peak_rss_bytes": hardware.peak_rss_bytes(),
        "huge_page_bytes": hardware.huge_page_bytes(),
        "logits_hash": f.logits_hash,
        "token_ms_p99": f.token_ms_p99,
        "memory_bytes": llm.memory_bytes,
        "disk": None if llm.session.store is None else llm.session.store.how,
        "read_budget_mb": llm.session.options.read_budget,
        "placement": llm.session.placement.json(),
        "gpu": None if llm.session.plan is None else gpu_figures(llm.session.plan),
        **disk_figures(f, llm.threads),
    }
    if done.logprobs is not None:
        pairs = zip(done.token_ids, done.logprobs, strict=True)
        figures["logprobs"] = [{"token_id": t, "logprob": p.logprob, "top": p.top} for t, p in pairs]
    return figures


def gpu_figures(plan: Plan) -> dict[str, Any]:
    """Return a GPU's part of the model, and the speed that was predicted with it."""
    return {
        "vram_bytes": plan.used("gpu"),
        "ram_bytes": plan.used("ram"),
        "attention_layers": sum(x.attention == "gpu" for x in plan.layers),
        "neurons": [x.gpu for x in plan.layers],
        "share": plan.share,
        "predicted_tokens_per_s": plan.tokens_per_s,
    }


def line_of(f: dict[str, Any]) -> str:
    """Return the figures for a person, on one line, without those that are not known."""
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
        guessed = f"{percent(f['predicted_fraction'])} predicted, " if f["sparsity"] == "predict" else ""
        parts.append(f"{guessed}{percent(f['active_fraction'])} of neurons active")
    if f["disk_bytes_per_token"] is not None:
        parts += _disk_words(f)
    parts += [f["sparsity"], f["isa"], f"{f['threads']} thread{'s' * (f['threads'] > 1)}"]
    return " · ".join(parts)


def _roof_words(f: dict[str, Any]) -> str:
    if f["from_cache"]:
        return " from cache"
    return f" ({percent(f['roof_share'])} of {f['roof_gb_per_s']:.3g} measured)" if f["roof_share"] else ""


def _disk_words(f: dict[str, Any]) -> list[str]:
    hits = "nothing asked for" if f["cache_hit_rate"] is None else f"{f['cache_hit_rate']:.1%} in memory"
    speed = f"disk {f['disk_bytes_per_token'] / 1e6:.3g} MB/token, {f['disk_gb_per_s']:.2g} GB/s"
    mean, p99 = 1e3 / f["tokens_per_s"], f["token_ms_p99"]
    words = [hits, speed, f"waiting {f['disk_wait_share']:.0%}", f"{mean:.3g} ms a token, P99 {p99:.3g}"]
    if f["read_budget_mb"] is not None:
        words.append(f"{f['disk_left_out_per_token']:.3g} experts a token left out")
    return words
