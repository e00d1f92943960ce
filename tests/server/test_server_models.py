"""Several models through the real routes: names, states, errors in each API's words, streams that wait."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import tiny
from serving import Served, served
from several import MIB, LoadingEngine, Machine, new_machine
from test_server_benchmark import bench

from thermocline import LLM, SamplingParams
from thermocline.llm import BUNDLED, opened_model
from thermocline.server.api.models.catalogue import models_in
from thermocline.server.http.limits import ServerLimits
from thermocline.session.options import EngineOptions, ModelOptions
from thermocline.session.session import memory_needed

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/tokenize": {"content": "Hi"},
    "/detokenize": {"tokens": [1]},
}
STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return new_machine(monkeypatch)


@pytest.fixture
def server(machine: Machine, tmp_path: Path) -> Iterator[Served]:
    """Models a and b, with memory for one of them."""
    for name in "ab":
        (tmp_path / f"{name}.gguf").write_bytes(bytes(5))
    ram = (MIB + 128 * MIB) / 2**30
    with served(ServerLimits(limit_ping_s=0.05), directory=tmp_path, models_max=4, ram=ram) as made:
        yield made


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def states(server: Served) -> dict[str, str]:
    with server.client() as c:
        return {m["id"]: m["status"]["value"] for m in c.get("/v1/models").json()["data"]}


def test_each_route_takes_a_name_and_refuses_an_unknown_one_in_its_own_words(server: Served) -> None:
    with server.client() as c:
        assert states(server) == {"a": "unloaded", "b": "unloaded"}
        for path, body in ROUTES.items():
            names = ("c", "../a", "a/", "/etc/passwd", "%2e%2e/a", "", "A", "a.gguf")
            for name in names if path == "/tokenize" else ("../a",):
                r = c.post(path, json=body | {"model": name})
                found = r.json()
                assert r.status_code == 404 and found["error"]["type"] == "not_found_error", (path, name)
                assert found["error"]["message"].endswith("here, but 'a', 'b'")
                assert ("type" in found) == path.startswith("/v1/messages")
            unsaid = c.post(path, json=body)
            assert unsaid.status_code == 400 and "say which: 'a', 'b'" in unsaid.text
        assert states(server) == {"a": "unloaded", "b": "unloaded"}, "nothing was loaded for that"
        for name in "ab":
            for path, body in ROUTES.items():
                r = c.post(path, json=body | {"model": name})
                assert r.status_code == 200 or (path == "/infill" and "marks" in r.text), r.text
                if "model" in r.json():
                    assert r.json()["model"] == name and f"{name}.gguf" in r.text
        assert states(server) == {"a": "unloaded", "b": "loaded"}
        assert c.get("/v1/models/a").json()["meta"] == {"size": 5}
        about = c.get("/v1/models/b").json()
        assert about["meta"]["size"] == 5 and about["meta"]["n_ctx"] == 512
        assert c.get("/v1/models/c").status_code == 404
        assert c.get("/props?model=b").json()["model_alias"] == "b"
        assert c.get("/props?model=c").status_code == 404 and c.get("/props").status_code == 400
        assert c.get("/activity?model=c").status_code == 404
        health = c.get("/health")
        assert health.status_code == 200 and health.json()["ready"]


def test_a_benchmark_measures_one_model_while_none_has_anything_to_do(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models share the memory's bandwidth: what another one does would be measured, too."""
    machine.bench = bench()
    begun, go = threading.Event(), threading.Event()

    async def measure(engine: LoadingEngine) -> Any:
        begun.set()
        await asyncio.to_thread(go.wait, 30)
        return engine.bench

    monkeypatch.setattr(LoadingEngine, "measure", measure)
    for name in "ab":
        (tmp_path / f"{name}.gguf").write_bytes(bytes(5))
    limits = ServerLimits(limit_benchmark_s=0)
    with served(limits, directory=tmp_path, models_max=2, ram=1.0) as s, s.client() as c:
        go.set()
        assert c.post("/benchmark", json={}).status_code == 400
        found = c.post("/benchmark", json={"model": "a"})
        assert found.status_code == 200 and found.json()["model"] == "a" and machine.loads == ["a.gguf"]
        go.clear()
        begun.clear()
        ended: list[httpx2.Response] = []
        thread = threading.Thread(target=lambda: ended.append(c.post("/benchmark", json={"model": "a"})))
        thread.start()
        assert begun.wait(30)
        assert httpx2.get(f"{s.url}/props?model=a", timeout=60).json()["model_alias"] == "a"
        go.set()
        thread.join()
        assert ended.pop().status_code == 200, "what is known of a loaded model does not disturb it"
        go.clear()
        begun.clear()
        thread = threading.Thread(target=lambda: ended.append(c.post("/benchmark", json={"model": "a"})))
        thread.start()
        assert begun.wait(30)
        assert (
            httpx2.post(f"{s.url}/tokenize", json={"content": "a", "model": "b"}, timeout=60).status_code
            == 200
        )
        go.set()
        thread.join()
        assert ended[0].status_code == 409 and "went first" in ended[0].text
        machine.slow.add("c.gguf")
        (tmp_path / "c.gguf").write_bytes(bytes(5))
        with c.stream("POST", "/v1/completions", json={"model": "c", "prompt": "a", "stream": True}) as r:
            parts = r.iter_text()  # which close the answer when they go
            assert next(parts)
            until(lambda: states(s)["c"] == "loading")
            refused = httpx2.post(f"{s.url}/benchmark", json={"model": "a"}, timeout=60)
            assert refused.status_code == 409 and "is being loaded" in refused.text


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_begins_while_its_model_loads_and_says_how_far_it_is(
    server: Served, machine: Machine, path: str
) -> None:
    machine.slow.add("a.gguf")
    body = ROUTES[path] | {"model": "a", "stream": True}
    with server.client() as c, c.stream("POST", path, json=body) as r:
        assert r.status_code == 200 and r.headers["content-type"].startswith("text/event-stream")
        parts, text = r.iter_text(), ""
        while ": a: loading, 1.0 MiB of 4.0 MiB\n\n" not in text:
            text += next(parts)
        with server.client() as other:
            about = other.get("/v1/models/a").json()["status"]
        assert about["value"] == "loading"
        assert about["progress"] == {"what": "loading", "done": MIB, "size": 4 * MIB}
        machine.go()
        text += "".join(parts)
    comments, _, events = text.partition("data: ")
    assert all(line.startswith(": ") for line in comments.split("\n\n")[:-1]), "no event before it is loaded"
    assert "a.gguf" in events and "\r" not in events
    assert events.count("HTTP/1.1") == 0


