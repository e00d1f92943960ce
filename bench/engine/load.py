"""How long a model takes from its file to memory, and to the first token, beside what bounds that.

    python bench/engine/load.py -m MODEL [MODEL ...] [--rounds 5] [--pause 60] [--threads N] [--llama DRIVER]

A model is a pack or a GGUF. A round, for each: the disk alone (direct reads of the file into a few buffers);
then, with the file dropped from the page cache (cold) and in it (warm), a load in a process of its own, and
the time from the start of a process to its first token; then touching as much fresh memory with a thread for
each core. A load is bound by the slower of disk and memory: `/ bound` says how near it comes.

Memory that nobody has used for a while is what a virtual machine's host takes back, and finding it again is
slower than most disks (LOG 2026-11-21). `--pause` waits so many seconds before each measurement of memory, so
that all see the same; without it, figures are of memory that is there already.

`--llama`: the driver of bench/llamacpp/build_llamacpp.py. It loads the same GGUF with mmap, and its first
token follows the same prompt of 5 tokens.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from thermocline import _native
from thermocline.engine.request import request_for
from thermocline.engine.sampler import SamplingParams
from thermocline.llm import LLM
from thermocline.machine import disk_speed, hardware
from thermocline.opening.open_model import open_model
from thermocline.pack.stored_model import StoredModel
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session
from thermocline.session.weights import BegunLoad, new_ops
from thermocline.text.tokenizer import FILE

PROMPT = [1, 2, 3, 4, 5]
CONTEXT = 512
STEP = 2 << 20  # a huge page: touched by one thread


def opened(path: str) -> StoredModel:
    return open_model(path, "", None)


# ---- in a process of its own


def load(path: str) -> float:
    model = opened(path)
    start = time.perf_counter()
    BegunLoad.of(model, new_ops(hardware.default_threads())).read()
    return time.perf_counter() - start


def first_token(path: str, threads: int) -> float:
    """Return 0: whoever waits for this process measures. With a tokenizer, as `thermocline run` begins."""
    model, params = opened(path), SamplingParams(max_tokens=1, temperature=0)
    if model.small_files.has(FILE):
        with LLM(path, threads=threads, context=CONTEXT, lazy=True) as llm:
            engine, request = llm.engine, request_for(llm.spec, CONTEXT, None, PROMPT, params)
            _until_token(engine, engine.queue(request))
        return 0.0
    options = EngineOptions(threads=threads, context=CONTEXT, max_batch=1)
    with Session.open(model, options) as session:
        engine = session.load()
        _until_token(engine, engine.queue(request_for(model.spec, CONTEXT, None, PROMPT, params)))
    return 0.0


def _until_token(engine: object, request: object) -> None:
    while request.finish_reason is None and len(request.ids) == request.n_prompt:  # type: ignore[attr-defined]
        engine.step()  # type: ignore[attr-defined]
    os.write(1, b"0\n")
    os._exit(0)  # freeing the weights is not part of it


def touch(nbytes: int, threads: int) -> float:
    """Return the seconds of clearing fresh memory: a byte of each page is written."""
    arena = _native.Arena(nbytes)
    view = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(arena.address))
    parts = iter(range(0, nbytes, 64 * STEP))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                at = next(parts, None)
            if at is None:
                return
            view[at : at + 64 * STEP : 4096] = 1  # numpy lets other threads run meanwhile

    start = time.perf_counter()
    others = [threading.Thread(target=work) for _ in range(threads)]
    for t in others:
        t.start()
    for t in others:
        t.join()
    return time.perf_counter() - start


CHILDREN = {
    "load": lambda a: load(a[0]),
    "token": lambda a: first_token(a[0], int(a[1])),
    "touch": lambda a: touch(int(a[0]), int(a[1])),
}


def child(*argv: object) -> tuple[float, float]:
    """Return (what the process measured, the seconds from its start to its answer)."""
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, __file__, "--child", *map(str, argv)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
    return float(line), seconds


# ---- the measurements


def forget(path: Path) -> None:
    """Drop a file from the page cache, so that the next reader asks the disk."""
    with open(path, "rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill_cache(path: Path) -> None:
    with open(path, "rb", buffering=0) as f:
        buffer = bytearray(16 << 20)
        while f.readinto(buffer):
            pass


def llama_token(driver: str, path: str, threads: int, tokens: str) -> float:
    """Return the seconds from the start of the driver to its first token."""
    start = time.perf_counter()
    command = [driver, path, tokens, str(CONTEXT), "1", "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"run {threads} 1 0 {len(PROMPT)} 1\n")
        process.stdin.flush()
        process.stdout.readline()
        seconds = time.perf_counter() - start
        process.kill()
    return seconds


def measured(path: str, o: argparse.Namespace, tokens: str) -> dict[str, float]:
    model = opened(path)
    nbytes, file = model.weights_bytes, model.data_path
    disk = disk_speed.measure_file(file)
    if disk.sequential_gbs is None:
        raise SystemExit(f"{file}: {disk.why}")
    if disk.why:
        print(disk.why)
    out = {"disk": nbytes / disk.sequential_gbs / 1e9}

    def paused() -> None:
        time.sleep(o.pause)

    for state in ("cold", "warm"):
        for what in ("load", "token"):
            (forget if state == "cold" else fill_cache)(file)
            paused()
            own, whole = child(what, path, o.threads)
            out[f"{state} {what}"] = own if what == "load" else whole
        if o.llama and path.endswith(".gguf"):
            (forget if state == "cold" else fill_cache)(file)
            paused()
            out[f"{state} llama.cpp"] = llama_token(o.llama, path, o.threads, tokens)
    paused()
    out["clearing"] = child("touch", nbytes, os.cpu_count() or 1)[0]
    out["cold / bound"] = out["cold load"] / max(out["disk"], out["clearing"])
    out["warm / bound"] = out["warm load"] / out["clearing"]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", required=True, nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0)
    parser.add_argument("--threads", type=int, default=hardware.default_threads())
    parser.add_argument("--llama")
    o = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {path: [] for path in o.model}
    with tempfile.NamedTemporaryFile(suffix=".i32") as tokens:
        tokens.write(np.array(PROMPT * 4, np.int32).tobytes())
        tokens.flush()
        for _ in range(o.rounds):
            for path in o.model:
                found[path].append(measured(path, o, tokens.name))
                print(json.dumps({"model": path, **found[path][-1]}), flush=True)
    for path, rounds in found.items():
        print(
            f"{path}: {opened(path).weights_bytes / 1e9:.2f} GB of weights; medians (least to most), seconds"
        )
        for key in rounds[0]:
            values = sorted(r[key] for r in rounds)
            print(f"  {key:16} {statistics.median(values):7.2f} ({values[0]:.2f} to {values[-1]:.2f})")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(CHILDREN[sys.argv[2]](sys.argv[3:]), flush=True)
    else:
        main()
