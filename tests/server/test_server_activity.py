"""The layers' activity, from the engine's counts to `GET /activity`: exact, only while a client watches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from mixed import pack_of
from serving import DEADLINE_S, served
from toy import GREEDY, SPEC, WEIGHTS, Letters

from thermocline.engine.engine import Engine, EngineSettings
from thermocline.engine.live_activity import ActivityMeter, ActivityReport, ExpertActivity, LayerActivity
from thermocline.engine.sampler import SamplingParams
from thermocline.llm import LLM
from thermocline.offline.routing.recorder import RouteRecorder
from thermocline.ops import reference
from thermocline.ops.interface import DiskCounts, FFNStats, Linear, opaque
from thermocline.server.api.activity import events, report
from thermocline.server.http.limits import ServerLimits
from thermocline.server.process.subscribers import Subscribers
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session

PROMPT = "Once upon a time there was a xylophone"
N = 24


def watched(sparsity: str, prompts: int = 1) -> tuple[ActivityReport, list[Any]]:
    """Return the counts of a watch over all steps of the bundled model, and those of the requests."""
    with LLM(threads=1, gpu="off", sparsity=sparsity) as llm:
        llm.engine.watch = ActivityMeter()
        params = SamplingParams(max_tokens=N, temperature=0, ignore_eos=True)
        found = [c.figures for c in llm.generate([PROMPT] * prompts, params)]
        activity = llm.engine.watch.take()
        assert llm.engine.watch.take() is None, "it is told once"
    assert activity is not None
    return activity, found


def mean(activity: ActivityReport, share: str) -> float:
    assert activity.layers is not None
    return float(sum(getattr(layer, share) for layer in activity.layers)) / len(activity.layers)


def test_layers_add_up_to_what_the_request_cost() -> None:
    activity, (figures,) = watched("exact")
    assert activity.layers is not None and len(activity.layers) == 6
    assert len({layer.active for layer in activity.layers}) == 6, "each layer's own"
    assert activity.tokens == N - 1, "the first one comes from the prompt's step"
    assert mean(activity, "active") == pytest.approx(figures.active_fraction)
    assert mean(activity, "computed") == pytest.approx(figures.rows_fraction)
    assert mean(activity, "asked") == 1
    assert activity.bytes / activity.tokens == pytest.approx(figures.bytes_per_token, abs=1)
    assert activity.disk is None and not activity.on_gpu


def test_without_sparsity_all_is_computed_and_as_much_is_active() -> None:
    exact, dense = watched("exact")[0], watched("off")[0]
    assert mean(dense, "computed") == 1
    assert mean(dense, "active") == pytest.approx(mean(exact, "active"))


def test_answers_computed_together_count_each_token_and_read_weights_once() -> None:
    one, two = watched("exact")[0], watched("exact", prompts=2)[0]
    assert two.tokens == 2 * one.tokens
    assert mean(two, "active") == pytest.approx(mean(one, "active")), "the same answer twice"
    assert one.bytes < two.bytes < 1.5 * one.bytes


def test_the_specification_counts_layers_as_its_sums_say() -> None:
    e = Engine(SPEC, WEIGHTS, reference, EngineSettings(context=64), tokenizer=Letters())
    e.watch = ActivityMeter()
    request = e.submit([1, 2, 3], GREEDY)
    while e.step():
        pass
    found = e.watch.take()
    assert found is not None and found.layers is not None and len(found.layers) == SPEC.n_layers
    assert mean(found, "active") == pytest.approx(request.figures().active_fraction)


def test_nothing_is_counted_by_layer_unless_somebody_watches() -> None:
    assert FFNStats().layers is None


def test_counts_that_a_gpu_lacks_are_null_and_the_disk_is_reported() -> None:
    watch, disk = ActivityMeter(on_gpu=True), DiskCounts(needed=8, missed=2, bytes=10**9)
    for _ in range(2):
        watch.add(FFNStats(layers=[]), tokens=1, seconds=0.5, bytes=2e9, disk=disk)
    found = watch.take()
    assert found is not None and report(found) == {
        "tokens": 2,
        "tokens_per_s": 2.0,
        "gb_per_s": 4.0,
        "layers": None,
        "tiers": {
            "gpu": {"gb_per_s": None},
            "ram": {"gb_per_s": None},
            "disk": {"gb_per_s": 2.0, "hit_rate": 0.75},
        },
    }


def test_shares_are_of_the_neurons() -> None:
    watch = ActivityMeter()
    stats = FFNStats(neurons=200, rows_dense=400, gates_dense=100, layers=[5, 20, 25, 10, 40, 50])
    watch.add(stats, tokens=2, seconds=1, bytes=1, disk=None)
    found = watch.take()
    assert found is not None and found.layers == (
        LayerActivity(active=0.05, computed=0.1, asked=0.5),
        LayerActivity(active=0.1, computed=0.2, asked=1.0),
    )


@pytest.mark.parametrize("kind", ["dense mixture", "relu mixture"])
def test_a_mixture_tells_which_experts_of_a_layer_tokens_went_to(kind: str, tmp_path: Path) -> None:
    """Those that the router names, of the steps that make tokens, and nothing of the prompt's."""
    pack = pack_of(tmp_path / "pack", kind, {})
    with Session.open(pack, EngineOptions(context=64, threads=1)) as session:
        engine = session.load()
        engine.watch = ActivityMeter()
        recorder = RouteRecorder(1, pack.spec, session.loaded.weights.layers)
        engine.ops = opaque(recorder)
        request = engine.submit([1, 2, 3], replace(GREEDY, max_tokens=9))
        engine.step()
        recorder.begin()  # the prompt and the first token are over
        while engine.step():
            pass
        found = engine.watch.take()
    assert found is not None and found.layers is not None and found.tokens == 8 == len(request.ids) - 3 - 1
    chosen = recorder.choices("").chosen
    for layer, choices in zip(found.layers, chosen, strict=True):
        assert layer.experts is not None and layer.experts.n == 3
        numbers, counts = np.unique(choices, return_counts=True)
        assert layer.experts.used == tuple(zip(numbers.tolist(), counts.tolist(), strict=True))
        assert sum(tokens for _, tokens in layer.experts.used) == 8 * pack.spec.n_experts_active
        assert (layer.experts.needed, layer.experts.missed) == (0, 0), "all are in memory"
    told = report(found)["layers"][0]["experts"]
    assert told["n"] == 3 and told["hit_rate"] is None and told["n_used"] == len(told["used"])


