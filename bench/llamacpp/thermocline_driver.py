"""Thermocline, loaded once and asked for one test per line of stdin: llama_driver.cpp's twin.

    python bench/llamacpp/thermocline_driver.py MODEL TOKENS.i32 TEST...      TEST is THREADS,DEPTH,PROMPT,GEN

MODEL is a GGUF file or a pack. The tests are those of `thermocline bench`: what a user's run does, sampling
included (llama.cpp's have none).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from thermocline.engine.decoder import bind
from thermocline.engine.sampler import SamplingParams
from thermocline.machine import hardware
from thermocline.offline.bench import Bench, Feed, Script, Test
from thermocline.opening.open_model import open_model
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import Predictors, open_predictors
from thermocline.pack.stored_model import StoredModel
from thermocline.session.options import EngineOptions
from thermocline.session.weights import with_predictors


def opened(path: Path) -> StoredModel:
    """What `thermocline run -m` opens: a GGUF in place, a pack."""
    return open_model(path, Path(tempfile.gettempdir()) / "thermocline-bench", None)


def predictors_of(model: StoredModel) -> Predictors | None:
    return open_predictors(model) if isinstance(model, Pack) else None


class Recorder(Script):
    """Keeps the logits it was given."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rows: list[np.ndarray[Any, Any]] = []

    def sample(self, logits: np.ndarray[Any, Any]) -> int:
        self.rows.append(logits.copy())
        return super().sample(logits)


def run(b: Bench, test: Test) -> dict[str, Any]:
    sample = b.sample(test)
    f = sample.figures
    fractions = {
        name: getattr(f, name) for name in ("rows_fraction", "predicted_fraction", "active_fraction")
    }
    return {"ns": sample.ns, "bytes_per_token": f.bytes_per_token, **fractions}


def models_of(b: Bench) -> dict[str, Any]:
    """What computes each mode. `asked`: predictors that say yes to every neuron."""
    model = b.engine.model
    modes = dict.fromkeys(("off", "exact", "predict"), model)
    found = predictors_of(b.pack)
    if found is None:
        return modes
    layers = [found.layer(i) for i in range(found.count)]
    none = np.full(b.pack.spec.ffn_dim, -np.inf, np.float32)
    yes = Predictors.of(b.pack.spec, [p and replace(p, threshold=none) for p in layers])
    return modes | {"asked": bind(model.spec, with_predictors(model.weights, yes), b.engine.ops)}


def first_token(b: Bench, threads: int, prompt: int) -> dict[str, Any]:
    """The likeliest token after the prompt."""
    begin = time.perf_counter_ns()
    b.engine.ops = b.ops[threads]
    request = b.engine.submit(b.feed.ids[:prompt], SamplingParams(max_tokens=1, temperature=0))
    while request.finish_reason is None:
        b.engine.step()
    return {"ns": time.perf_counter_ns() - begin, "token": request.ids[prompt]}


def write_logits(b: Bench, threads: int, prompt: int, gen: int, path: str) -> dict[str, Any]:
    """After the prompt, and after each of the `gen` tokens that follow it."""
    ids, spec = b.feed.ids, b.pack.spec
    b.engine.ops = b.ops[threads]
    request = b.engine.submit(ids[:prompt], SamplingParams(max_tokens=gen + 1, temperature=0))
    request.sampler = recorder = Recorder(spec, ids[prompt : prompt + gen + 1])
    while request.finish_reason is None:
        b.engine.step()
    np.concatenate(recorder.rows).tofile(path)
    return {"rows": len(recorder.rows)}


def main() -> None:
    begin = time.perf_counter()
    pack = opened(Path(sys.argv[1]))
    tokens = Feed("given", np.fromfile(sys.argv[2], np.int32).tolist())
    tests = [Test(*map(int, text.split(","))) for text in sys.argv[3:]]
    sparsity = "exact" if predictors_of(pack) is None else "predict"
    b = Bench(pack, tests, tokens, EngineOptions(sparsity=sparsity), lambda *_: None)
    models = models_of(b)
    print(json.dumps({"load_s": time.perf_counter() - begin, "system": hardware.isa().chosen}), flush=True)
    for line in sys.stdin:
        match line.split():
            case ["run", threads, _, depth, prompt, gen, *mode]:
                name = mode[0] if mode else "exact"
                b.engine.model, b.engine.sparsity = models[name], "predict" if name == "asked" else name
                answer = run(b, Test(int(threads), int(depth), int(prompt), int(gen)))
            case ["first", threads, _, prompt]:
                answer = first_token(b, int(threads), int(prompt))
            case ["logits", threads, _, prompt, gen, path]:
                answer = write_logits(b, int(threads), int(prompt), int(gen), path)
            case ["peak"]:
                answer = {"peak_rss_bytes": hardware.peak_rss_bytes()}
            case _:
                raise SystemExit(f"what is {line!r}")
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
