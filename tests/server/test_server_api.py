"""Answers to clients: OpenAI's shapes, the model's own words, errors that say what to do."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from serving import TEMPLATE, Served, served

from thermocline import LLM, SamplingParams, __version__
from thermocline.engine.kv_cache import BLOCK
from thermocline.errors import BadFile, OutOfBudget
from thermocline.server.http.limits import ServerLimits

STORY = "Once upon a time, there was a"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(name="story") as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(threads=1, gpu="off", chat_template=TEMPLATE) as made:
        yield made


def post(server: Served, path: str, body: Any, **how: Any) -> httpx2.Response:
    with server.client() as c:
        return c.post(path, json=body, **how)


def events(text: str) -> list[Any]:
    """The data of a stream's events; the last is [DONE]."""
    parts = text.split("\n\n")
    assert parts.pop() == "" and parts.pop() == "data: [DONE]"
    return [json.loads(p.removeprefix("data: ")) for p in parts if not p.startswith(":")]


# ---- the official client


def test_chat_says_what_the_engine_says(client: openai.OpenAI, llm: LLM) -> None:
    messages = [{"role": "user", "content": STORY}]
    want = llm.chat(messages, SamplingParams(temperature=0, max_tokens=12, logprobs=2))
    made = client.chat.completions.create(
        model="story", messages=[{"role": "user", "content": STORY}], temperature=0, max_tokens=12,
        logprobs=True, top_logprobs=2
    )  # fmt: skip
    choice = made.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", want.text)
    assert choice.finish_reason == "length" and made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (want.figures.prompt_tokens, 12)
    assert choice.logprobs is not None and choice.logprobs.content is not None and want.logprobs is not None
    got = [(t.logprob, [x.logprob for x in t.top_logprobs]) for t in choice.logprobs.content]
    assert got == [(t.logprob, [p for _, p in t.top]) for t in want.logprobs]
    assert b"".join(bytes(t.bytes or ()) for t in choice.logprobs.content).decode() == want.text


