"""The cost of a body: the costliest bodies of `bench/serve_bodies.py`, counted instead of timed.

A server that delays others by 100 ms spent it on many errors, objects or bytes, or on work on the event
loop's thread. Each is counted here; `bench/serve.py bodies` measures the milliseconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
import random
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from pydantic import BaseModel, ValidationError
from raw_http import post, serving, wait_until
from scripted import Scripted, scripted

from thermocline.server.api import conversation, model_routes, responses, schema, state
from thermocline.server.http import body, posted
from thermocline.server.http.limits import ServerLimits
from thermocline.server.http.refusal import Refusal

BENCH = str(Path(__file__).parents[2] / "bench/server")
MIB = 1 << 20
KINDS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": schema.ChatRequest,
    "/v1/completions": schema.CompletionRequest,
    "/tokenize": schema.TokenizeRequest,
    "/detokenize": schema.DetokenizeRequest,
}


def bodies() -> Any:
    sys.path.insert(0, BENCH)
    try:
        return importlib.import_module("serve_bodies")
    finally:
        sys.path.remove(BENCH)
        sys.modules.pop("serve_bodies")


LISTS = list(bodies().lists())
TEXTS = list(bodies().texts(8 * MIB - 256))


def named(posted: Any) -> str:
    return f"{posted.path} {posted.about}"


def costs(posted: Any) -> tuple[int, int]:
    """Return the cost of reading and checking a body: (bytes at the peak, validation errors)."""
    arrived = bytearray(posted.body)
    errors = 0
    tracemalloc.start()
    try:
        value, _ = body.parse_json(arrived, ServerLimits())
        kind = KINDS[posted.path]
        assert issubclass(kind, schema.ApiObject)
        kind.model_validate(value, context=ServerLimits())
    except Refusal:
        pass
    except ValidationError as e:
        errors = e.error_count()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak + len(posted.body), errors


# One list in the quick suite; the others cost a second each.
EACH_LIST = [pytest.param(x, marks=[pytest.mark.slow] * (i > 0)) for i, x in enumerate(LISTS)]


@pytest.mark.parametrize("posted", EACH_LIST, ids=named)
def test_a_quarter_of_a_million_bad_values_make_one_error(posted: Any) -> None:
    """260,000 nulls for a prompt made 780,001, in 770 MiB, while all others waited for 2 s."""
    peak, errors = costs(posted)
    assert errors <= 1 and peak <= 64 * MIB


@pytest.mark.parametrize("posted", TEXTS, ids=named)
def test_a_text_as_long_as_a_body_takes_64_mib(posted: Any) -> None:
    """Nine million empty texts without commas took 755 MiB; a text of which one character is an emoji 145."""
    assert costs(posted)[0] <= 64 * MIB


# ---- JSON is looked at in pieces


def test_a_piece_ends_between_two_escapes() -> None:
    rng = random.Random(5)
    for _ in range(300):
        escapes = (b"\\\\", b'\\"', b"\\u0061", b"\\n", b"a", b'"', b"[", b"]")
        parts = [rng.choice(escapes) for _ in range(rng.randrange(60))]
        text = b"".join(parts)
        ends = {len(b"".join(parts[:n])) for n in range(len(parts) + 1)}
        at = 0
        for piece in body.pieces(text, size=8):
            assert 0 < len(piece) <= 8
            at += len(piece)
            assert at in ends, text
        assert at == len(text)


def test_values_are_counted_across_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same texts are refused as without pieces."""
    text = json.dumps(
        {'a"\\': [1, [2, {"b": "[[,,\\"}], {}] * 3, "c": {"d": ["\u00e9\\", "\U0001f600"]}}
    ).encode()
    values = 1
    while not fits(text, values):
        values += 1
    monkeypatch.setattr(body, "pieces", lambda text, of=body.pieces: of(text, size=7))
    assert fits(text, values) and not fits(text, values - 1)


def fits(text: bytes, values: int) -> bool:
    try:
        body.parse_json(bytearray(text), ServerLimits(limit_json_values=values))
    except Refusal:
        return False
    return True


