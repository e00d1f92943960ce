"""Several models in one server, for `bench/server/serve.py`: what a switch takes beside a plain load."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import serve_clients as clients
from serve_clients import Serving, ask

from thermocline.llm import opened_model
from thermocline.server.api.models.registry import OPENING_BYTES
from thermocline.session.options import EngineOptions, ModelOptions
from thermocline.session.session import memory_needed

Found = dict[str, Any]
TEXT = "/v1/completions"
CONTEXT = 512


def switches(model: str, runs: int, flags: list[str]) -> Found:
    """Three names of one model: with memory for all, then for one, `runs` switches.

    `first_s`: from the request to its answer of one token, with nothing to unload. `switch_s`: the same,
    where the other model has to be unloaded. `kept_s`: where the model is loaded. Files are in the system's
    cache.
    """
    found = opened_model(ModelOptions(model=model), lambda *_: None)
    needed = memory_needed(found, EngineOptions(ram=1000.0, context=CONTEXT), 0)
    with tempfile.TemporaryDirectory() as folder:
        for name in "abc":
            (Path(folder) / name).symlink_to(Path(model).absolute(), target_is_directory=True)
        first: list[float] = []
        kept: list[float] = []
        switch: list[float] = []
        most = 0
        for _ in range(max(1, runs // 2)):  # by turns, each server with new processes
            with _serving(folder, 3 * needed, flags) as served:
                _seconds(served.port, "a")  # the first request of a server has more to do
                first += [_seconds(served.port, name) for name in "bc"]
                kept += [_seconds(served.port, name) for name in "bc"]
            with _serving(folder, needed, flags) as served:
                _seconds(served.port, "a")
                times, private = _watched(served, "bc")
                switch, most = switch + times, max(most, private)
    median = statistics.median
    return {
        "needed_gib": round(needed / 2**30, 3), "runs": len(switch), "first_s": round(median(first), 3),
        "switch_s": round(median(switch), 3), "kept_s": round(median(kept), 4),
        "first_all_s": [round(s, 2) for s in first], "switch_all_s": [round(s, 2) for s in switch],
        "switch_over_first": round(median(switch) / median(first), 3),
        "private_gib_at_most": round(most / 2**30, 3),
        "budget_gib": round((needed + OPENING_BYTES) / 2**30, 3),
    }  # fmt: skip


def _serving(folder: str, nbytes: int, flags: list[str]) -> Serving:
    ram = (nbytes + OPENING_BYTES + (1 << 20)) / 2**30
    asked = ["--models-dir", folder, "--ram", f"{ram:.6f}", "--ctx-size", str(CONTEXT), *flags]
    return Serving(*asked, template=None)


def _seconds(port: int, name: str) -> float:
    body = {"model": name, "prompt": "Once upon a time", "max_tokens": 1, "temperature": 0}
    began = time.monotonic()
    asyncio.run(ask(port, TEXT, body))
    return time.monotonic() - began


def _watched(served: Serving, names: str) -> tuple[list[float], int]:
    """-> (seconds of a request to each, the most private memory of all engines together meanwhile)."""

    async def watched() -> tuple[list[float], int]:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, sum(map(_private_bytes, clients.engines(served.popen.pid))))
                await asyncio.sleep(0.02)

        watching = asyncio.create_task(watch())
        times = [await asyncio.to_thread(_seconds, served.port, name) for name in names]
        watching.cancel()
        return times, most

    return asyncio.run(watched())


def _private_bytes(pid: int) -> int:
    """-> the memory that would be free without this process."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))