def test_a_stream_is_the_same_in_pieces(client: openai.OpenAI, server: Served) -> None:
    asked: dict[str, Any] = {
        "model": "story", "messages": [{"role": "user", "content": STORY}], "seed": 7, "max_tokens": 9,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    body = post(
        server, "/v1/chat/completions", asked | {"stream": True, "stream_options": {"include_usage": True}}
    )
    assert body.headers["content-type"].startswith("text/event-stream")
    first, *middle, last, used = events(body.text)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {e["id"] for e in (first, *middle, last, used)} == {first["id"]}
    text = "".join(e["choices"][0]["delta"]["content"] for e in middle)
    assert text == whole.choices[0].message.content
    reasons = [e["choices"][0]["finish_reason"] for e in (first, *middle, last)]
    assert reasons == [None] * (len(reasons) - 1) + ["length"] and last["choices"][0]["delta"] == {}
    assert used["choices"] == [] and used["usage"]["completion_tokens"] == 9
    assert all(e["usage"] is None for e in (first, *middle, last))
    assert last["timings"]["predicted_n"] == 9 and last["timings"]["predicted_per_second"] > 0
    with client.chat.completions.create(stream=True, **asked) as stream:
        assert "".join(c.choices[0].delta.content or "" for c in stream) == text


def test_completions_take_texts_and_tokens(client: openai.OpenAI, llm: LLM) -> None:
    want = llm.generate(STORY, SamplingParams(temperature=0, max_tokens=16))
    ids = llm.tokenizer.encode(STORY, parse_special=True)
    for prompt in (STORY, ids):
        made = client.completions.create(model="story", prompt=prompt, temperature=0)
        assert made.choices[0].text == want.text, "16 tokens, as OpenAI has it, where nothing is said"
    both = client.completions.create(model="story", prompt=[STORY, "A cat"], temperature=0, max_tokens=4, n=2)
    assert [c.index for c in both.choices] == [0, 1, 2, 3] and both.usage is not None
    assert both.choices[0].text == both.choices[1].text != both.choices[2].text == both.choices[3].text
    assert both.usage.completion_tokens == 16
    tokens = len(ids) + len(llm.tokenizer.encode("A cat", parse_special=True))
    assert both.usage.prompt_tokens == tokens, "a prompt with two answers counts once"


def test_a_prompt_with_four_answers_is_computed_once(server: Served, client: openai.OpenAI, llm: LLM) -> None:
    text = "There was a boy who liked to sing, and he had a dog. " * 12
    n = len(llm.tokenizer.encode(text, parse_special=True))
    before = server.metrics()
    made = client.completions.create(model="story", prompt=text, n=4, max_tokens=3, temperature=0)
    want = llm.generate(text, SamplingParams(temperature=0, max_tokens=3)).text
    assert [c.text for c in made.choices] == [want] * 4 and made.usage is not None
    details = made.usage.prompt_tokens_details
    assert made.usage.prompt_tokens == n > 100 and details is not None and details.cached_tokens == 0
    after = server.metrics()
    prompts, cached = (
        after[name] - before[name]
        for name in ("thermocline_prompt_tokens_total", "thermocline_cached_tokens_total")
    )
    assert prompts == 4 * n and prompts - cached == n + 3 * ((n - 1) % BLOCK + 1)


def test_seeds_repeat_and_answers_to_one_prompt_differ(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        made = client.completions.create(
            model="story", prompt=STORY, n=3, seed=seed, max_tokens=12, temperature=1.5
        )
        return [c.text for c in made.choices]

    first = texts(5)
    assert texts(5) == first and len(set(first)) == 3 and texts(6)[:2] == first[1:]


def test_stops_biases_and_penalties_reach_the_sampler(client: openai.OpenAI, llm: LLM) -> None:
    made = client.completions.create(
        model="story", prompt="Once upon a", temperature=0, max_tokens=40, stop=["there", "zebra"]
    )
    assert made.choices[0].text.endswith(", ") and made.choices[0].finish_reason == "stop"
    token = llm.tokenizer.encode(" time", add_special=False)[0]
    other = client.completions.create(
        model="story", prompt="Once upon a", temperature=0, max_tokens=1, logit_bias={str(token): -100}
    )
    assert other.choices[0].text != " time"


def test_prompts_are_scored_as_lm_eval_asks(client: openai.OpenAI, llm: LLM) -> None:
    """`local-completions`: token ids, echo, logprobs, nothing or one token generated."""
    ids = llm.tokenizer.encode(STORY, parse_special=True)
    for tokens in (0, 1):
        params = SamplingParams(max_tokens=tokens, temperature=0, prompt_logprobs=1, logprobs=1)
        want = llm.generate(STORY, params)
        made = client.completions.create(
            model="story", prompt=ids, echo=True, logprobs=1, max_tokens=tokens, temperature=0
        )
        choice = made.choices[0]
        assert choice.logprobs is not None and want.prompt_logprobs is not None and want.logprobs is not None
        scores = [t.logprob for t in (*want.prompt_logprobs, *want.logprobs)]
        assert choice.logprobs.token_logprobs == [None, *scores]
        assert choice.text == llm.tokenizer.decode(ids) + want.text and choice.finish_reason == "length"
        assert choice.logprobs.top_logprobs is not None and choice.logprobs.tokens is not None
        assert len(choice.logprobs.top_logprobs) == len(choice.logprobs.tokens) == len(ids) + tokens
        assert choice.logprobs.tokens[0] == "<|endoftext|>" and choice.logprobs.text_offset is not None
        places = list(zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True))
        assert all(choice.text.startswith(token, at) for token, at in places[1:]) and places[0][1] == 0


SCHEMA = {
    "type": "object", "required": ["name", "age"], "additionalProperties": False,
    "properties": {"name": {"enum": ["Tim", "Lily"]}, "age": {"type": "integer", "minimum": 1, "maximum": 9}},
}  # fmt: skip


@pytest.mark.parametrize(
    "how",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "child", "schema": SCHEMA}}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
        {"grammar": 'start: "{" NAME "," AGE "}"\nNAME: /"name": "(Tim|Lily)"/\nAGE: / "age": [1-9]/'},
    ],
)
def test_an_answer_is_what_its_grammar_says(server: Served, how: dict[str, Any]) -> None:
    asked = {"messages": [{"role": "user", "content": STORY}], "max_tokens": 300, "seed": 3} | how
    got = post(server, "/v1/chat/completions", asked).json()
    assert "choices" in got, got
    made = got["choices"][0]
    child = json.loads(made["message"]["content"])
    assert made["finish_reason"] == "stop"
    assert child["name"] in ("Tim", "Lily") and 1 <= child["age"] <= 9 and len(child) == 2


