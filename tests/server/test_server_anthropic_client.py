"""`/v1/messages` as Anthropic's official client sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from agent_shapes import CALL, PARAMETERS, SHOWN, prompt
from scripted import FIGURES, Scripted, scripted

anthropic = pytest.importorskip("anthropic", reason="needs the extra test-all")
pytestmark = pytest.mark.oracle

ASKED: dict[str, Any] = {
    "model": "scripted", "max_tokens": 50, "messages": [{"role": "user", "content": "Hello"}],
    "tools": [{"name": "read", "input_schema": PARAMETERS}],
}  # fmt: skip


@pytest.fixture(scope="module")
def puppet() -> Iterator[Scripted]:
    with scripted(template=SHOWN) as made:
        yield made


@pytest.fixture(scope="module")
def client(puppet: Scripted) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=puppet.url, api_key="any", max_retries=0) as made:
        yield made


def test_it_reads_whole_answers_and_streams(puppet: Scripted, client: Any) -> None:
    puppet.engine.answer = ["<think>Let me see</think>", "I", " read.", CALL]
    whole = client.messages.create(**ASKED)
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    for made in (whole, final):
        thought, said, call = made.content
        assert (thought.type, thought.thinking) == ("thinking", "Let me see") and thought.signature
        assert (said.type, said.text) == ("text", "I read.") and said.text == text
        assert (call.type, call.name, call.input) == ("tool_use", "read", {"path": "a.py"})
        assert (made.stop_reason, made.usage.output_tokens) == ("tool_use", FIGURES.tokens)


def test_an_answer_sent_back_is_the_message_that_it_was(puppet: Scripted, client: Any) -> None:
    puppet.engine.answer = ["<think>Let me see</think>", "I read.", CALL]
    made = client.messages.create(**ASKED)
    id = made.content[2].id
    result = {"type": "tool_result", "tool_use_id": id, "content": "x"}
    answer = [{"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    client.messages.create(**ASKED | {"messages": [*ASKED["messages"], *answer]})
    assert prompt(puppet) == (
        f'[user]Hello[assistant](Let me see)I read.<{id} read {{"path": "a.py"}}>[tool]x{{tools: read }}'
    )


def test_it_counts_tokens(puppet: Scripted, client: Any) -> None:
    asked = {k: v for k, v in ASKED.items() if k != "max_tokens"}
    counted = client.messages.count_tokens(**asked).input_tokens
    client.messages.create(**ASKED)
    assert counted == len(puppet.engine.prompts[-1])


def test_it_raises_the_error_that_ends_a_stream(puppet: Scripted, client: Any) -> None:
    puppet.engine.answer, puppet.engine.failing = ["Once"], True
    try:
        with (
            pytest.raises(anthropic.APIStatusError, match="on fire"),
            client.messages.stream(**ASKED) as stream,
        ):
            stream.until_done()
    finally:
        puppet.engine.failing = False


def test_it_knows_the_types_of_errors() -> None:
    with scripted(template=SHOWN, keys=["sesame"]) as made:
        for key in ({"api_key": "sesame"}, {"auth_token": "sesame"}):
            with anthropic.Anthropic(base_url=made.url, max_retries=0, **key) as client:
                assert client.messages.create(**ASKED).type == "message"
                with pytest.raises(anthropic.NotFoundError) as missing:
                    client.messages.create(**ASKED | {"model": "claude"})
                assert missing.value.type == "not_found_error"
        with anthropic.Anthropic(base_url=made.url, max_retries=0, api_key="open") as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                client.messages.create(**ASKED)
            assert refused.value.type == "authentication_error"
