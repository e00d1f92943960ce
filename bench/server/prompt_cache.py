"""The time to the first token of a prompt whose prefix is on disk, against that of computing it.

    thermocline synth tinyllama-1.1b --format q4_0 -o DIR
    python bench/server/prompt_cache.py DIR [--tokens 20000] [--new 32] [--directory DIR] [--json]

A prompt of so many tokens is not computed first, which would take minutes: its blocks are named over random
bytes, and the cache writes them as it writes computed ones. Restoring copies bytes, whatever they are.

Computing is measured at three depths, on blocks that are in memory, and summed between: the time of a token
is linear in its depth. Files are read once after their pages were dropped from the system's cache, and once
from it. A window is left out, so that all layers keep all positions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from thermocline.engine.engine import Engine
from thermocline.engine.kv_cache import BLOCK
from thermocline.engine.sampler import SamplingParams
from thermocline.machine import hardware
from thermocline.model.spec import RopeScaling
from thermocline.pack.pack import Pack
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def opened(pack: Pack, options: EngineOptions) -> tuple[Session, Engine]:
    session = Session.open(pack, options)
    return session, session.load()


def first_token(e: Engine, ids: list[int]) -> tuple[float, int]:
    """Answer a prompt with one token; -> seconds, tokens that were found."""
    begin, request = time.perf_counter(), e.submit(ids, ONE)
    while e.step():
        pass
    return time.perf_counter() - begin, request.cached


def fill(e: Engine, ids: list[int]) -> None:
    """Name a text's blocks, and the state after it, over random bytes: computed by nobody."""
    table = e.kv.open([])
    assert e.kv.grow(table, len(ids)), "the context holds them"
    table_blocks = e.kv.tables([table], [len(ids)])
    e.kv.state_slots([table])
    seed = np.random.default_rng(0).integers(0, 255, 1 << 20, np.uint8).tobytes()
    for window, blocks in zip(e.kv.windows, table_blocks, strict=True):
        for layer in e.kv.layers_of(window):
            for pages in layer.shape.places(blocks[0]):
                for array in (layer.k, layer.v):
                    flat = array.reshape(len(array), -1).view(np.uint8)
                    one = np.frombuffer(seed[: flat.shape[1]], np.uint8) & 0x3B  # finite, small halves
                    flat[pages] = one
    e.kv.seal(table, ids, len(ids), len(ids) + 1)
    e.kv.close(table)


def drop(directory: Path) -> None:
    """Write files back, and drop their pages from the system's cache."""
    for path in directory.glob("*/*"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def computing(e: Engine, ids: list[int], chunk: int) -> dict[str, float]:
    """Return tokens/s of prompts at the beginning, in the middle and at the end, and seconds of all of it."""
    found, n = {}, len(ids)
    for name, depth in (
        ("start", 0),
        ("middle", n // 2 // BLOCK * BLOCK),
        ("end", (n - chunk) // BLOCK * BLOCK),
    ):
        other = [*ids[:depth], *(1 + (x + 1) % 1000 for x in ids[depth : depth + chunk])]
        seconds, cached = first_token(e, other)
        assert cached == depth, (cached, depth)
        found[name] = chunk / seconds
    each = {name: 1 / speed for name, speed in found.items()}
    total = n * (each["start"] + 4 * each["middle"] + each["end"]) / 6  # Simpson's rule: exact for a line
    return {**{f"{name}_tokens_per_s": speed for name, speed in found.items()}, "computed_s": total}


def measure(pack: Pack, options: EngineOptions, tokens: int, new: int, chunk: int) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    ids = rng.integers(3, min(pack.spec.vocab_size, 30000), tokens // BLOCK * BLOCK).tolist()
    directory = Path(str(options.prompt_cache_dir))
    session, e = opened(pack, options)
    begin = time.perf_counter()
    fill(e, ids)
    found = computing(e, ids, chunk)
    second_turn, there = first_token(e, [*ids, *range(5, 5 + new)])
    session.close()
    del session, e  # its memory is for the next one
    nbytes = sum(p.stat().st_size for p in directory.glob("*/*"))
    out: dict[str, Any] = {
        "tokens": len(ids), "new_tokens": new, "bytes": nbytes, **found, "in_memory_s": second_turn,
        "in_memory_cached": there, "filled_and_written_s": time.perf_counter() - begin,
    }  # fmt: skip
    for name in ("cold", "warm"):
        if name == "cold":
            drop(directory)
        session, e = opened(pack, options)
        seconds, cached = first_token(e, [*ids, *range(5, 5 + new)])
        counts = e.counts().disk
        assert cached == len(ids) and counts is not None and counts.damaged == 0, cached
        out |= {f"{name}_s": seconds, f"{name}_gb_per_s": counts.read_bytes / seconds / 1e9}
        out[f"{name}_times_faster"] = found["computed_s"] / seconds
        session.close()
        del session, e
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pack", type=Path)
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: a temporary one")
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    pack, context = Pack.open(o.pack), o.tokens + 1024
    pack = dataclasses.replace(pack, spec=dataclasses.replace(pack.spec, sliding_window=None))
    if context > pack.spec.max_context:  # what is measured is work and bytes, not the text
        scaling = RopeScaling(kind="linear", factor=context / pack.spec.max_context, original_context=2048)
        spec = dataclasses.replace(pack.spec, max_context=context, rope_scaling=scaling)
        pack = dataclasses.replace(pack, spec=spec)
    with tempfile.TemporaryDirectory(dir=o.directory) as directory:
        options = EngineOptions(
            context=context, max_batch=1, threads=o.threads, prompt_cache_dir=directory, prompt_cache_disk=64
        )
        found = {
            "model": o.pack.name,
            "isa": hardware_name(),
            **measure(pack, options, o.tokens, o.new, o.chunk),
        }
    if o.json:
        print(json.dumps(found))
    else:
        for key, value in found.items():
            print(f"{key:<24}{value:.3f}" if isinstance(value, float) else f"{key:<24}{value}")


def hardware_name() -> str:
    from thermocline import _native

    return f"{_native.isa()}, {hardware.default_threads()} threads"


if __name__ == "__main__":
    main()