@pytest.mark.parametrize(
    "how",
    [
        {"response_format": {"type": "json_schema"}}, {"grammar": "root ::= x"}, {"grammar": "start: ("},
        {"json_schema": {"type": "nothing"}}, {"json_schema": {"pattern": "(a+)+\\1", "type": "string"}},
        {"json_schema": SCHEMA, "grammar": 'start: "a"'}, {"grammar": "x" * 70000},
        {"response_format": {"type": "text", "schema": SCHEMA}},
        {"response_format": {"type": "json_object", "schema": {"type": "nothing"}}},
    ],
)  # fmt: skip
def test_a_grammar_that_cannot_be_enforced_is_refused(server: Served, how: dict[str, Any]) -> None:
    got = post(server, "/v1/completions", {"prompt": "a", "max_tokens": 4} | how)
    assert got.status_code == 400 and got.json()["error"]["type"] == "invalid_request_error"


# ---- errors


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": "hot"}, "temperature"), ({"temperature": -1}, "temperature"), ({"n": 0}, "n"),
        ({"n": 9}, "n"), ({"n": 1.5}, "n"), ({"n": True}, "n"), ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 2**63}, "max_tokens"), ({"top_p": 2}, "top_p"), ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"), ({"stop": ["x" * 257]}, "stop"), ({"seed": -2}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"99999": 1}}, None),
        ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"messages": []}, "messages"), ({"messages": [{"role": "x", "content": ""}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///"}}]}]},
         "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, None), ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"guided_json": {"type": "object"}}, "guided_json"), ({"functions": [{"name": "f"}]}, "functions"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(server: Served, changes: dict[str, Any], param: str | None) -> None:
    asked = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 1} | changes
    got = post(server, "/v1/chat/completions", asked)
    error = got.json()["error"]
    assert (got.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert error["message"] and "\n" not in error["message"]


def test_an_error_does_not_send_a_long_name_back(server: Served) -> None:
    """`param` was a key of 20 MiB."""
    got = post(server, "/v1/completions", {"prompt": "a", "logit_bias": {"x" * 5_000_000: "b"}})
    assert got.status_code == 400 and got.json()["error"]["param"].startswith("logit_bias")
    assert len(got.content) < 5000


def test_the_clients_exceptions_are_the_right_ones(client: openai.OpenAI, server: Served) -> None:
    with pytest.raises(openai.NotFoundError, match=r"there is no model '\.\./secret' here"):
        client.completions.create(model="../secret", prompt="a")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="story", prompt="word " * 600)
    assert long.value.code == "context_length_exceeded"
    body = post(server, "/v1/completions", {"prompt": "word " * 600}).json()["error"]
    assert (body["type"], body["n_ctx"]) == ("exceed_context_size_error", 512)
    assert body["n_prompt_tokens"] > 512
    with server.client() as c:
        assert (c.get("/nothing").status_code, c.put("/v1/models").status_code) == (404, 405)
        assert [c.put("/v1/models/a/b").status_code, c.post("/v1/models/a").status_code] == [405, 405]
        wrong = c.post("/health"), c.request("GET", "/tokenize", json={"content": "a"})
        assert [(r.status_code, r.headers["allow"]) for r in wrong] == [(405, "GET, HEAD"), (405, "POST")]


def test_a_text_that_no_context_holds_is_refused_before_it_is_tokenised(server: Served) -> None:
    """Splitting 19 MB into tokens took 26 s, in which nobody else's prompt was."""
    text = "word " * 200_000
    chat = {"messages": [{"role": "user", "content": text}]}
    for path, body in (("/v1/completions", {"prompt": text}), ("/v1/chat/completions", chat)):
        error = post(server, path, body).json()["error"]
        assert (error["type"], error["code"], error["n_ctx"]) == (
            "exceed_context_size_error", "context_length_exceeded", 512
        )  # fmt: skip
        assert "1000000 bytes" in error["message"]
    assert post(server, "/tokenize", {"content": "a" * (64 << 10)}).status_code == 200
    assert post(server, "/tokenize", {"content": "a" * (64 << 10) + "a"}).status_code == 413


def test_unknown_fields_are_ignored_and_reported_once(server: Served) -> None:
    for _ in range(2):
        got = post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1, "frob\n": 1})
        assert got.status_code == 200
    assert [line for line in server.notes if "frob" in line] == [r"/v1/completions: ignored 'frob\n'"]


