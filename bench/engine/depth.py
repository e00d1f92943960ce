"""Memory and speed of long prompts on the bundled weights, with scaled rope and, if asked for, a window.

    python bench/engine/depth.py [--tokens 32768] [--window 1024]

The weights were trained for 512 positions: what is measured is work and bytes, not the text.
"""

from __future__ import annotations

import argparse
import dataclasses
import time

import numpy as np

from thermocline.engine.sampler import SamplingParams
from thermocline.llm import BUNDLED
from thermocline.machine import hardware
from thermocline.model.spec import RopeScaling
from thermocline.pack.pack import Pack
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session

GENERATED = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--window", type=int)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    pack = Pack.open(BUNDLED)
    scaling = RopeScaling(kind="yarn", factor=args.tokens / pack.spec.max_context, original_context=512)
    spec = dataclasses.replace(
        pack.spec, max_context=args.tokens, rope_scaling=scaling, sliding_window=args.window
    )
    options = EngineOptions(threads=args.threads, context=args.tokens, max_batch=1)
    engine = Session.open(dataclasses.replace(pack, spec=spec), options).load()
    rng = np.random.default_rng(0)
    print(f"cache {engine.kv.nbytes / 2**20:.1f} MiB reserved")
    depth = 1024
    while depth <= args.tokens:
        ids = rng.integers(3, spec.vocab_size, depth - GENERATED).tolist()
        begin = time.perf_counter()
        request = engine.submit(ids, SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True))
        while engine.step():
            pass
        figures = request.completion().figures
        seconds, peak = time.perf_counter() - begin, hardware.peak_rss_bytes() or 0
        print(f"{depth} tokens: {seconds:.1f} s, peak {peak / 2**20:.1f} MiB, ", end="")
        print(f"then {figures.tokens_per_s:.0f} tokens/s", flush=True)
        depth *= 2


if __name__ == "__main__":
    main()
