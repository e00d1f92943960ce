"""`POST /benchmark`: it measures while nobody is answered, and gives way to requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from scripted import scripted
from serving import Served, served

from thermocline.engine.request import Figures
from thermocline.engine.sampler import SamplingParams
from thermocline.errors import IOFailure
from thermocline.llm import LLM
from thermocline.machine.disk_speed import DiskSpeed
from thermocline.offline import quick_bench
from thermocline.offline.quick_bench import BrokenOff, QuickBench
from thermocline.server.api.benchmark import report
from thermocline.server.http.limits import ServerLimits

PROMPT = "Once upon a time"


def bench(**changes: Any) -> QuickBench:
    figures = Figures(8, 0, 48, 0.1, 80.0, 10.0, 0.05, 0.05, 1.0, 10**9, "0")
    disk = DiskSpeed("x", None, 3.0, 1e5, 2.0, True)
    found = QuickBench(
        threads=2, memory_gbs=12.0, disk=disk, figures=figures, disk_wait_share=None, disk_gbs=None,
        from_cache=False, on_gpu=False, seconds=4.0
    )  # fmt: skip
    return replace(found, **changes)


@pytest.mark.parametrize(
    ("changes", "bound", "share"),
    [
        ({}, "memory", 0.8333),
        ({"memory_gbs": 20.0}, "processor", 0.5),
        ({"memory_gbs": None}, "processor", None),
        ({"from_cache": True}, "processor", None),
        ({"disk_wait_share": 0.5}, "disk", 0.8333),
        ({"disk_wait_share": 0.1}, "memory", 0.8333),
        ({"on_gpu": True}, None, None),
    ],
)
def test_the_bound_is_what_a_token_waits_for_most(
    changes: dict[str, Any], bound: str | None, share: float | None
) -> None:
    told = report(bench(**changes))
    assert told["bound"] == bound and told["answer"]["roof_share"] == share
    assert told["answer"]["gb_per_s"] == 10.0 and told["disk"]["gb_per_s"] == 3.0


def test_a_disk_that_cannot_be_measured_says_why() -> None:
    told = report(bench(disk=DiskSpeed("x", None, why="too small a file to measure with")))
    assert told["disk"] == {
        "gb_per_s": None, "pieces_gb_per_s": None, "direct": False, "why": "too small a file to measure with"
    }  # fmt: skip


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is not measured, which takes most of the time."""
    monkeypatch.setattr(quick_bench, "measure_file", lambda path, times: DiskSpeed(str(path), None))


def test_it_measures_the_model_that_is_loaded_and_leaves_nothing_behind(quick: None) -> None:
    params = SamplingParams(max_tokens=8, temperature=0)
    with LLM(threads=1, gpu="off", max_batch=2) as llm:
        expected = llm.generate(PROMPT, params).figures.logits_hash
        found = quick_bench.measure(llm.session, llm.engine, lambda: False)
        counts = llm.engine.counts()
        assert counts.running == 0 and counts.kv_free + counts.kv_cached == counts.kv_blocks
        assert llm.generate(PROMPT, params).figures.logits_hash == expected
    assert 2 < found.figures.tokens <= quick_bench.TOKENS and found.threads == 1
    assert found.memory_gbs and found.gbs and found.bound in ("memory", "processor")


def test_who_wants_the_engine_need_not_wait_for_its_end(quick: None) -> None:
    with LLM(threads=1, gpu="off") as llm:
        asked = 0

        def wanted() -> bool:
            nonlocal asked
            asked += 1
            return asked == 6  # after a few tokens

        with pytest.raises(BrokenOff):
            quick_bench.measure(llm.session, llm.engine, wanted)
        assert asked == 6 and llm.engine.counts().running == 0


# ---- the route


@pytest.fixture(scope="module")
def real() -> Iterator[Served]:
    with served(ServerLimits(limit_benchmark_s=0)) as found:
        yield found


@pytest.mark.slow
def test_a_server_tells_its_figures(real: Served) -> None:
    with real.client() as c:
        found = c.post("/benchmark", json={})
        assert found.status_code == 200, found.text
        told = found.json()
        assert told["model"] == c.get("/v1/models").json()["data"][0]["id"]
        assert told["answer"]["tokens_per_s"] > 0 and told["memory"]["gb_per_s"] > 0 and told["threads"] == 1
        assert c.get("/health").status_code == 200
        assert c.post("/benchmark", json={"model": "another"}).status_code == 404


@pytest.mark.slow
def test_a_request_goes_first(real: Served) -> None:
    """Requests that come one after the other leave no time for a benchmark, and none of them waits for it."""
    with real.client() as c:
        ended: list[httpx2.Response] = []
        thread = threading.Thread(target=lambda: ended.append(c.post("/benchmark", json={})))
        thread.start()
        while thread.is_alive():
            body = {"prompt": PROMPT, "max_tokens": 4}
            assert httpx2.post(f"{real.url}/v1/completions", json=body, timeout=60).status_code == 200
        assert (ended[0].status_code, ended[0].json()["error"]["code"]) == (409, "benchmark_busy")


def test_it_is_refused_while_answers_are_computed_and_twice_in_a_row() -> None:
    with (
        scripted(limits=ServerLimits(limit_benchmark_s=5)) as s,
        httpx2.Client(base_url=s.url, timeout=60) as c,
    ):
        s.engine.endless = True
        with c.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as answer:
            pieces = answer.iter_bytes()  # which close the answer when they go
            assert next(pieces)
            refused = c.post("/benchmark", json={})
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "benchmark_busy")
            assert "answers are being computed" in refused.json()["error"]["message"]
        assert s.engine.gone.wait(5)
        s.engine.bench = bench()
        assert c.post("/benchmark", json={}).json()["bound"] == "memory"
        again = c.post("/benchmark", json={})
        assert again.status_code == 429 and 1 <= int(again.headers["retry-after"]) <= 5


def test_one_that_gave_way_or_failed_says_so() -> None:
    with (
        scripted(limits=ServerLimits(limit_benchmark_s=0)) as s,
        httpx2.Client(base_url=s.url, timeout=60) as c,
    ):
        assert s.engine.bench is None
        refused = c.post("/benchmark", json={})
        assert refused.status_code == 409 and "went first" in refused.json()["error"]["message"]
        s.engine.bench = IOFailure("the disk is on fire")
        failed = c.post("/benchmark", json={})
        assert failed.status_code == 500 and failed.json()["error"]["message"] == "the disk is on fire"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Content-Type": "text/plain", "Authorization": "Bearer k"}, 415),
        ({}, 401),
        ({"Authorization": "Bearer k"}, 200),
    ],
)
def test_it_is_guarded_as_every_route_that_costs_something(headers: dict[str, str], status: int) -> None:
    with scripted(keys=["k"]) as s:
        s.engine.bench = bench()
        sent = {"Content-Type": "application/json", **headers}
        assert (
            httpx2.post(f"{s.url}/benchmark", content=b"{}", headers=sent, timeout=60).status_code == status
        )
        assert httpx2.get(f"{s.url}/benchmark", headers=headers, timeout=60).status_code in (401, 403, 405)