@pytest.mark.parametrize("path", STREAMS)
def test_a_model_that_cannot_be_loaded_is_an_error_to_its_own_request_alone(
    server: Served, machine: Machine, path: str
) -> None:
    machine.broken["a.gguf"] = 1
    body = ROUTES[path] | {"model": "a"}
    with server.client() as c:
        assert c.post(path, json=body | {"model": "b"}).status_code == 200
        streamed = c.post(path, json=body | {"stream": True})
        assert streamed.status_code == 200
        last = json.loads(streamed.text.strip().split("\n\n")[-1].partition("data: ")[2])
        assert last["error"]["message"] == "a: a.gguf is broken"
        for more in ({}, {"stream": True}):
            refused = c.post(path, json=body | more)
            assert refused.status_code == 400 and refused.json()["error"]["message"] == "a: a.gguf is broken"
        machine.broken["b.gguf"] = 0
        assert states(server) == {"a": "unloaded", "b": "loaded"}


def test_a_bad_request_loads_nothing(server: Served, machine: Machine) -> None:
    with server.client() as c:
        for path, body in ROUTES.items():
            if path in STREAMS:
                r = c.post(path, json=body | {"model": "a", "temperature": "hot", "stream": True})
                assert r.status_code == 400, path
        many = ROUTES["/v1/completions"] | {"model": "a", "n": 1000}
        assert c.post("/v1/completions", json=many).status_code == 400
    assert machine.began == []


