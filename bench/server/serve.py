"""`thermocline serve` measured: answers under load, clients that leave, what HTTP costs, how it stops.

    python bench/server/serve.py crowd|leave|mixed|bodies|tax|batch|thread|long|models|stop|schema [-m MODEL]

`crowd`: streaming, idle and hostile clients, then more than there is room for. `leave`: disconnects at random
moments. `mixed`: random requests, each compared with the same one alone. `bodies`: the costliest bodies of
each route, how long others wait meanwhile and what memory they take. `tax`: tokens/s through the server
over those of `LLM.stream`, by turns. `batch`: four streams over one. `thread`: the engine's process
over the engine in a thread of the other one, by turns. `long`: what a prompt as long as the
context does to four streams. `models`: two models in a budget for one, what a switch takes over a load
where there is room. `stop`: SIGTERM. `schema`: schemathesis, which has to be installed.
Every one ends with 1 where its target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import serve_clients as clients
from serve_bodies import bodies
from serve_clients import Call, Serving
from serve_figures import (
    ENDLESS,
    TEXT,
    Found,
    batch,
    crowd,
    leave,
    long,
    mixed,
    overload,
    percentile,
    processes,
    tax,
)
from serve_models import switches

from thermocline import LLM
from thermocline.llm import BUNDLED

# ---- stop


def stop(runs: int, *flags: str) -> Found:
    """By turns idle and busy with 12 long answers, which may take 0.5 s more, or as long as they need."""
    rows = [_stopped(grace_s, flags) for i in range(runs) for grace_s in (None, (0.5, 30.0)[i % 2])]
    idle = [r["seconds"] for r in rows if r["grace_s"] is None]
    busy = [r for r in rows if r["grace_s"] is not None]
    late = [r["seconds"] for r in busy if r["seconds"] > r["grace_s"] + 1]
    return {"runs": len(rows), "idle_max_s": max(idle), "busy_max_s": max(r["seconds"] for r in busy),
            "beyond_grace": len(late), "left_behind": [r["left"] for r in rows if r["left"]],
            "exit_codes": sorted({r["code"] for r in rows}),
            "finished": sum(r["finished"] for r in busy), "told": sum(r["told"] for r in busy),
            "unheard": sum(r["unheard"] for r in busy)}  # fmt: skip


def _stopped(grace_s: float | None, flags: tuple[str, ...]) -> Found:
    shared = set(os.listdir("/dev/shm"))
    grace = () if grace_s is None else ("--limit-grace-s", str(grace_s))
    with Serving(*flags, *grace) as served:
        family = clients.descendants(served.popen.pid)
        asked = [] if grace_s is None else [ENDLESS | {"stream": bool(i % 2)} for i in range(12)]

        async def run() -> tuple[list[str], float]:
            ends = asyncio.gather(*(_ending(served.port, a) for a in asked))
            await asyncio.sleep(0.3)
            seconds = await asyncio.to_thread(served.stop)
            return await ends, seconds

        ends, seconds = asyncio.run(run())
        files = [p.name for p in (Path(served.folder.name) / "tmp").iterdir()]
        files += sorted(set(os.listdir("/dev/shm")) - shared)
        left = [*filter(_outlives, family), *files, *(["port"] if clients.health(served.port) else [])]
        return {"grace_s": grace_s, "seconds": seconds, "code": served.popen.returncode, "left": left,
                **{how: ends.count(how) for how in ("finished", "told", "unheard")}}  # fmt: skip


async def _ending(port: int, asked: Found) -> str:
    """What a client of a server that stops hears: its answer, an error, or nothing of the kind."""
    try:
        async with Call(port, TEXT, asked) as call:
            body = await call.body()
            if body.endswith(b"data: [DONE]\n\n") or (call.status == 200 and not asked["stream"]):
                return "finished"
            last = body.strip().split(b"\n\n")[-1].removeprefix(b"data: ")
            return "told" if "error" in json.loads(last) else "unheard"
    except (OSError, asyncio.IncompleteReadError, ValueError):
        return "unheard"


def _outlives(pid: int) -> bool:
    """A moment later: Python's tracker of resources ends when its pipe does. "Z": only its name is left."""
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.01)
    return True


