"""`/v1/messages`: the prompt that a request becomes, Anthropic's events in their order, its errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from agent_shapes import CALL, PARAMETERS, SHOWN, first_stream, prompt, sent_events
from logged import logged
from scripted import FIGURES, Scripted, scripted

from thermocline.server.http.limits import ServerLimits

HELLO = [{"role": "user", "content": "Hello"}]
READ: dict[str, Any] = {"name": "read", "input_schema": PARAMETERS}
HEADER = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={};"


@pytest.fixture(scope="module")
def puppet() -> Iterator[Scripted]:
    with scripted(template=SHOWN) as made:
        yield made


def post(puppet: Scripted, path: str = "", **body: Any) -> httpx2.Response:
    asked = {"messages": HELLO, "max_tokens": 50, **body}
    return httpx2.post(f"{puppet.url}/v1/messages{path}", json=asked, timeout=60)


# ---- requests


MESSAGES: list[Any] = [
    {"role": "user", "content": [
        {"type": "text", "text": "Read a.py"},
        {"type": "text", "text": "and b.py", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Hm.", "signature": "thermocline"},
        {"type": "text", "text": "Yes."},
        {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a.py"}},
        {"type": "tool_use", "id": "t2", "name": "read", "input": {"path": "b.py"}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": "one"},
        {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "two"}],
         "is_error": True},
        {"type": "text", "text": "Go on."}]},
]  # fmt: skip


def test_blocks_become_messages_and_each_result_one_of_its_own(puppet: Scripted) -> None:
    system = [{"type": "text", "text": "You code."}, {"type": "text", "text": "Be brief."}]
    got = post(puppet, messages=MESSAGES, system=system, tools=[READ], output_config={"effort": "max"})
    assert got.status_code == 200, got.text
    assert prompt(puppet) == (
        "[system]You code.\n\nBe brief.[user]Read a.py\n\nand b.py"
        '[assistant](Hm.)Yes.<t1 read {"path": "a.py"}><t2 read {"path": "b.py"}>'
        "[tool]one[tool]two[user]Go on.{tools: read }{effort: high}"
    )


def test_sampling_reaches_the_engine(puppet: Scripted) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    post(puppet, temperature=0.25, top_p=0.5, top_k=7, stop_sequences=["x", "y"],
         output_config={"format": {"type": "json_schema", "schema": schema}})  # fmt: skip
    asked = puppet.engine.asked[-1]
    assert (asked.temperature, asked.top_p, asked.top_k) == (0.25, 0.5, 7)
    assert (asked.max_tokens, asked.stop) == (50, ("x", "y"))
    assert asked.grammar is not None and '"integer"' in asked.grammar.text


@pytest.mark.parametrize(
    ("choice", "enforced"),
    [
        ({"type": "any"}, True),
        ({"type": "tool", "name": "read"}, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, True),
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
    ],
)
def test_a_choice_of_tools_is_enforced(puppet: Scripted, choice: Any, enforced: bool) -> None:
    assert post(puppet, tools=[READ], tool_choice=choice).status_code == 200
    assert (puppet.engine.asked[-1].grammar is not None) == enforced
    assert ("{tools: read }" in prompt(puppet)) == (choice["type"] != "none")


@pytest.mark.parametrize("strict", [True, False])
def test_calls_of_a_strict_tool_are_enforced(puppet: Scripted, strict: bool) -> None:
    assert post(puppet, tools=[READ | {"strict": strict}]).status_code == 200
    assert (puppet.engine.asked[-1].grammar is not None) == strict


@pytest.mark.parametrize(("kind", "on"), [("enabled", "True"), ("adaptive", "True"), ("disabled", "False")])
def test_thinking_is_the_templates_switch(puppet: Scripted, kind: str, on: str) -> None:
    post(puppet, thinking={"type": kind})
    assert prompt(puppet) == f"[user]Hello{{thinking: {on}}}"
    post(puppet)
    assert prompt(puppet) == "[user]Hello", "the template decides"


@pytest.mark.parametrize(
    ("template", "kind", "is_ignored"),
    [
        ("", "enabled", True), ("", "disabled", False),
        ("{# <think> #}", "enabled", False), ("{# <think> #}", "disabled", True),
    ],
)  # fmt: skip
def test_thinking_that_a_template_cannot_switch_is_named_in_the_log(
    template: str, kind: str, is_ignored: bool
) -> None:
    said = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with scripted(template=said + template) as made, logged() as lines:
        assert post(made, thinking={"type": kind, "budget_tokens": None}).status_code == 200
    assert any(f"'thinking of type {kind}'" in line for line in lines) == is_ignored


def test_claude_codes_header_is_not_part_of_the_prompt(puppet: Scripted) -> None:
    """It differs in each request: the first 32 tokens would differ, and nothing could be reused."""
    rest = {"type": "text", "text": "You are an agent."}
    with logged() as lines:
        for hash in ("36ee5", "0aaa9"):
            post(puppet, system=[{"type": "text", "text": HEADER.format(hash)}, rest])
            assert prompt(puppet) == "[system]You are an agent.[user]Hello"
    assert sum("x-anthropic-billing-header" in line for line in lines) == 1
    line = HEADER.format("0")
    for system, want in (
        (line, line),
        ([rest, {"type": "text", "text": line}], f"You are an agent.\n\n{line}"),
        ([{"type": "text", "text": f"{line}\nYou are an agent."}], f"{line}\nYou are an agent."),
    ):
        post(puppet, system=system)
        assert prompt(puppet) == f"[system]{want}[user]Hello", "no other text is touched"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t",
                                                    "content": [{"type": "image", "source": {}}]}]}]},
        {"messages": [{"role": "user", "content": [
            {"type": "tool_use", "id": "t", "name": "f", "input": {}}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
        {"messages": [*HELLO, {"role": "assistant", "content": "{"}]},
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"content": "x"}]},
        {"max_tokens": None},
        {"mcp_servers": [{"type": "url"}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tool_choice": {"type": "tool", "name": "write"}, "tools": [READ]},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": 1}}}},
        {"stop_sequences": [""]},
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_in_anthropics_shape(
    puppet: Scripted, body: dict[str, Any]
) -> None:
    got = post(puppet, **body)
    error = got.json()
    assert got.status_code == 400 and error["type"] == "error", got.text
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["message"].startswith(next(iter(body)))


def test_what_changes_nothing_is_named_once_in_the_log(puppet: Scripted) -> None:
    """The fields of a request of Claude Code."""
    more: dict[str, Any] = {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "speed": "standard",
        "tools": [READ | {"cache_control": {"type": "ephemeral"}}],
        "thinking": {"type": "enabled", "budget_tokens": 31999}, "temperature": 1,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }  # fmt: skip
    with logged() as lines:
        for _ in range(2):
            got = httpx2.post(
                f"{puppet.url}/v1/messages?beta=true", json={"messages": HELLO, "max_tokens": 5} | more,
                headers={"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}, timeout=60,
            )  # fmt: skip
            assert got.status_code == 200, got.text
    found = [line for line in lines if "ignored" in line]
    for name in ("metadata", "service_tier", "speed", "thinking.budget_tokens"):
        assert sum(name in line for line in found) == 1, (name, found)


# ---- answers


def test_a_stream_has_all_blocks_in_order(puppet: Scripted) -> None:
    puppet.engine.answer = ["<think>Let", " me see</think>", "I", " read.", CALL]
    events = list(sent_events(post(puppet, stream=True, tools=[READ]).text))
    block = ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"]
    thought = [*block[:3], "content_block_delta", block[3]]
    assert [e["type"] for e in events] == [
        "message_start", "ping", *thought, *block, block[0], *block[2:], "message_delta", "message_stop"
    ]  # fmt: skip
    assert [e["index"] for e in events if "index" in e] == [0] * 5 + [1] * 4 + [2] * 3
    kinds = ["thinking_delta", "thinking_delta", "signature_delta", "text_delta", "text_delta",
             "input_json_delta"]  # fmt: skip
    assert [e["delta"]["type"] for e in events if e["type"] == "content_block_delta"] == kinds
    begun, last = events[0]["message"], events[-2]
    assert (begun["content"], begun["stop_reason"], begun["usage"]["output_tokens"]) == ([], None, 0)
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == FIGURES.tokens


@pytest.mark.parametrize(
    ("reason", "stop", "want"),
    [("stop", None, "end_turn"), ("length", None, "max_tokens"), ("stop", "END", "stop_sequence")],
)
def test_the_reason_of_an_end_is_told(puppet: Scripted, reason: str, stop: str | None, want: str) -> None:
    puppet.engine.answer, puppet.engine.reason, puppet.engine.stop_text = ["Once"], reason, stop
    try:
        whole = post(puppet).json()
        *_, delta, _stop = sent_events(post(puppet, stream=True).text)
    finally:
        puppet.engine.reason, puppet.engine.stop_text = "stop", None
    assert (whole["stop_reason"], whole["stop_sequence"]) == (want, stop)
    assert delta["delta"] == {"stop_reason": want, "stop_sequence": stop}


@pytest.mark.parametrize("arguments", ["[1]", "5", '{"path": NaN}', '{"path": [1e999]}'])
def test_arguments_that_are_no_object_still_reach_the_client(puppet: Scripted, arguments: str) -> None:
    """Numbers that are not finite are no JSON: they were a 500."""
    puppet.engine.answer = [f'<tool_call>{{"name": "read", "arguments": {arguments}}}</tool_call>']
    (call,) = post(puppet, tools=[READ]).json()["content"]
    events = list(sent_events(post(puppet, tools=[READ], stream=True).text))
    given = next(e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta")
    assert json.loads(given) == call["input"] and list(call["input"]) == ["arguments"]


def test_a_call_that_is_cut_off_in_harmony_is_no_call() -> None:
    """It was a finished tool_use, whose input was a part of its arguments."""
    head = "<|channel|>commentary to=functions.read <|constrain|>json<|message|>"
    with scripted(template=SHOWN + "{# <|channel|><|message|><|call|> #}") as made:
        made.engine.answer, made.engine.reason = [head, '{"path": "a'], "length"
        got = post(made, tools=[READ]).json()
    assert (got["content"], got["stop_reason"]) == ([{"type": "text", "text": '{"path": "a'}], "max_tokens")


def test_a_call_with_half_a_pair_of_surrogates_can_be_sent_back(puppet: Scripted) -> None:
    """It was a 500, and with OpenAI's APIs a conversation that was refused from then on."""
    puppet.engine.answer = [r'<tool_call>{"name": "read", "arguments": {"path": "\ud800!"}}</tool_call>']
    content = post(puppet, tools=[READ]).json()["content"]
    assert content[0]["input"] == {"path": "\ufffd!"}
    said = [*HELLO, {"role": "assistant", "content": content}, *HELLO]
    assert post(puppet, messages=said).status_code == 200