def test_fields_that_say_nothing_are_as_if_they_were_not_there(server: Served) -> None:
    """Some clients fill in every field that they know."""
    nothing: dict[str, Any] = {
        "top_logprobs": 0,
        "logprobs": False,
        "chat_template": None,
        "functions": [],
        "tools": [],
    }
    asked = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 1, "seed": 1}
    plain, filled = (post(server, "/v1/chat/completions", asked | more).json() for more in ({}, nothing))
    assert filled["choices"] == plain["choices"]
    assert plain["system_fingerprint"] == f"thermocline-{__version__}"


# ---- the rest


def test_models_props_and_tokens(client: openai.OpenAI, server: Served, llm: LLM) -> None:
    assert [m.id for m in client.models.list()] == ["story"]
    assert client.models.retrieve("story") == next(iter(client.models.list()))
    for other in ("../secret", "a/b", "story/"):
        with pytest.raises(openai.NotFoundError, match="there is no model"):
            client.models.retrieve(other)
    with server.client() as c:
        props = c.get("/props").json()
        assert (props["total_slots"], props["model_alias"], props["chat"]) == (4, "story", True)
        assert props["default_generation_settings"]["n_ctx"] == 512
        paths = c.get("/openapi.json").json()["paths"]
        assert {"/v1/chat/completions", "/health", "/tokenize"} <= paths.keys()
        docs = c.get("/docs").text
        assert "max_completion_tokens" in docs
        links = re.findall(r'href="([^"]+)"', docs)
        assert links and [c.get(link).status_code for link in links] == [200] * len(links)
    text = "Ünïcode 🐈 and words"
    ids = post(server, "/tokenize", {"content": text}).json()["tokens"]
    assert ids == llm.tokenizer.encode(text, add_special=False, parse_special=True)
    assert post(server, "/detokenize", {"tokens": ids}).json() == {"content": text}
    pieces = post(server, "/tokenize", {"content": "🐈", "with_pieces": True}).json()["tokens"]
    data = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces)
    assert data.decode().strip() == "🐈"
    assert post(server, "/detokenize", {"tokens": [10**6]}).status_code == 400


def test_metrics_count_what_was_done(server: Served) -> None:
    before = server.metrics()
    post(server, "/v1/completions", {"prompt": STORY, "max_tokens": 5})
    after = server.metrics()
    assert after["thermocline_tokens_generated_total"] - before["thermocline_tokens_generated_total"] == 5
    assert after["llamacpp:tokens_predicted_total"] == after["thermocline_tokens_generated_total"]
    assert after["thermocline_ram_read_bytes_total"] > before["thermocline_ram_read_bytes_total"]
    assert after["thermocline_ready"] == 1 and after["thermocline_heartbeat_age_seconds"] < 5


def test_a_client_that_leaves_frees_its_slot(server: Served) -> None:
    """In the midst of a stream, and while it waits for a whole answer."""
    cancelled = server.metrics()["thermocline_requests_cancelled_total"]
    endless = {"prompt": STORY, "max_tokens": 400, "ignore_eos": True}
    with server.client() as c, c.stream("POST", "/v1/completions", json=endless | {"stream": True}) as r:
        next(r.iter_bytes())
    with pytest.raises(httpx2.ReadTimeout), httpx2.Client(base_url=server.url, timeout=0.3) as c:
        c.post("/v1/completions", json=endless | {"n": 8})  # one alone may be complete by then
    server.until_idle()
    assert server.metrics()["thermocline_requests_cancelled_total"] == cancelled + 1 + 8