# ---- schema

# A list beyond its limit may make a body beyond its own.
_SETTINGS = """[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 406, 408, 409, 413, 415, 422, 428, 429]
"""


def schema(port: int, program: str, examples: int, seconds: int, paths: str) -> Found:
    """schemathesis: right and wrong data, NUL bytes too, against /openapi.json. -> cases by status.

    `paths`: a regular expression of the routes that are tried.

    Its check that whatever a schema allows is taken is our own (`serve_hooks.py`), which has exceptions: no
    schema says what a grammar is, or a prompt that fits the context.
    """
    where = os.path.abspath(shutil.which(program) or program)
    command = [where, "run", f"http://{clients.HOST}:{port}/openapi.json", "-m", "all", "-n", str(examples),
               "--generation-allow-x00", "true", "--generation-database", "none", "--seed", "1",
               "--exclude-checks", "positive_data_acceptance", "--output-sanitize", "false",
               "--max-time", str(seconds), "--include-path-regex", paths]  # fmt: skip
    hooks = {"SCHEMATHESIS_HOOKS": "serve_hooks", "PYTHONPATH": str(Path(__file__).resolve().parent)}
    with tempfile.TemporaryDirectory() as folder:  # it keeps notes of what failed where it runs
        report = Path(folder) / "report.ndjson"
        (Path(folder) / "schemathesis.toml").write_text(_SETTINGS)
        done = subprocess.run(
            [*command, "--report-ndjson-path", str(report)],
            check=False,
            env={**os.environ, **hooks},
            cwd=folder,
        )
        return {"exit": done.returncode, "cases": _cases(report)}


def _cases(report: Path) -> Found:
    """By operation, how many answers had which status."""
    found: dict[str, Counter[int]] = {}
    for line in report.open():
        if scenario := json.loads(line).get("ScenarioFinished"):
            told = scenario["recorder"]
            answers = [i.get("response") for i in told.get("interactions", {}).values()]
            found.setdefault(told["label"], Counter()).update(a["status_code"] if a else 0 for a in answers)
    return {name: dict(sorted(count.items())) for name, count in found.items()}


# ---- the command


@dataclass(frozen=True)
class Figure:
    about: str
    measure: Callable[[Any], Found]
    met: Callable[[Found], bool]


def _flags(o: Any, parallel: int | None = None) -> list[str]:
    model = ["-m", o.model] if o.model else []
    np = [] if parallel is None else ["--parallel", str(parallel)]
    return [*model, "--threads", str(o.threads), "--gpu", "off", *np]


def _llm(o: Any) -> LLM:
    return LLM(o.model, threads=o.threads, gpu="off", chat_template=clients.TEMPLATE)


def _crowd(o: Any) -> Found:
    with _llm(o) as llm, Serving(*_flags(o)) as served:
        with clients.polling(served.port, 50) as seconds:
            time.sleep(5)
        found = {"idle_health_p99_ms": 1e3 * percentile(seconds, 0.99)}
        found |= crowd(served.port, llm, 64, 64, 32)
    with Serving(*_flags(o, 2)) as served:
        return found | overload(served.port, 15, 2 + 64)


def _leave(o: Any) -> Found:
    with Serving(*_flags(o, 4)) as served:
        leave(served.port, 32)  # threads that were not there yet
        before = _files(served.popen.pid)
        found = leave(served.port, o.count or 500)
        return found | {"more_files": _files(served.popen.pid) - before}


def _files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _mixed(o: Any) -> Found:
    with _llm(o) as llm, Serving(*_flags(o)) as served:
        return mixed(served.port, llm, o.count or 1000)


def _bodies(o: Any) -> Found:
    with Serving(*_flags(o)) as served:
        return bodies(served.port, served.popen.pid, o.count or 3)