def test_the_specification_counts_the_experts_that_tokens_go_to() -> None:
    spec, rng = replace(SPEC, n_experts=4, n_experts_active=2), np.random.default_rng(1)
    router = Linear(rng.standard_normal((4, spec.dim), dtype=np.float32), None)
    layer = replace(WEIGHTS.layers[0], experts=WEIGHTS.layers[0].experts * 4, router=router)
    h, stats = rng.standard_normal((5, spec.dim), dtype=np.float32), ActivityMeter().counting()
    reference.ffn_add(h.copy(), h, reference.bind_ffn(spec, layer), "exact", stats)
    assert stats.experts is not None and stats.experts[0] is not None
    assert stats.experts[0].tokens.sum() == 5 * 2 and stats.experts[0].tokens.max() <= 5


def test_a_report_names_the_most_used_experts_alone() -> None:
    used = tuple((e, 1 + (e == 70)) for e in range(100))
    layer = LayerActivity(1.0, 1.0, 1.0, ExpertActivity(100, used, needed=100, missed=25))
    told = report(ActivityReport(1, 1.0, 1e9, (layer,), None, on_gpu=False))["layers"][0]["experts"]
    assert told["n_used"] == 100 and len(told["used"]) == 32 and told["used"][0] == [70, 2]
    assert told["hit_rate"] == 0.75


def test_onlookers_come_and_go_and_a_slow_one_gets_the_newest() -> None:
    looked: list[bool] = []

    async def look() -> list[bytes]:
        subscribers = Subscribers(looked.append)
        first, second = subscribers.add(), subscribers.add()
        subscribers.remove(first)
        assert looked == [True], "one is still there"
        stream = events(queue := subscribers.add(), ping_s=0.01)
        found = [await anext(stream), await anext(stream)]  # a beginning, and a sign of life
        for tokens in (1, 2, 3):
            subscribers.show(ActivityReport(tokens, 1.0, 1e9, None, None, on_gpu=False))
        found.append(await anext(stream))
        subscribers.show(None)
        found += [x async for x in stream]
        subscribers.remove(second)
        subscribers.remove(queue)
        return found

    begin, ping, *told = asyncio.run(look())
    assert begin == ping == b": \n\n"
    assert [json.loads(x.removeprefix(b"data: "))["tokens_per_s"] for x in told] == [3.0]
    assert looked == [True, False]


def test_the_server_tells_what_the_engine_does_and_no_word_of_any_text() -> None:
    with served() as s, s.client() as looking:
        found: list[dict[str, Any]] = []
        begun, enough = threading.Event(), threading.Event()

        def look() -> None:
            with looking.stream("GET", "/activity") as response:
                assert response.headers["content-type"].startswith("text/event-stream")
                begun.set()
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        assert "xylophone" not in line
                        found.append(json.loads(line.removeprefix("data: ")))
                        return enough.set()

        thread = threading.Thread(target=look)
        thread.start()
        assert begun.wait(20)
        body = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True}
        while not enough.is_set():
            httpx2.post(f"{s.url}/v1/completions", json=body, timeout=30).raise_for_status()
        thread.join(20)
    (first,) = found
    assert first["tokens_per_s"] > 0 and first["tiers"]["ram"]["gb_per_s"] > 0
    assert len(first["layers"]) == 6
    assert all(0 < x["active"] <= x["computed"] <= x["asked"] == 1 for x in first["layers"])
    assert first["tiers"]["gpu"] is first["tiers"]["disk"] is None


def test_onlookers_are_bounded_and_one_that_leaves_makes_room() -> None:
    """1,100 of them held every connection for as long as they liked, and nobody else was answered."""
    with served(ServerLimits(limit_onlookers=2)) as s, contextlib.ExitStack() as stack:
        client = stack.enter_context(s.client())
        streams = [stack.enter_context(contextlib.ExitStack()) for _ in range(2)]
        for one in streams:
            assert one.enter_context(client.stream("GET", "/activity")).status_code == 200
        with client.stream("GET", "/activity") as refused:
            assert (refused.status_code, refused.headers.get("retry-after")) == (503, "1")
        assert client.get("/health").status_code == 200
        streams[0].close()
        end = time.monotonic() + DEADLINE_S
        while True:
            with client.stream("GET", "/activity") as again:
                if again.status_code == 200:
                    break
            assert time.monotonic() < end


def test_a_client_without_a_key_sees_nothing() -> None:
    with served(keys=["k"], wait=False) as s:
        assert httpx2.get(f"{s.url}/activity", timeout=60).status_code == 401