def test_the_memory_of_a_text_is_bounded_too() -> None:
    """Escapes are one character each; an emoji, escaped or not, makes every character take four bytes."""
    limits = ServerLimits(limit_body_bytes=1000)
    for fits in ("a" * 900, "\\u00e9" * 160, "\\ud83d\\ude00" * 80, "\U0001f600" * 240):
        body.parse_json(bytearray(json.dumps({"a": 0})[:-2].encode() + f'"{fits}"}}'.encode()), limits)
    for wide in ("a" * 600 + "\U0001f600", "a" * 600 + "\\ud83d\\ude00"):
        with pytest.raises(Refusal, match="in memory") as caught:
            body.parse_json(bytearray(f'{{"a":"{wide}"}}'.encode()), limits)
        assert caught.value.status == 413


# ---- beside the event loop


@pytest.fixture(scope="module")
def puppet() -> Iterator[Scripted]:
    with scripted() as made:
        yield made


def test_large_bodies_are_read_checked_and_answered_on_another_thread(
    puppet: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: dict[str, set[str]] = {}

    def watch(module: Any, name: str) -> None:
        work: Callable[..., Any] = getattr(module, name)

        def watched(*args: Any, **more: Any) -> Any:
            where.setdefault(name, set()).add(threading.current_thread().name)
            return work(*args, **more)

        monkeypatch.setattr(module, name, watched)

    for module, name in (
        (posted, "parse_json"), (state, "_validated"), (responses, "json_bytes"),
        (model_routes, "json_bytes"), (model_routes, "token_pieces"),
        (conversation, "messages"), (schema, "sampling_params"),
    ):  # fmt: skip
        watch(module, name)
    text = "a b " * 8000
    user = {"role": "user", "content": text}
    for path, asked in (
        ("/v1/chat/completions", {"messages": [user]}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": [1] * 40_000}),
        ("/tokenize", {"content": text}),
        ("/tokenize", {"content": text, "with_pieces": True}),
        ("/detokenize", {"tokens": [300] * 10_000}),
    ):
        got = httpx2.post(f"{puppet.url}{path}", json=asked, timeout=60)
        assert got.status_code == 200, got.text
    assert len(where) == 6
    assert {thread for threads in where.values() for thread in threads}.isdisjoint({"scripted"})


def test_a_token_s_text_is_written_once_however_often_it_is_there(
    puppet: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of 1 MB took 24 s, on the event loop."""
    asked: list[int] = []
    piece = responses._piece
    monkeypatch.setattr(responses, "_piece", lambda tokenizer, i: asked.append(i) or piece(tokenizer, i))
    got = httpx2.post(
        f"{puppet.url}/tokenize", json={"content": "the cat \x01é" * 2000, "with_pieces": True}, timeout=60
    ).json()["tokens"]
    assert len(got) > 5000 and len(asked) == len({t["id"] for t in got}) < 20
    assert all(t["piece"] == piece(puppet.model.tokenizer, t["id"]) for t in got)


def test_a_prompt_does_not_wait_for_conversions(puppet: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """/tokenize and /detokenize had one turn with all prompts: a chat waited for 13 s behind one of them."""
    begun, go = threading.Event(), threading.Event()
    tokenizer = puppet.model.tokenizer
    monkeypatch.setattr(tokenizer, "decode", lambda ids: (begun.set(), go.wait(60), "x")[-1])
    told: list[int] = []
    ask = partial(httpx2.post, f"{puppet.url}/detokenize", json={"tokens": [1]}, timeout=90)
    threads = [threading.Thread(target=lambda: told.append(ask().status_code)) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        assert begun.wait(60)
        user = {"role": "user", "content": "a"}
        got = httpx2.post(f"{puppet.url}/v1/chat/completions", json={"messages": [user]}, timeout=30)
        assert got.status_code == 200 and told == []
    finally:
        go.set()
        for thread in threads:
            thread.join()
    assert told == [200, 200]


def test_a_long_answer_is_sent_in_pieces() -> None:
    """Each waits until its client has read: the limit of a connection's buffer is kept."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    whole = responses.InPieces(bytes(range(256)) * 1000)
    asyncio.run(whole({}, None, send))
    assert [len(m["body"]) for m in sent[1:]] == [65536, 65536, 65536, 59392]
    assert [m["more_body"] for m in sent[1:]] == [True, True, True, False]
    assert b"".join(m["body"] for m in sent[1:]) == whole.body


# ---- until it is answered


def test_a_body_counts_while_its_request_is_worked_on() -> None:
    """They counted while they arrived: thirty of 19 MiB took the server from 69 to 1,765 MiB."""
    limits = ServerLimits(limit_body_bytes=4000, limit_bodies_bytes=7000, limit_grace_s=0, limit_queue=8)
    text = json.dumps({"say": "x" * 2500}).encode()
    with serving(limits) as running:
        hanging = [running.connect() for _ in range(2)]
        for sock in hanging:
            sock.sendall(post("/v1/hang", text))
        wait_until(lambda: running.app.active == 2)
        refused = running.ask(post("/v1/echo", text))
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        hanging[0].close()
        wait_until(lambda: running.app.active == 1)
        assert running.ask(post("/v1/echo", text)).status == 200
        hanging[1].close()


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "mallinfo2"),
    reason="glibc's alone",
)
def test_a_large_body_s_memory_goes_back_to_the_system_also_after_the_first() -> None:
    """In a process of its own: how many blocks are the system's own before and after a mebibyte is taken."""
    code = """
import ctypes, sys
from thermocline.server.http.posted import return_memory
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks a b c d e f".split()]
info = ctypes.CDLL(None).mallinfo2
info.restype = Info
if "return" in sys.argv:
    return_memory()
first = bytearray(8 << 20)
del first
before = info().hblks
second = bytearray(1 << 20)
print(info().hblks - before)
"""
    own = [
        int(subprocess.run([sys.executable, "-c", code, *how], capture_output=True, check=True).stdout)
        for how in ((), ("return",))
    ]
    assert own == [0, 1]


def test_a_body_is_forgotten_before_its_answer_is_made(
    puppet: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()
    forget = posted.Posted.done
    monkeypatch.setattr(posted.Posted, "done", lambda given: (forget(given), done.set()))
    puppet.engine.endless = True
    try:
        user = {"role": "user", "content": "a"}
        for path, asked in (
            ("/v1/chat/completions", {"messages": [user]}),
            ("/v1/completions", {"prompt": "a"}),
        ):
            done.clear()
            with httpx2.stream("POST", f"{puppet.url}{path}", json=asked | {"stream": True}) as answer:
                next(answer.iter_lines())
                assert done.is_set()
    finally:
        puppet.engine.endless = False


def test_the_kept_part_of_a_request_has_no_text() -> None:
    chat = schema.ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "secret"}], "n": 2, "grammar": "secret", "stream": True,
         "chat_template_kwargs": {"a": "secret"}, "response_format": {"type": "text"}}
    )  # fmt: skip
    kept = schema.settings(chat)
    assert "secret" not in repr(kept) and (kept.n, kept.stream) == (2, True)
    text = schema.settings(
        schema.CompletionRequest.model_validate({"prompt": "secret", "echo": True, "logprobs": 2})
    )
    assert "secret" not in repr(text) and (text.echo, text.logprobs) == (True, 2)


