"""`/infill` and `suffix`: the middle of a text, of a model that has marks for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fill_marks import QWEN, marked
from scripted import FIGURES, Scripted, scripted

from thermocline.text.infill import Infill


@pytest.fixture(scope="module")
def puppet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    with scripted(files=marked(tmp_path_factory.mktemp("files"), QWEN)) as made:
        made.engine.answer = ["return", " 1"]
        yield made


def post(puppet: Scripted, path: str = "/infill", **body: Any) -> httpx2.Response:
    return httpx2.post(f"{puppet.url}{path}", json=body, timeout=60)


def fill_in(puppet: Scripted) -> Infill:
    assert puppet.model.infill is not None
    return puppet.model.infill


def test_the_middle_is_asked_for_and_ends_at_a_mark(puppet: Scripted) -> None:
    """The request of an editor, with llama.cpp's names."""
    asked: dict[str, Any] = {
        "input_prefix": "def f():\n", "prompt": "    ", "input_suffix": "\n", "n_predict": 7,
        "temperature": 0,
        "input_extra": [{"filename": "a.py", "text": "x = 1"}], "cache_prompt": True, "stream": False,
    }  # fmt: skip
    got = post(puppet, **asked)
    assert got.status_code == 200, got.text
    fill, params = fill_in(puppet), puppet.engine.asked[-1]
    assert puppet.engine.prompts[-1] == fill.encode("def f():\n    ", "\n", [("a.py", "x = 1")])
    assert (params.max_tokens, params.temperature, params.stop_ids) == (7, 0, fill.stop_ids)
    made = got.json()
    assert (made["content"], made["stop"], made["stop_type"]) == ("return 1", True, "eos")
    assert (made["tokens_predicted"], made["tokens_evaluated"]) == (FIGURES.tokens, FIGURES.prompt_tokens)
    assert made["timings"]["predicted_n"] == FIGURES.tokens


def test_a_stream_has_pieces_and_ends_with_its_figures(puppet: Scripted) -> None:
    events = post(puppet, input_prefix="a", stream=True).text.split("\n\n")
    assert events.pop() == ""
    found = [json.loads(e.removeprefix("data: ")) for e in events]
    assert [f["content"] for f in found] == ["return", " 1", ""]
    assert [f["stop"] for f in found] == [False, False, True] and found[-1]["stop_type"] == "eos"


@pytest.mark.parametrize(("reason", "stop", "want"), [("length", None, "limit"), ("stop", "\n", "word")])
def test_the_reason_of_an_end_is_told(puppet: Scripted, reason: str, stop: str | None, want: str) -> None:
    puppet.engine.reason, puppet.engine.stop_text = reason, stop
    try:
        made = post(puppet).json()
    finally:
        puppet.engine.reason, puppet.engine.stop_text = "stop", None
    assert (made["stop_type"], made["stopping_word"]) == (want, stop or "")


def test_a_suffix_asks_for_the_middle_too(puppet: Scripted) -> None:
    got = post(puppet, "/v1/completions", prompt="def f():\n", suffix="\n", max_tokens=7)
    assert got.json()["choices"][0]["text"] == "return 1"
    fill = fill_in(puppet)
    assert puppet.engine.prompts[-1] == fill.encode("def f():\n", "\n")
    assert puppet.engine.asked[-1].stop_ids == fill.stop_ids
    post(puppet, "/v1/completions", prompt="Once", suffix="")
    assert puppet.engine.asked[-1].stop_ids == (), "an empty one says nothing"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/infill", {"n": 2}, "n"),
        ("/v1/completions", {"prompt": [1, 2], "suffix": "a"}, "suffix"),
        ("/v1/completions", {"prompt": "a", "suffix": "a", "echo": True}, "suffix"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    puppet: Scripted, path: str, body: dict[str, Any], param: str
) -> None:
    got = post(puppet, path, **body)
    assert got.status_code == 400 and got.json()["error"]["param"] == param, got.text


def test_a_text_that_the_context_cannot_hold_is_refused_before_it_is_tokenised(tmp_path: Path) -> None:
    with scripted(files=marked(tmp_path, QWEN), context=64) as made:
        assert made.model.most_bytes is not None
        long = "a" * (made.model.most_bytes // 2 + 1)
        for body in ({"input_prefix": long, "input_suffix": long}, {"input_extra": [{"text": long}] * 2}):
            got = post(made, **body)
            assert got.status_code == 400 and "far more than a context of 64" in got.text
        got = post(made, "/v1/completions", prompt=long, suffix=long)
        assert got.status_code == 400 and "far more than a context of 64" in got.text


def test_a_model_without_marks_says_so() -> None:
    with scripted() as made:
        for path, body in (("/infill", {}), ("/v1/completions", {"prompt": "a", "suffix": "b"})):
            got = post(made, path, **body)
            assert got.status_code == 400 and "does not fill in the middle" in got.text