def _tax(o: Any) -> Found:
    with _llm(o) as llm, Serving(*_flags(o)) as served:
        engine = max(clients.descendants(served.popen.pid), key=clients.cpu_seconds)  # it has loaded
        return tax(served.port, llm, o.count or 7, o.tokens, engine)


def _batch(o: Any) -> Found:
    with Serving(*_flags(o, 4)) as served:
        return batch(served.port, o.count or 5, o.tokens)


def _thread(o: Any) -> Found:
    script = str(Path(__file__).with_name("engine_thread.py"))
    with Serving(*_flags(o, 4)) as apart, Serving(*_flags(o, 4), program=(script,)) as within:
        return processes(apart.port, within.port, o.count or 7, o.tokens)


def _long(o: Any) -> Found:
    with Serving(*_flags(o, 8)) as served:
        return long(served.port, o.tokens)


def _schema(o: Any) -> Found:
    with Serving(*_flags(o), "--predict", "16", template=clients.TEMPLATE + "{# <tool_call> #}") as served:
        return schema(served.port, o.program, o.count or 300, o.seconds, o.paths)


FIGURES = {
    "crowd": Figure(
        "0 wrong answers, /health and refusals within 100 ms", _crowd,
        lambda f: f["wrong"] == 0 and f["health_p99_ms"] <= 100 and f["refused_p99_ms"] <= 100,
    ),
    "leave": Figure(
        "all free again within max(500 ms, 2 steps)", _leave,
        lambda f: f["free_p99_ms"] <= max(500, 2 * f["longest_step_ms"])
        and abs(f["more_files"]) <= 2,
    ),
    "mixed": Figure("0 wrong answers", _mixed, lambda f: f["wrong"] == 0),
    "bodies": Figure(
        "others wait 100 ms at most, 64 MiB each; no body is the server's fault", _bodies,
        lambda f: f["stall_max_ms"] <= 100 and f["memory_max_mib"] <= 64 and f["kept_mib"] <= 64
        and max(f["statuses"]) < 500 and f["crowd_mib"] <= 128 + 64,
    ),
    "tax": Figure("0.97 of the tokens/s inside", _tax, lambda f: min(f["served"], f["polled"]) >= 0.97),
    "batch": Figure("four streams 1.8 times one", _batch, lambda f: f["four_over_one"] >= 1.8),
    "thread": Figure("as fast as in a thread", _thread, lambda f: min(f["one"], f["four"]) >= 0.97),
    "long": Figure("gaps 5 times those alone at most", _long, lambda f: f["over_idle_p99"] <= 5),
    "models": Figure(
        "a switch takes 1.2 times a load, and no more memory than the budget",
        lambda o: switches(o.model or str(BUNDLED), o.count or 6, ["--threads", str(o.threads)]),
        lambda f: f["switch_over_first"] <= 1.2 and f["private_gib_at_most"] <= f["budget_gib"],
    ),
    "stop": Figure(
        "idle within 1 s, busy within the grace and 1 s, all told, nothing left", 
        lambda o: stop((o.count or 20) // 2, *_flags(o)),
        lambda f: f["idle_max_s"] <= 1 and not f["beyond_grace"] and not f["left_behind"]
        and not f["unheard"] and f["exit_codes"] == [0],
    ),
    "schema": Figure("no violation", _schema, lambda f: f["exit"] == 0),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("-m", "--model", help="(the bundled one)")
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    parser.add_argument("--tokens", type=int, default=200, help="of an answer, where speed is measured")
    parser.add_argument("--count", type=int, help="of requests, rounds or runs")
    parser.add_argument("--program", default="schemathesis", help="where it is")
    parser.add_argument("--seconds", type=int, default=600, help="that schemathesis may take")
    parser.add_argument("--paths", default=".*", help="of the routes that schemathesis tries")
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    figure = FIGURES[o.figure]
    found = figure.measure(o)
    met = figure.met(found)
    if o.json:
        print(json.dumps({"figure": o.figure, **found, "met": met}, default=str))
    else:
        print("\n".join(f"{name}: {value}" for name, value in found.items()))
        print(f"{'met' if met else 'NOT met'}: {figure.about}")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
