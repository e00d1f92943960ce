"""The description of the API: what it allows is taken, and what it does not is refused."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from scripted import Scripted, scripted
from test_server_tools import HERMES, TOOLS, named

from thermocline import server
from thermocline.server.api.openapi import STATUSES

jsonschema = pytest.importorskip("jsonschema")

WHAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
ASKED: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"tool_choice": None}, True),
    *(({"tool_choice": choice, "tools": TOOLS}, True)
      for choice in ("none", "auto", "required", named("move"))),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("stop")]}},
      "tools": TOOLS}, True),
    *(({"tool_choice": choice, "tools": TOOLS}, False) for choice in (
        "any", 1, [], {}, {"type": "function"}, {"type": "function", "function": {}}, {"type": "custom"},
        {"type": "function", "function": {"name": None}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [named("stop")]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}})),
    ({"logit_bias": {"0": -100, "4000": 0.5}}, True),
    ({"logit_bias": {}}, True),
    *(({"logit_bias": {key: 1}}, False) for key in ("", "x", "-1", "1.5", " 1", "²", "12345678901")),
    ({"logit_bias": {"1": "1"}}, False),
    ({"logit_bias": {"1": None}}, False),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, False),
    ({"stop": "x" * 256}, True), ({"stop": ["x"] * 16}, True), ({"stop": []}, True),
    ({"stop": "x" * 257}, False), ({"stop": ["x"] * 17}, False), ({"stop": ""}, False),
    ({"stop": [""]}, False),
    ({"n": 8}, True), ({"n": 9}, False), ({"logprobs": True, "top_logprobs": 20}, True),
    ({"logprobs": True, "top_logprobs": 21}, False),
    ({"response_format": {"type": "text"}}, True), ({"response_format": WHAT}, True),
    ({"response_format": {"type": "json_schema"}}, False), ({"response_format": {"type": "xml"}}, False),
    ({"response_format": {}}, False),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, True),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, False),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, False),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": "a"}]}]}, False),
]  # fmt: skip
LAST = {"role": "user", "content": "a"}
OTHERS: list[tuple[str, dict[str, Any], bool]] = [
    ("/v1/completions", {"prompt": ["a"] * 64}, True),
    ("/v1/completions", {"prompt": ["a"] * 65}, False),
    ("/v1/completions", {"prompt": [[1]] * 65}, False),
    ("/v1/completions", {"prompt": [1] * 65}, True),
    ("/v1/completions", {"prompt": [1, 4096]}, False),
    ("/v1/completions", {"prompt": [[0, -1]]}, False),
    ("/v1/completions", {"suffix": ""}, True),
    ("/infill", {"input_extra": [{"filename": "a"}]}, False),
    ("/infill", {"n_predict": -2}, False),
    ("/v1/completions", {"logprobs": 21}, False),
    ("/v1/embeddings", {"input": ["a"] * 2049}, False),
    ("/v1/embeddings", {"input": [[]]}, False),
    ("/v1/rerank", {"query": "a", "documents": ["a"] * 2049}, False),
    ("/v1/rerank", {"query": "a", "documents": [{}]}, False),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}, True),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "output_text"}]}]}, False),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": None}]}]},
        False,
    ),
    ("/v1/responses", {"input": "a", "metadata": {"a" * 64: "b" * 512}}, True),
    ("/v1/responses", {"input": "a", "metadata": {"a" * 65: "b"}}, False),
    ("/v1/responses", {"input": "a", "metadata": {"a": "b" * 513}}, False),
    *(
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": role, "content": [block]}, LAST]}, want)
        for role, block, want in (
            ("user", {"type": "tool_result", "tool_use_id": "a"}, True),
            ("user", {"type": "text", "text": "a"}, True),
            ("assistant", {"type": "tool_result", "tool_use_id": "a"}, False),
            ("assistant", {"type": "tool_use", "id": "a", "name": "f", "input": {}}, True),
            ("user", {"type": "tool_use", "id": "a", "name": "f", "input": {}}, False),
            ("user", {"type": "thinking", "thinking": "a"}, False),
            ("tool", {"type": "text", "text": "a"}, False),
        )
    ),
    ("/detokenize", {"tokens": [0, 4095]}, True),
    ("/detokenize", {"tokens": [400.0, 1e3]}, True),
    ("/v1/completions", {"max_tokens": 4.0, "temperature": 1.0}, True),
    ("/v1/completions", {"max_tokens": 4.5}, False),
    ("/detokenize", {"tokens": [4096]}, False),
    ("/detokenize", {"tokens": ["[Filtered]"]}, False),
    ("/detokenize", {"tokens": [True]}, False),
]


@pytest.fixture(scope="module")
def puppet() -> Iterator[Scripted]:
    with scripted(template=HERMES) as made:
        yield made


def said(puppet: Scripted, path: str) -> Any:
    """A validator of bodies, from the document alone."""
    document = httpx2.get(f"{puppet.url}/openapi.json", timeout=60).json()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return jsonschema.Draft202012Validator(document | schema)


@pytest.mark.parametrize("case", range(len(ASKED)))
def test_a_conversation_is_taken_as_the_document_says(puppet: Scripted, case: int) -> None:
    changes, want = ASKED[case]
    agrees(puppet, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]} | changes, want)


@pytest.mark.parametrize("case", range(len(OTHERS)))
def test_other_bodies_are_taken_as_the_document_says(puppet: Scripted, case: int) -> None:
    agrees(puppet, *OTHERS[case])


def agrees(puppet: Scripted, path: str, body: dict[str, Any], want: bool) -> None:
    assert said(puppet, path).is_valid(body) == want
    got = httpx2.post(f"{puppet.url}{path}", json=body, timeout=60)
    assert got.status_code == (200 if want else 400), got.text


def test_an_error_is_where_the_client_wrote_it(puppet: Scripted) -> None:
    """The way through pydantic's unions is not the way through a body."""
    for changes, param in [
        ({"stop": 5}, "stop"), ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": {"name": 1}}}, "tool_choice.function.name"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}, {"type": 5}]}]},
         "messages.0.content.1.type"),
    ]:  # fmt: skip
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
        body |= changes
        error = httpx2.post(f"{puppet.url}/v1/chat/completions", json=body, timeout=60).json()["error"]
        assert error["param"] == param and error["message"].startswith(f"{param}: "), error


