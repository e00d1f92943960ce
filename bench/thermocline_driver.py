"""Thermocline, loaded once and asked for one test per line of stdin: llama_driver.cpp's twin.

    python bench/thermocline_driver.py PACK TOKENS.i32 TEST...       TEST is THREADS,DEPTH,PROMPT,GEN

The tests are those of `thermocline bench`: what a user's run does, sampling included (llama.cpp's have none).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from thermocline import hardware
from thermocline.bench import Bench, Feed, Script, Test
from thermocline.pack import Pack
from thermocline.sampler import SamplingParams


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
    return {"ns": sample.ns, "bytes_per_token": f.bytes_per_token, "rows_fraction": f.rows_fraction}


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
    pack = Pack.open(Path(sys.argv[1]))
    tokens = Feed("given", np.fromfile(sys.argv[2], np.int32).tolist())
    tests = [Test(*map(int, text.split(","))) for text in sys.argv[3:]]
    b = Bench(pack, tests, tokens, sparsity="exact", progress=lambda *_: None)
    print(json.dumps({"load_s": b.load_s, "system": hardware.isa().chosen}), flush=True)
    for line in sys.stdin:
        match line.split():
            case ["run", threads, _, depth, prompt, gen]:
                answer = run(b, Test(int(threads), int(depth), int(prompt), int(gen)))
            case ["logits", threads, _, prompt, gen, path]:
                answer = write_logits(b, int(threads), int(prompt), int(gen), path)
            case ["peak"]:
                answer = {"peak_rss_bytes": hardware.peak_rss_bytes()}
            case _:
                raise SystemExit(f"what is {line!r}")
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