def test_messages_without_a_block_are_empty_ones(puppet: Scripted) -> None:
    """An answer may have none, and agents send it back."""
    empty: list[Any] = [{"role": role, "content": []} for role in ("user", "assistant", "system", "user")]
    assert post(puppet, messages=empty).status_code == 200
    assert prompt(puppet) == "[user][assistant][system][user]"


def test_a_prompt_that_is_too_long_is_refused_in_anthropics_words() -> None:
    """By them Claude Code knows that it has to shorten the conversation."""
    with scripted(template=SHOWN, context=8) as made:
        got = post(made, messages=[{"role": "user", "content": "Once upon a time there was a little fox"}])
    assert got.status_code == 400
    assert got.json()["error"]["message"].startswith("prompt is too long: the prompt has ")


def test_tokens_are_counted_as_they_are_computed(puppet: Scripted) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "system": "You code.", "tools": [READ]}
    counted = httpx2.post(f"{puppet.url}/v1/messages/count_tokens", json=body, timeout=60).json()
    post(puppet, **body)
    assert counted == {"input_tokens": len(puppet.engine.prompts[-1])} and counted["input_tokens"] > 20


def test_an_answer_may_be_the_last_message_where_tokens_are_counted(puppet: Scripted) -> None:
    """A prefilled answer was closed and answered anew, without a word."""
    said = [*HELLO, {"role": "assistant", "content": "So"}]
    counted = httpx2.post(f"{puppet.url}/v1/messages/count_tokens", json={"messages": said}, timeout=60)
    assert counted.status_code == 200 and counted.json()["input_tokens"] > 3
    refused = post(puppet, messages=said).json()["error"]["message"]
    assert refused.startswith("messages: the last one is the assistant's") and "\n" not in refused


