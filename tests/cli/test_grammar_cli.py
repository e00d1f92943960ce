"""`--json-schema`, `--grammar` and their files: what `run` and `chat` write fits, or a line says why not."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
LARK = 'start: WORD ("," WORD)~1..3 "."\nWORD: /[a-z]{1,6}/'
WORDS = r"[a-z]{1,6}(,[a-z]{1,6}){1,3}\.\n"
RUN = ("run", "Once", "-c", "256", "-q", "--no-display-prompt", "--gpu", "off", "-n", "200", "-s", "3")


@pytest.fixture(params=["a flag", "a file"])
def given(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str, str], tuple[str, str]]:
    """A flag and its text, or the flag of its file."""

    def made(flag: str, text: str) -> tuple[str, str]:
        if request.param == "a flag":
            return flag, text
        path = tmp_path / "form"
        path.write_text(text + "\n", encoding="utf-8")
        return f"{flag}-file", str(path)

    return made


def test_run_writes_json_of_a_schema(given: Callable[..., Any], thermocline: Run) -> None:
    pytest.importorskip("llguidance")
    jsonschema = pytest.importorskip("jsonschema")
    ran = thermocline(*RUN, *given("--json-schema", json.dumps(SCHEMA)))
    assert ran.code == 0
    jsonschema.validate(json.loads(ran.out), SCHEMA)


def test_run_writes_what_a_grammar_says(given: Callable[..., Any], thermocline: Run) -> None:
    pytest.importorskip("llguidance")
    ran = thermocline(*RUN, *given("--grammar", LARK))
    assert re.fullmatch(WORDS, ran.out), ran
    best = thermocline(*RUN, "--n-best", "3", "--json", *given("--grammar", LARK))
    assert all(re.fullmatch(WORDS, a["text"] + "\n") for a in json.loads(best.out)["answers"])


def test_every_answer_of_a_chat_is_held_to_it(
    given: Callable[..., Any], thermocline: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Once\nupon\n")))
    flags = ("-c", "256", "-q", "--gpu", "off", "-n", "200", "--template", template)
    ran = thermocline("chat", *flags, *given("--grammar", LARK))
    assert ran.code == 0 and re.fullmatch(f"({WORDS}){{2}}", ran.out), ran


@pytest.mark.parametrize(
    ("flags", "code", "why"),
    [
        (("-j", "{"), 2, "not JSON"),
        (("-j", "[]"), 2, "must be an object"),
        (("-j", '{"not": {}}'), 2, "cannot be enforced"),
        (("-j", "{}", "--grammar", LARK), 2, "--json-schema and --grammar: only one"),
        (("--grammar", 'root ::= "a"'), 2, "GBNF"),
        (("--grammar", "nonsense"), 2, "cannot be enforced"),
        (("--grammar", ""), 2, "must not be empty"),
        (("-jf", "missing.json"), 4, "missing.json"),
        (("--grammar-file", __file__ + "/no"), 4, "/no"),
    ],
)
@pytest.mark.parametrize("command", ["run", "chat"])
def test_what_cannot_be_kept_to_is_one_line_before_any_model_is_opened(
    command: str, flags: tuple[str, ...], code: int, why: str, thermocline: Run
) -> None:
    pytest.importorskip("llguidance")
    prompt = ("Once",) if command == "run" else ()
    ran = thermocline(command, "-m", "no-such-model", "-q", *prompt, *flags)
    assert (ran.code, ran.out, ran.err.count("\n")) == (code, "", 1) and why in ran.err


def test_a_file_that_is_no_text_is_a_bad_file(thermocline: Run, tmp_path: Path) -> None:
    path = tmp_path / "schema"
    path.write_bytes(b"\xff\xfe{")
    ran = thermocline(*RUN, "-jf", path)
    assert ran.code == 3 and str(path) in ran.err


def test_without_the_library_a_line_says_what_to_install(
    thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ran = thermocline(*RUN, "--grammar", 'start: "uninstalled"')
    assert (ran.code, ran.out, ran.err.count("\n")) == (6, "", 1)
    assert "pip install 'thermocline[server]'" in ran.err