def test_the_document_describes_a_stream_as_such_and_no_more(puppet: Scripted) -> None:
    """Said to be a string, each of its events was held against that by schemathesis."""
    paths = httpx2.get(f"{puppet.url}/openapi.json", timeout=60).json()["paths"]
    answers = [paths[p][m]["responses"]["200"]["content"] for p, m in (
        ("/v1/chat/completions", "post"), ("/v1/completions", "post"), ("/activity", "get"))]  # fmt: skip
    assert [a["text/event-stream"] for a in answers] == [{}, {}, {}]


def test_the_page_names_types_as_a_person_reads_them(puppet: Scripted) -> None:
    text = html.unescape(httpx2.get(f"{puppet.url}/docs", timeout=60).text)
    rows = dict(reversed(re.findall(r"<tr><td>(\w+)</td><td>(.*?)</td>", text)))  # the first of a name
    assert rows["tool_choice"] == '"none" | "auto" | "required" | NamedTool | AllowedTools | null'
    assert rows["prompt"] == "str | list[str] | list[Id] | list[list[Id]]"
    assert rows["json_schema"] == "dict[str, Any] | null"
    assert not re.search("0x|Info|typing", str(rows))


def test_the_document_names_every_status_of_a_refusal() -> None:
    """422 and 504 were sent and not described."""
    sources = Path(server.__file__ or "").parent.rglob("*.py")
    sent = {n for f in sources for n in re.findall(r"\bRefusal\(\s*(\d{3})", f.read_text(encoding="utf-8"))}
    assert {"400", "503"} < sent <= STATUSES.keys()