# ---- whose fault it is


def test_messages_with_their_parts_and_calls_are_bounded_together(puppet: Scripted) -> None:
    part = {"type": "text", "text": "a"}
    call = {"function": {"name": "a", "arguments": "{}"}}
    many = [
        [{"role": "user", "content": "a"}] * 4097,
        [{"role": "user", "content": [part] * 2048}] * 2,
        [{"role": "assistant", "tool_calls": [call] * 4096}],
    ]
    for messages in many:
        got = httpx2.post(f"{puppet.url}/v1/chat/completions", json={"messages": messages}, timeout=60)
        error = got.json()["error"]
        assert (got.status_code, error["param"]) == (400, "messages")
        assert error["message"].startswith("messages: at most 4096, not 4")


def test_a_conversation_that_its_template_fails_at_is_its_client_s_fault() -> None:
    """This was a 500, after which clients try again."""
    with scripted(template="{% for m in messages %}{{ m.content[0].text }}{% endfor %}") as made:
        user = {"role": "user", "content": ""}
        got = httpx2.post(f"{made.url}/v1/chat/completions", json={"messages": [user]}, timeout=60)
        assert (got.status_code, got.json()["error"]["param"]) == (400, "messages"), got.text


def test_an_error_names_a_long_key_by_its_beginning(puppet: Scripted) -> None:
    got = httpx2.post(
        f"{puppet.url}/v1/completions", json={"prompt": "a", "logit_bias": {"x" * MIB: None}}, timeout=60
    )
    assert got.status_code == 400 and got.json()["error"]["param"] == "logit_bias." + "x" * 64