def test_a_client_that_leaves_ends_the_load_that_nobody_else_waits_for(
    server: Served, machine: Machine
) -> None:
    machine.slow.add("a.gguf")
    body = ROUTES["/v1/completions"] | {"model": "a"}
    for stream in (True, False):
        with server.client() as c, pytest.raises(httpx2.ReadTimeout):
            c.post("/v1/completions", json=body | {"stream": stream}, timeout=0.3 if not stream else 0.02)
        until(lambda: states(server) == {"a": "unloaded", "b": "unloaded"})
    machine.slow.clear()
    with server.client() as c:
        assert c.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openais_client_takes_a_stream_that_begins_with_progress(
    server: Served, machine: Machine, api: str
) -> None:
    machine.slow.add("a.gguf")

    def ready() -> None:
        until(lambda: bool(machine.taken))
        time.sleep(0.1)  # for two comments
        machine.go()

    loading = threading.Thread(target=ready)
    loading.start()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        if api == "chat":
            hello: Any = [{"role": "user", "content": "Hi"}]
            with client.chat.completions.create(model="a", messages=hello, stream=True) as chunks:
                text = "".join(c.choices[0].delta.content or "" for c in chunks)
        else:
            with client.responses.create(model="a", input="Hi", stream=True) as events:
                text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    loading.join()
    assert text == "a.gguf"


def test_many_clients_that_alternate_are_all_answered_by_their_model(
    server: Served, machine: Machine
) -> None:
    found: list[tuple[str, str]] = []

    def ask(name: str) -> None:
        body = ROUTES["/v1/completions"] | {"model": name, "stream": len(found) % 2 == 0}
        with server.client() as c:
            found.append((name, c.post("/v1/completions", json=body).text))

    threads = [threading.Thread(target=ask, args=("ab"[i % 2],)) for i in range(24)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len(found) == 24 and all(f'"{name}.gguf"' in text for name, text in found)
    assert machine.most_loaded == 1 and machine.most_taken == MIB
    metrics = server.metrics()
    assert metrics["thermocline_models_loaded"] == 1
    assert metrics["thermocline_memory_held_bytes"] == metrics["thermocline_memory_budget_bytes"] == MIB
    assert sum(metrics[f'thermocline_model_loads_total{{model="{n}"}}'] for n in "ab") == len(machine.loads)


def test_names_come_from_files_and_directories(tmp_path: Path, tiny_pack: Path) -> None:
    """A split GGUF counts once; projectors, hidden and other files do not count."""

    def write(name: str, size: int = 1) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))

    for name in ("one.gguf", "mmproj-one.gguf", ".hidden.gguf", "notes.txt", "org/repo/deep.gguf"):
        write(name)
    for i in (1, 2, 3):
        write(f"split-0000{i}-of-00003.gguf", i)
    write("both.gguf", 2)
    write("both/pack.json")
    write("both/weights.bin", 7)
    write("a/b/c/too-deep.gguf")
    tiny.hf_directory(tmp_path / "hf")
    write("nothing/config.json")
    (tmp_path / "linked").symlink_to(tiny_pack, target_is_directory=True)
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "dangling.gguf").symlink_to(tmp_path / "none")
    (tmp_path / "two\nlines.gguf").write_bytes(b"")
    found = {name: m for name, m in models_in(tmp_path).items() if not name.startswith("loop")}
    assert sorted(found) == ["both", "both.gguf", "hf", "linked", "one", "org/repo/deep", "split"]
    assert (found["both"].nbytes, found["both.gguf"].nbytes, found["split"].nbytes) == (7, 2, 6)
    assert found["split"].path.name == "split-00001-of-00003.gguf"
    before = found["one"]
    write("one.gguf", 2)
    assert models_in(tmp_path)["one"] != before


