"""The key of a session: a conversation's turns share it, other conversations have another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from thermocline.server.http.guard import Access, Guard, Message, Scope
from thermocline.server.http.limits import ServerLimits
from thermocline.server.replicas.front import Front, ReplicaLost
from thermocline.server.replicas.session_key import AnsweredSessions, session_key

SYSTEM = {"role": "system", "content": "You are a careful programmer. " * 50}


def turns(api: str, said: str) -> list[dict[str, Any]]:
    """Return the first and the second turn of a conversation, as a client of an API sends them."""
    first = {"role": "user", "content": said}
    more = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}]
    match api:
        case "chat":
            return [{"messages": [SYSTEM, first]}, {"messages": [SYSTEM, first, *more]}]
        case "messages":
            about = {"system": [{"type": "text", "text": SYSTEM["content"]}], "max_tokens": 5}
            return [{**about, "messages": [first]}, {**about, "messages": [first, *more]}]
        case "responses":
            about = {"instructions": SYSTEM["content"]}
            return [{**about, "input": [SYSTEM, first]}, {**about, "input": [SYSTEM, first, *more]}]
        case _:
            text = f"{said} " + "It was so. " * 30
            return [{"prompt": text}, {"prompt": text + "And then"}]


@pytest.mark.parametrize("api", ["chat", "responses", "completions"])
def test_turns_of_a_conversation_share_a_key_and_conversations_do_not(api: str) -> None:
    each = [[session_key({}, body) for body in turns(api, f"Question {n}")] for n in range(20)]
    assert all(first == second for first, second in each)
    assert len({first for first, _ in each}) == 20


def test_anthropic_s_turns_share_a_key() -> None:
    first, second = (session_key({}, body) for body in turns("messages", "Hello"))
    assert first != session_key({}, turns("messages", "Good day")[0])
    assert first == second


def test_a_named_session_is_the_key_whatever_is_said() -> None:
    a, b = turns("chat", "Hello")[0], turns("chat", "Good day")[0]
    for headers, more in (
        ({b"x-session-id": b"7"}, {}),
        ({}, {"user": "7"}),
        ({}, {"prompt_cache_key": "7"}),
        ({}, {"metadata": {"user_id": "7"}}),
    ):
        assert session_key(headers, a | more) == session_key(headers, b | more) != session_key({}, a)
    assert session_key({}, {}) is None and session_key({}, {"user": 5, "metadata": []}) is None


def test_the_oldest_answers_are_forgotten() -> None:
    answered = AnsweredSessions(most=2)
    for n in range(3):
        answered.add(f"resp_{n}", str(n))
    assert [answered.get(f"resp_{n}") for n in range(3)] == [None, "1", "2"]
    assert answered.get(["resp_1"]) is None


# ---- the front, with replicas of ten lines


class Told:
    """Replicas that note who was asked for which session, and are lost as often as told."""

    def __init__(self, lost: list[int]) -> None:
        self.keys: list[str] = []
        self.lost = lost  # messages that each call sends before its replica is lost

    async def answer(self, scope: Scope, body: bytes, key: str) -> AsyncIterator[list[Message]]:
        self.keys.append(key)
        begin = {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-type", b"text/event-stream")],
        }
        first = {"type": "http.response.body", "body": b'data: {"id": "resp_1"}\n\n', "more_body": True}
        last = {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}
        upto = self.lost.pop(0) if self.lost else 3
        for message in [begin, first, last][:upto]:
            yield [message]
        if upto < 3:
            raise ReplicaLost


def ask(front: Any, body: bytes) -> bytes:
    """Send a request through the guard, and return what the client gets."""
    sent = bytearray()

    async def asked() -> None:
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not given:
                await asyncio.Event().wait()
            return given.pop()

        async def send(message: Message) -> None:
            sent.extend(str(message["status"]).encode() if "status" in message else message["body"])

        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        path = "/v1/completions"
        scope: Scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
        scope.update({"query_string": b"", "headers": headers})
        guard = Guard(front, Access.of(), ServerLimits(), slots=1, methods=lambda path: None)
        await guard(scope, receive, send)

    asyncio.run(asked())
    return bytes(sent)


def test_a_replica_that_is_lost_before_it_spoke_is_replaced_unseen() -> None:
    replicas = Told([0, 0])
    assert ask(Front(replicas), b'{"prompt": "x"}').endswith(b"[DONE]\n\n")
    assert len(replicas.keys) == 3 and len(set(replicas.keys)) == 1


def test_a_replica_that_is_lost_in_a_stream_ends_it_in_an_error() -> None:
    replicas = Told([2])
    got = ask(Front(replicas), b'{"prompt": "x"}')
    assert got.startswith(b'200data: {"id": "resp_1"}') and b'"error"' in got and b"send it again" in got
    assert len(replicas.keys) == 1
    assert ask(Front(Told([0, 0, 0])), b'{"prompt": "x"}').startswith(b"503")


def test_a_request_that_continues_an_answer_goes_where_that_was() -> None:
    replicas = Told([])
    front = Front(replicas)
    ask(front, b'{"input": "Hello"}')
    ask(front, b'{"input": "Something else", "previous_response_id": "resp_1"}')
    ask(front, b'{"input": "Something else"}')
    assert replicas.keys[0] == replicas.keys[1] != replicas.keys[2]