def test_company_changes_no_answer(server: Served, llm: LLM) -> None:
    prompts = [
        f"{name} had a {thing}" for name in ("Tim", "Lily", "Ben") for thing in ("dog", "red ball", "friend")
    ]
    want = [llm.generate(p, SamplingParams(temperature=0, max_tokens=20)).text for p in prompts]
    got: dict[int, str] = {}

    def ask(i: int) -> None:
        body = {"prompt": prompts[i], "temperature": 0, "max_tokens": 20, "stream": bool(i % 2)}
        text = post(server, "/v1/completions", body)
        got[i] = (
            "".join(e["choices"][0]["text"] for e in events(text.text))
            if i % 2
            else text.json()["choices"][0]["text"]
        )

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [got[i] for i in range(len(prompts))] == want


# ---- lives and deaths


def children() -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True).stdout
    return [int(line) for line in found.split()]


def test_a_crash_is_told_and_the_next_request_is_answered() -> None:
    before = set(children())
    with served() as server:
        engine = next(iter(_engines(set(children()) - before)))
        error = _last_word(server, engine, signal.SIGKILL)
        assert (error["type"], error["code"]) == ("server_error", "engine_crashed")
        server.until(ready=True)
        assert post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        assert any("crashed (exit -9); it is started again" in line for line in server.notes)
        assert server.metrics()["thermocline_engine_restarts_total"] == 1
    assert not _engines(set(children()) - before)


def _last_word(server: Served, engine: int, sig: signal.Signals) -> Any:
    """The error that a stream ends with whose engine gets this signal in its midst."""
    body = {"prompt": STORY, "max_tokens": 480, "ignore_eos": True, "stream": True}
    with server.client() as c, c.stream("POST", "/v1/completions", json=body) as r:
        parts = r.iter_text()
        first = next(parts)
        os.kill(engine, sig)
        text = first + "".join(parts)
    assert "[DONE]" not in text
    return json.loads(text.strip().splitlines()[-1].removeprefix("data: "))["error"]


def _engines(pids: set[int]) -> list[int]:
    """Return the processes that compute, without the tracker that multiprocessing starts."""
    found = []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/cmdline", encoding="utf-8") as f:
                if "spawn_main" in f.read():
                    found.append(pid)
        except OSError:
            pass
    return found


def test_a_wedged_engine_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thermocline.server.process.engine_process.STALE_S", 0.5)
    before = set(children())
    with served() as server:
        engine = next(iter(_engines(set(children()) - before)))
        os.kill(engine, signal.SIGSTOP)
        try:
            server.until(ready=False)
            health = server.health()
            assert health["live"] is False and health["heartbeat_age_ms"] >= 500
            got = post(server, "/v1/completions", {"prompt": "a"})
            assert (got.status_code, got.json()["error"]["type"]) == (503, "unavailable_error")
            assert "retry-after" in got.headers
        finally:
            os.kill(engine, signal.SIGCONT)
        server.until(ready=True)


def test_an_engine_that_is_stopped_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """A thread that still held the engine made nanobind print 80 lines about leaks."""
    with served() as server:
        assert post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_an_engine_that_stays_silent_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hanging engine would keep its clients waiting for an hour, with 503 for all others."""
    monkeypatch.setattr("thermocline.server.process.engine_process.WATCH_S", 0.1)
    before = set(children())
    with served(limits=ServerLimits(limit_silence_s=1)) as server:
        engine = next(iter(_engines(set(children()) - before)))
        error = _last_word(server, engine, signal.SIGSTOP)
        assert error["code"] == "engine_crashed"
        server.until(ready=True)
        assert post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        assert any("has not been heard of for 1 s; it is ended" in line for line in server.notes)
        assert not {engine} & set(children())


def test_before_it_is_ready_it_says_so_and_a_bad_model_ends_it(tmp_path: Any) -> None:
    with served(wait=False) as server:
        health = server.health()
        assert health["ready"] is False and health["error"]["message"] == "Loading model"
        with server.client() as c:
            for got in (post(server, "/v1/completions", {"prompt": "a"}), c.get("/v1/models")):
                assert (got.status_code, got.headers["retry-after"]) == (503, "2")
        server.until()
    (tmp_path / "pack.json").write_text("{}")
    for bad, error in ({"model": str(tmp_path)}, BadFile), ({"ram": 0.001}, OutOfBudget):
        with pytest.raises(error), served(wait=False, **bad) as server:
            assert server.thread is not None
            server.thread.join(20)  # it ends by itself
            assert not server.thread.is_alive()