@pytest.mark.parametrize(
    ("flags", "code", "line"),
    [
        (["--models-max", "2"], 2, "--models-max counts models of --models-dir"),
        (["--models-dir", "{}", "--alias", "x"], 2, "--alias is about one model; name it with --model"),
        (["--models-dir", "{}", "--gpu", "auto", "--models-max", "2"], 2, "do not share a GPU"),
        (["--models-dir", "{}/none"], 4, "none: cannot list models: No such file or directory"),
        (["--models-dir", "{}", "--ram", "0.1"], 2, "--ram 0.1: several models need more"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(
    flags: list[str], code: int, line: str, tmp_path: Path, thermocline: Any
) -> None:
    socket = tmp_path / "socket"
    ran = thermocline("serve", "--socket", socket, *(f.format(tmp_path) for f in flags))
    assert ran.code == code and line in ran.err.splitlines()[-1] and not socket.exists()


# ---- real engines

STORY = "Once upon a time, there was a"
ENGINE = EngineOptions(threads=1, max_batch=4, gpu="off")


def needed(path: Path, options: EngineOptions = ENGINE) -> int:
    found = opened_model(ModelOptions(model=path), lambda *_: None)
    return memory_needed(found, replace(options, ram=100.0), 0)


def engines() -> list[int]:
    """The processes that compute or open a model."""
    asked = ["pgrep", "-P", str(os.getpid()), "-f", "spawn_main"]
    return list(map(int, subprocess.run(asked, capture_output=True, text=True).stdout.split()))


@pytest.fixture
def pair(tmp_path: Path, tiny_pack: Path) -> Path:
    """Two models with unlike tokenizers, and a file that is none."""
    shutil.copytree(BUNDLED, tmp_path / "story")
    shutil.copytree(tiny_pack, tmp_path / "tiny")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    return tmp_path


def gib_for_one(pair: Path) -> float:
    """GiB with memory for either model, not for both."""
    needs = [needed(pair / name) for name in ("story", "tiny")]
    assert max(needs) < 0.9 * sum(needs)
    return (max(needs) + 128 * MIB) / 2**30


@pytest.mark.slow
def test_two_models_in_a_budget_for_one_give_the_answers_that_each_gives_alone(pair: Path) -> None:
    prompts = [f"{STORY} {i}" for i in range(12)]
    want: dict[tuple[str, int], str] = {}
    for name in ("story", "tiny"):
        with LLM(pair / name, options=ENGINE) as llm:
            for i, prompt in enumerate(prompts):
                params = SamplingParams(max_tokens=8, seed=i, ignore_eos=True, **llm.recommended)
                want[name, i] = llm.generate(prompt, params).text
    found: dict[tuple[str, int], Any] = {}
    most = 0

    def ask(server: Served, name: str, i: int) -> None:
        asked = {"max_tokens": 8, "seed": i, "ignore_eos": True}
        with server.client() as c:
            body = asked | {"model": name, "prompt": prompts[i]}
            if i % 2:
                text = c.post("/v1/completions", json=body | {"stream": True}).text
                events = [part for part in text.split("\n\n") if part.startswith("data: {")]
                pieces = [json.loads(e.removeprefix("data: "))["choices"][0]["text"] for e in events]
                found[name, i] = "".join(pieces)
            else:
                found[name, i] = c.post("/v1/completions", json=body).json()["choices"][0]["text"]

    with served(directory=pair, models_max=4, ram=gib_for_one(pair)) as server:
        keys = sorted(want, key=lambda k: k[1])
        threads = [threading.Thread(target=ask, args=(server, *key)) for key in keys]
        for t in threads:
            t.start()
        while any(t.is_alive() for t in threads):
            m = server.metrics()
            assert m["thermocline_memory_held_bytes"] <= m["thermocline_memory_budget_bytes"]
            assert m["thermocline_models_loaded"] <= 1
            most = max(most, len(engines()))
            time.sleep(0.05)
        assert found == want
        for key in (("story", 0), ("tiny", 1), ("story", 1), ("tiny", 0)):
            del found[key]
            ask(server, *key)
            assert server.metrics()["thermocline_models_loaded"] == 1
        loads = server.metrics()
    assert found == want
    assert most <= 2, "one that is loaded, and one that opens"
    assert sum(loads[f'thermocline_model_loads_total{{model="{n}"}}'] for n in ("story", "tiny")) >= 4


@pytest.mark.slow
def test_a_killed_engine_costs_its_own_requests_only(pair: Path) -> None:
    with served(directory=pair, models_max=4, ram=2.0) as server, server.client() as c:
        body = {"prompt": STORY, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
        assert c.post("/v1/completions", json=body | {"model": "tiny", "max_tokens": 2}).status_code == 200
        (tiny_engine,) = engines()
        whole = c.post("/v1/completions", json=body | {"model": "story"}).json()["choices"][0]["text"]
        (killed,) = set(engines()) - {tiny_engine}
        with c.stream("POST", "/v1/completions", json=body | {"model": "story", "stream": True}) as r:
            parts = r.iter_text()
            text = next(parts)
            os.kill(killed, signal.SIGKILL)
            with server.client() as other:
                short = body | {"model": "tiny", "max_tokens": 2}
                assert other.post("/v1/completions", json=short).status_code == 200
            text += "".join(parts)
        assert '"engine_crashed"' in text.split("\n\n")[-2]
        again = c.post("/v1/completions", json=body | {"model": "story"})
        assert again.json()["choices"][0]["text"] == whole
        metrics = server.metrics()
        restarts = {
            n: metrics[f'thermocline_engine_restarts_total{{model="{n}"}}'] for n in ("story", "tiny")
        }
        assert restarts == {"story": 1, "tiny": 0} and tiny_engine in engines()


@pytest.mark.slow
def test_a_file_that_is_no_model_and_one_that_is_too_large_are_refused_and_others_go_on(pair: Path) -> None:
    body = {"prompt": STORY, "max_tokens": 2}
    with served(directory=pair, models_max=4, ram=gib_for_one(pair)) as server, server.client() as c:
        assert c.post("/v1/completions", json=body | {"model": "tiny"}).status_code == 200
        refused = c.post("/v1/completions", json=body | {"model": "bad"})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "model_cannot_be_loaded"
        assert refused.json()["error"]["message"].startswith("bad: ") and "bad.gguf" in refused.text
        assert states(server)["tiny"] == "loaded"
    with served(directory=pair, models_max=4, ram=140 / 1024) as server, server.client() as c:
        refused = c.post("/v1/messages", json=CHAT | {"model": "tiny"})
        assert refused.status_code == 400
        enough = refused.json()["error"]["message"].partition("--ram ")[2].split()[0]
    with served(directory=pair, models_max=4, ram=float(enough)) as server, server.client() as c:
        assert c.post("/v1/completions", json=body | {"model": "tiny"}).status_code == 200


@pytest.mark.slow
def test_a_hugging_face_directory_is_packed_when_it_is_asked_for_and_the_default_is_loaded_first(
    pair: Path, tiny_hf: Path
) -> None:
    shutil.copytree(tiny_hf, pair / "org" / "hf")
    body = {"prompt": STORY, "max_tokens": 4, "temperature": 0}
    with served(directory=pair, models_max=4, model="tiny", format="f32") as server, server.client() as c:
        assert states(server) == {
            "bad": "unloaded",
            "org/hf": "unloaded",
            "story": "unloaded",
            "tiny": "loaded",
        }
        default = c.post("/v1/completions", json=body).json()
        assert default["model"] == "tiny"
        packed = c.post("/v1/completions", json=body | {"model": "org/hf"}).json()
        assert packed["choices"][0]["text"] == default["choices"][0]["text"], "the same weights"
        assert c.get("/v1/models/org/hf").json()["status"] == {"value": "loaded"}
