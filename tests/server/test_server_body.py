"""A body's JSON: what is refused, how exactly, and in what time."""

from __future__ import annotations

import json
import time

import pytest

from thermocline.server.http import body
from thermocline.server.http.limits import ServerLimits
from thermocline.server.http.refusal import Refusal

NESTED = b'{"a":' * 64 + b"[" * 64 + b"]" * 64 + b"}" * 64


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (NESTED, None),
        (b'{"a":%s}' % NESTED, "nested more than"),
        (b"[" * 200_000, "nested more than"),
        (b'{"a":' * 100_000, "nested more than"),
        (b'{"a":"%s"}' % (b"[" * 5000), None),
        (rb'{"a":"\"[[\\","b":"%s"}' % (b"[" * 5000), None),
        (rb'{"a":"\\\"%s"}' % (b"{" * 5000), None),
        (rb'{"a":"\\",%s' % (b"[" * 300), "nested more than"),
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"{'a':1}", "not JSON"),
        (b'{"a":1}{"b":2}', "not JSON"),
        (b'\xef\xbb\xbf{"a":1}', "not JSON"),
        (b'{"a":"\x00"}', "not JSON"),
        (b"[1]", "JSON object"),
        (b"null", "JSON object"),
        (b'"text"', "JSON object"),
        (b'{"a":"\xff"}', "UTF-8"),
        (b'{"a":"\xed\xa0\x80"}', "UTF-8"),
        (b'{"a":"\xc0\xaf"}', "UTF-8"),
        (rb'{"a":"\ud800"}', "surrogate"),
        (rb'{"a":["\udc00\ud800"]}', "surrogate"),
        (rb'{"\uDBFF":1}', "surrogate"),
        (rb'{"a":"\ud83d\ude00"}', None),
        (rb'{"a":"\\ud800"}', None),
        (b'{"a":1,"a":2}', "occurs twice"),
        (b'{"b":{"a":1,"\\u0061":2}}', "occurs twice"),
        (b'{"a":NaN}', "not JSON"),
        (b'{"a":-Infinity}', "not JSON"),
        (b'{"a":1e400}', "too large"),
        (b'{"a":%s}' % (b"9" * 5000), "too many digits"),
    ],
)
def test_json_is_read_strictly(text: bytes, problem: str | None) -> None:
    """B5, B14: depth, Unicode, numbers, keys; never a crash of the parser."""
    if problem is None:
        arrived = bytearray(text)
        assert body.parse_json(arrived, ServerLimits())[0] == json.loads(text)
        assert not arrived, "its bytes are not kept beside what was read from them"
        return
    with pytest.raises(Refusal, match=problem) as caught:
        body.parse_json(bytearray(text), ServerLimits())
    assert caught.value.status == 400
    caught.value.body().decode("ascii")


def test_depth_is_exact() -> None:
    for depth in (1, 2, 17, 128, 129):
        text = b"[" * depth + b"[{}],{},[]" * (depth > 1) + b"]" * depth
        deepest = depth + 2 * (depth > 1)
        assert body.is_at_most(deepest, text) and not body.is_at_most(deepest - 1, text)


def test_values_are_counted_before_they_are_made() -> None:
    """20 MiB of empty lists are 650 MB of Python's."""
    limits = ServerLimits(limit_json_values=100)
    for fits in (b'{"a":[' + b"1," * 97 + b"1]}", b'{"a":"' + b"[{,}]" * 1000 + b'"}'):
        body.parse_json(bytearray(fits), limits)
    for text in (b'{"a":[' + b"1," * 98 + b"1]}", b'{"a":[' + b"[],[]," * 40 + b"1]}"):
        with pytest.raises(Refusal, match="more than 100 values"):
            body.parse_json(bytearray(text), limits)


def test_large_bodies_are_checked_in_time_that_grows_with_their_size() -> None:
    """Half a mebibyte of the worst that was found: many deep lists, many strings, a key twice at the end."""
    keys = ",".join(f'"{i}":1' for i in range(50_000))
    worst = [b"[" + b",".join([b"[" * 126 + b"]" * 126] * 2000) + b"]", b'["' + b'","' * 170_000 + b'"]']
    worst += [b"[" + b'"\\"",' * 100_000 + b"1]", f'{{{keys},"49999":2}}'.encode()]
    for text in worst:
        began = time.process_time()
        with pytest.raises(Refusal):
            body.parse_json(bytearray(text), ServerLimits())
        assert time.process_time() - began < 20  # measured: 0.1 s; quadratic ones took minutes