# ---- errors and keys


def test_an_engine_that_fails_ends_the_stream_in_an_error(puppet: Scripted) -> None:
    puppet.engine.answer, puppet.engine.failing = ["Once"], True
    try:
        *_, last = sent_events(post(puppet, stream=True).text)
    finally:
        puppet.engine.failing = False
    assert last == {"type": "error", "error": {"type": "api_error", "message": "the disk is on fire"}}


def test_a_stream_that_takes_too_long_ends_in_an_error() -> None:
    with scripted(template=SHOWN, limits=ServerLimits(limit_request_s=0.3)) as made:
        made.engine.endless = True
        *_, last = sent_events(first_stream(lambda: post(made, stream=True)))
    assert last["type"] == "error" and last["error"]["type"] == "timeout_error"


def test_a_client_that_leaves_ends_its_answer(puppet: Scripted) -> None:
    puppet.engine.answer, puppet.engine.endless = ["Once"], True
    puppet.engine.gone.clear()
    asked = {"messages": HELLO, "max_tokens": 50, "stream": True}
    try:
        with httpx2.stream("POST", f"{puppet.url}/v1/messages", json=asked) as got:
            next(line for line in got.iter_lines() if "content_block_delta" in line)
        assert puppet.engine.gone.wait(5), "the engine was not told"
    finally:
        puppet.engine.endless = False


@pytest.mark.parametrize("key", [{"x-api-key": "sesame"}, {"authorization": "Bearer sesame"}])
def test_both_forms_of_a_key_are_taken_and_errors_have_their_types(key: dict[str, str]) -> None:
    with scripted(template=SHOWN, keys=["sesame"]) as made:

        def answer(headers: dict[str, str], **body: Any) -> tuple[int, str]:
            asked = {"messages": HELLO, "max_tokens": 5, **body}
            got = httpx2.post(f"{made.url}/v1/messages", json=asked, headers=headers, timeout=60)
            return got.status_code, got.json().get("error", {}).get("type", "")

        assert answer(key) == (200, "")
        assert answer({}) == answer({"x-api-key": "open"}) == (401, "authentication_error")
        assert answer(key, model="claude") == (404, "not_found_error")
        wrong = httpx2.get(f"{made.url}/v1/messages", headers=key, timeout=60)
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")
        other = httpx2.get(f"{made.url}/v1/models", timeout=60)
        assert other.json()["error"]["code"] == 401, "other routes keep OpenAI's shape"
