"""`/v1/responses`: the prompt that a request becomes, OpenAI's events in order, responses kept by id."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from agent_shapes import CALL, PARAMETERS, SHOWN, first_stream, prompt, sent_events
from logged import logged
from scripted import FIGURES, Scripted, scripted

from thermocline.errors import IOFailure, ThermoclineError
from thermocline.server.api.agents import responses_input
from thermocline.server.api.agents.kept import KeptResponse, KeptResponses
from thermocline.server.api.schema import Message
from thermocline.server.http.limits import ServerLimits
from thermocline.server.http.refusal import Refusal
from thermocline.server.process.suspects import CrashesEngine

READ: Any = {"type": "function", "name": "read", "parameters": PARAMETERS, "strict": False}


@pytest.fixture(scope="module")
def puppet() -> Iterator[Scripted]:
    with scripted(template=SHOWN) as made:
        yield made


@pytest.fixture(scope="module")
def client(puppet: Scripted) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{puppet.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def post(puppet: Scripted, **body: Any) -> httpx2.Response:
    return httpx2.post(f"{puppet.url}/v1/responses", json={"input": "Hello", **body}, timeout=60)


# ---- requests


ITEMS: list[Any] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
    {"role": "user", "content": "Read a.py"},
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    },
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]},
    {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"path": "a.py"}'},
    {"type": "function_call", "call_id": "c2", "name": "read", "arguments": '{"path": "b.py"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "one"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
]


def test_items_become_messages_and_a_row_of_an_answers_items_one_of_them(puppet: Scripted) -> None:
    post(puppet, input=ITEMS, instructions="You code.", tools=[READ], reasoning={"effort": "xhigh"})
    assert prompt(puppet) == (
        "[system]You code.\n\nBe brief.[user]Read a.py"
        '[assistant](Hm.)Yes.<c1 read {"path": "a.py"}><c2 read {"path": "b.py"}>'
        "[tool]one[tool]two{tools: read }{effort: high}"
    )


def test_sampling_reaches_the_engine(puppet: Scripted) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    post(puppet, temperature=0.25, top_p=0.5, max_output_tokens=7,
         text={"format": {"type": "json_schema", "name": "a", "schema": schema}})  # fmt: skip
    asked = puppet.engine.asked[-1]
    assert (asked.temperature, asked.top_p, asked.max_tokens) == (0.25, 0.5, 7)
    assert asked.grammar is not None and '"integer"' in asked.grammar.text


@pytest.mark.parametrize("more", [{}, {"schema": {"type": "object", "default": None}}])
def test_a_schema_of_an_object_reaches_the_engine(puppet: Scripted, more: dict[str, Any]) -> None:
    """It was dropped without a word: {} fits any object."""
    format = {"type": "json_object", **more}
    assert post(puppet, text={"format": format}).json()["text"] == {"format": format}
    grammar = puppet.engine.asked[-1].grammar
    assert grammar is not None and ('"default"' in grammar.text) == bool(more)


NAMED = {"type": "function", "name": "read"}


@pytest.mark.parametrize(
    "choice", ["required", NAMED, {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}]
)
def test_a_call_that_is_asked_for_is_enforced(puppet: Scripted, choice: Any) -> None:
    assert post(puppet, tools=[READ], tool_choice=choice).status_code == 200
    grammar = puppet.engine.asked[-1].grammar
    assert grammar is not None and grammar.kind == "answer"
    assert post(puppet, tools=[READ]).status_code == 200 and puppet.engine.asked[-1].grammar is None


def test_calls_of_a_strict_tool_are_enforced(puppet: Scripted) -> None:
    assert post(puppet, tools=[READ | {"strict": True}]).status_code == 200
    assert puppet.engine.asked[-1].grammar is not None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}]}, "input"),
        ({"input": []}, "input"),
        ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"guided_regex": "a*"}, "guided_regex"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools.0"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "write"}, "tools": [READ]}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 1}}}}, "text"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(
    puppet: Scripted, body: dict[str, Any], param: str
) -> None:
    got = post(puppet, **body)
    assert got.status_code == 400 and got.json()["error"]["param"] == param, got.text


def test_what_changes_nothing_is_named_once_in_the_log(puppet: Scripted) -> None:
    """The fields of a request of Codex."""
    more: dict[str, Any] = {
        "client_metadata": {"a": "b"}, "prompt_cache_key": "k",
        "include": ["reasoning.encrypted_content", "web_search_call.results"],
        "store": False, "reasoning": {"summary": "auto"}, "text": {"verbosity": "low"},
        "tools": [
            READ, {"type": "web_search", "external_web_access": False}, {"type": "custom", "name": "x"}],
        "tool_choice": "auto", "parallel_tool_calls": False, "service_tier": "priority",
    }  # fmt: skip
    with logged() as lines:
        assert post(puppet, **more).status_code == post(puppet, **more, user="u").status_code == 200
    assert prompt(puppet) == "[user]Hello{tools: read }"
    found = [line for line in lines if "ignored" in line]
    assert len(found) == 3 and found[2].endswith("ignored 'user'"), found
    for name in ("client_metadata", "prompt_cache_key", "service_tier", "type web_search", "custom",
                 "verbosity", "include of web_search_call.results"):  # fmt: skip
        assert sum(name in line for line in found) == 1, (name, found)


# ---- answers


def test_a_stream_has_all_parts_in_order(puppet: Scripted, client: openai.OpenAI) -> None:
    puppet.engine.answer = ["<think>Let", " me see</think>", "I", " read.", CALL]
    got = post(puppet, stream=True, tools=[READ], include=["reasoning.encrypted_content"])
    assert got.headers["content-type"].startswith("text/event-stream")
    events = list(sent_events(got.text))
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    of_text = ["content_part.added", "output_text.delta", "output_text.delta", "output_text.done",
               "content_part.done"]  # fmt: skip
    of_thought = [name.replace("output_text", "reasoning_text") for name in of_text]
    of_call = ["function_call_arguments.delta", "function_call_arguments.done"]
    item = ["output_item.added", "output_item.done"]
    assert [e["type"].removeprefix("response.") for e in events] == [
        "created", "in_progress", item[0], *of_thought, item[1], item[0], *of_text, item[1],
        item[0], *of_call, item[1], "completed",
    ]  # fmt: skip
    indices = [e["output_index"] for e in events if "output_index" in e]
    assert indices == [0] * 7 + [1] * 7 + [2] * 4
    assert (events[0]["response"]["status"], events[0]["response"]["output"]) == ("in_progress", [])
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    added = [e["item"] for e in events if e["type"] == "response.output_item.added"]
    assert [(i["id"], i["type"]) for i in added] == [(i["id"], i["type"]) for i in done]
    assert {e["item_id"] for e in events if "item_id" in e} == {i["id"] for i in done}
    assert [i["id"].partition("_")[0] for i in done] == ["rs", "msg", "fc"]
    assert re.fullmatch("resp_[0-9a-f]{24}", events[0]["response"]["id"])
    thought, text, call = done
    assert thought["content"] == [{"type": "reasoning_text", "text": "Let me see"}]
    assert text["content"][0]["text"] == "I read." and call["arguments"] == '{"path": "a.py"}'
    usage = events[-1]["response"]["usage"]
    assert usage["input_tokens"] == FIGURES.prompt_tokens and usage["output_tokens"] == FIGURES.tokens
    assert usage["output_tokens_details"]["reasoning_tokens"] == 2

    whole = client.responses.create(model="scripted", input="Hello", tools=[READ])
    assert [i.type for i in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.output_text == "I read." and whole.status == "completed"


def test_an_answers_items_sent_back_are_the_message_that_they_were(
    puppet: Scripted, client: openai.OpenAI
) -> None:
    """Codex sends a thought back by its encrypted content alone."""
    puppet.engine.answer = ["<think>Let me see</think>", "I read.", CALL]
    made = client.responses.create(
        model="scripted", input="Hello", tools=[READ], include=["reasoning.encrypted_content"]
    )
    items: list[Any] = [i.model_dump(exclude_none=True) for i in made.output]
    items[0].pop("content")
    call = items[2]["call_id"]
    result: Any = {"type": "function_call_output", "call_id": call, "output": "x"}
    client.responses.create(model="scripted", input=[{"role": "user", "content": "Hello"}, *items, result])
    want = f'[user]Hello[assistant](Let me see)I read.<{call} read {{"path": "a.py"}}>[tool]x'
    assert prompt(puppet) == want
    client.responses.create(model="scripted", input=[result], previous_response_id=made.id)
    assert prompt(puppet) == want


def test_the_official_client_reads_the_stream(puppet: Scripted, client: openai.OpenAI) -> None:
    puppet.engine.answer = ["<think>Hm</think>", "I", " read.", CALL]
    with client.responses.stream(model="scripted", input="Hello", tools=[READ]) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "I read." and final.usage is not None
    assert final.output[2].type == "function_call" and final.output[2].name == "read"


def test_an_answer_that_is_cut_is_incomplete(puppet: Scripted) -> None:
    puppet.engine.answer, puppet.engine.reason = ["Once", " upon"], "length"
    try:
        *_, item, last = sent_events(post(puppet, stream=True).text)
        whole = post(puppet).json()
    finally:
        puppet.engine.reason = "stop"
    assert item["item"]["status"] == "incomplete" and last["type"] == "response.incomplete"
    for made in (last["response"], whole):
        assert made["status"] == "incomplete"
        assert made["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [i["status"] for i in made["output"]] == ["incomplete"]


def test_a_call_that_is_whole_is_complete_in_an_answer_that_is_cut(puppet: Scripted) -> None:
    puppet.engine.answer, puppet.engine.reason = [CALL], "length"
    try:
        *_, item, last = sent_events(post(puppet, stream=True, tools=[READ]).text)
    finally:
        puppet.engine.reason = "stop"
    assert last["type"] == "response.incomplete" and last["response"]["output"] == [item["item"]]
    assert item["item"]["status"] == "completed"


@pytest.mark.parametrize(
    ("error", "status", "code"), [(IOFailure, 500, "server_error"), (CrashesEngine, 422, "invalid_prompt")]
)
def test_an_engine_that_fails_ends_the_stream_in_failed(
    puppet: Scripted, error: type[ThermoclineError], status: int, code: str
) -> None:
    """A client does not send again what was wrong."""
    puppet.engine.answer, puppet.engine.failing, puppet.engine.failure = ["Once"], True, error
    try:
        *_, last = sent_events(post(puppet, stream=True).text)
        assert post(puppet).status_code == status
    finally:
        puppet.engine.failing, puppet.engine.failure = False, IOFailure
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": code, "message": "the disk is on fire"}


def test_a_stream_that_takes_too_long_ends_in_an_error() -> None:
    with scripted(template=SHOWN, limits=ServerLimits(limit_request_s=0.3)) as made:
        made.engine.endless = True
        *_, last = sent_events(first_stream(lambda: post(made, stream=True)))
        assert (last["type"], last["code"]) == ("error", "504") and "0.3 s" in last["message"]
        with (
            openai.OpenAI(base_url=f"{made.url}/v1", api_key="any", max_retries=0) as client,
            pytest.raises(openai.APIError, match="took more than"),
        ):
            list(client.responses.create(model="scripted", input="Hello", stream=True))


def test_a_client_that_leaves_ends_its_answer_which_is_not_kept(puppet: Scripted) -> None:
    puppet.engine.answer, puppet.engine.endless = ["Once"], True
    puppet.engine.gone.clear()
    try:
        with httpx2.stream(
            "POST", f"{puppet.url}/v1/responses", json={"input": "Hello", "stream": True}
        ) as got:
            begun = next(line for line in got.iter_lines() if line.startswith("data: "))
        assert puppet.engine.gone.wait(5), "the engine was not told"
    finally:
        puppet.engine.endless = False
    id = json.loads(begun.removeprefix("data: "))["response"]["id"]
    assert httpx2.get(f"{puppet.url}/v1/responses/{id}", timeout=60).status_code == 404


# ---- responses that are kept


def test_a_conversation_goes_on_from_a_response(puppet: Scripted, client: openai.OpenAI) -> None:
    puppet.engine.answer = ["One."]
    one = client.responses.create(model="scripted", input="1?", instructions="Count.")
    puppet.engine.answer = ["Two."]
    two = client.responses.create(model="scripted", input="2?", previous_response_id=one.id)
    assert prompt(puppet) == "[user]1?[assistant]One.[user]2?", "instructions are those of one request"
    assert two.previous_response_id == one.id
    client.responses.create(model="scripted", input="3?", previous_response_id=two.id, instructions="Count.")
    assert prompt(puppet) == "[system]Count.[user]1?[assistant]One.[user]2?[assistant]Two.[user]3?"
    assert client.responses.retrieve(two.id) == two
    client.responses.delete(two.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(two.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(two.id)
    with pytest.raises(openai.BadRequestError, match="not kept"):
        client.responses.create(model="scripted", input="3?", previous_response_id=two.id)


def test_a_response_that_is_not_to_be_kept_is_not(puppet: Scripted, client: openai.OpenAI) -> None:
    made = client.responses.create(model="scripted", input="1?", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_the_oldest_responses_are_forgotten_first() -> None:
    for most, most_bytes in ((2, 1000), (10, 25)):
        kept = KeptResponses(most, most_bytes)
        for id in "abc":
            kept.keep(id, KeptResponse(b"12345", (b"67890",)))
        assert kept.get("b").size == kept.get("c").size == 10
        with pytest.raises(Refusal):
            kept.get("a")
        kept.drop("b")
        kept.keep("d", KeptResponse(b"12345", (b"67890",)))
        assert kept.get("c") and kept.get("d"), "what is dropped makes room"


def test_a_long_conversation_that_is_kept_is_read_apart_and_counted() -> None:
    """A short body that goes on from megabytes held up everybody, and counted as a short one."""
    limits = ServerLimits(limit_bodies_bytes=1 << 20)
    with scripted(template=SHOWN, limits=limits) as made:
        made.engine.answer = ["x" * 1000]
        id = post(made, input="a" * 400_000).json()["id"]
        readers: list[str] = []
        read = responses_input.read

        def watched(kept: bytes) -> list[Message]:
            readers.append(threading.current_thread().name)
            return read(kept)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(responses_input, "read", watched)
            got = post(made, previous_response_id=id, input="a")
            assert got.status_code == 200 and {r.partition("_")[0] for r in readers} == {"bodies"}
            last = post(made, previous_response_id=got.json()["id"], input="a" * 700_000)
        assert last.status_code == 503 and "too many large requests" in last.text
        assert post(made, input="a" * 900_000).status_code == 200, "what was counted is free again"


def test_a_server_can_keep_none() -> None:
    with scripted(template=SHOWN, limits=ServerLimits(limit_kept_responses=0)) as made:
        id = post(made).json()["id"]
        assert post(made, previous_response_id=id).status_code == 400
