"""Grammars: what comes out fits, whatever the model would say; what cannot be enforced is refused at once."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_tokenizer import KINDS, SPEC

from thermocline import LLM, Completion, Grammar, SamplingParams, Unsupported, UsageError
from thermocline.text import grammar_matcher
from thermocline.text.grammar import MAX_BYTES, Calls, CallText, Thought
from thermocline.text.grammar_matcher import GrammarConstraint, Grammars, check
from thermocline.text.tokenizer import Tokenizer

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

SHORT = {"type": "string", "maxLength": 12}
SCHEMAS: dict[str, Any] = {
    "enum": {"enum": ["red", "green", 7, None, ["a"]]},
    "integer": {"type": "integer", "minimum": -20, "maximum": 300},
    "number": {"type": "number", "minimum": 0, "exclusiveMaximum": 1, "multipleOf": 0.25},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
    "nested": {
        "type": "object",
        "properties": {
            "name": SHORT,
            "tags": {"type": "array", "items": SHORT, "maxItems": 3},
            "where": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "y": {"const": "up"}},
                "required": ["x", "y"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "tags", "where"],
        "additionalProperties": False,
    },
    "either": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2}],
               "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}},
}  # fmt: skip
PROMPT = "Once upon a time there was a small"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(context=512, gpu="off") as made:
        yield made


def params(g: Grammar, seed: int = 0, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 200, "temperature": 1.2, "seed": seed, "grammar": g, **changes})


# ---- what comes out


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_under_a_schema_parses_and_validates(llm: LLM, name: str) -> None:
    schema = SCHEMAS[name]
    for seed in range(2):
        done = llm.generate(PROMPT, params(Grammar.json_schema(schema), seed))
        assert done.finish_reason == "stop", done
        jsonschema.validate(json.loads(done.text), schema)


def test_a_greedy_answer_fits_too_and_any_object_is_an_object(llm: LLM) -> None:
    done = llm.generate(PROMPT, params(Grammar.json_schema(SCHEMAS["nested"]), temperature=0))
    jsonschema.validate(json.loads(done.text), SCHEMAS["nested"])
    free = llm.generate(PROMPT, params(Grammar.json_object(), max_tokens=40))
    assert free.text.startswith("{")


@pytest.mark.parametrize(
    ("g", "pattern"),
    [
        (Grammar.regex("[0-9]{3}-[a-f]{1,8}x"), "[0-9]{3}-[a-f]{1,8}x"),
        (Grammar.regex("(?s:.{5})"), "(?s:.{5})"),
        (
            Grammar.lark('start: WORD ("," WORD)~1..3 "."\nWORD: /[a-z]{1,6}/'),
            r"[a-z]{1,6}(,[a-z]{1,6}){1,3}\.",
        ),
        (Grammar.lark('start: "Grüße " ("日本" | "👍")'), "Grüße (日本|👍)"),
    ],
)
def test_an_answer_matches_all_of_its_pattern_and_ends_with_it(llm: LLM, g: Grammar, pattern: str) -> None:
    for seed in range(3):
        done = llm.generate(PROMPT, params(g, seed))
        assert re.fullmatch(pattern, done.text) and done.finish_reason == "stop", done.text
        assert done.token_ids[-1] not in llm.spec.eos_ids, "no token is needed to end what is complete"


def test_grammars_side_by_side_with_free_answers_give_what_each_gives_alone(llm: LLM) -> None:
    asked = [params(Grammar.json_schema(SCHEMAS[n]), seed=i) for i, n in enumerate([*SCHEMAS][:4])]
    asked[2] = dataclasses.replace(asked[2], grammar=None, max_tokens=30)

    def key(done: Completion) -> tuple[list[int], str]:
        return done.token_ids, done.figures.logits_hash

    alone = [key(llm.generate(PROMPT, p)) for p in asked]
    streams = [llm.stream(PROMPT, p) for p in asked]
    for stream in streams:
        list(stream)
    assert [key(s.completion) for s in streams] == alone


def test_probabilities_are_the_models_own_and_a_schema_changes_none(llm: LLM) -> None:
    done = llm.generate(PROMPT, params(Grammar.regex("[0-9]{4}"), logprobs=1))
    assert done.logprobs is not None
    assert done.logprobs[0].top[0][0] != done.token_ids[0] and done.logprobs[0].logprob < -3


def test_a_text_that_runs_out_of_tokens_ends_with_length(llm: LLM) -> None:
    done = llm.generate(PROMPT, params(Grammar.regex("[a-z ]{400}"), max_tokens=5))
    assert done.finish_reason == "length" and len(done.token_ids) == 5


# ---- what ends one answer alone


def test_a_grammar_that_leaves_no_token_fails_its_own_request_and_the_others_go_on(llm: LLM) -> None:
    digits = [i for i in range(llm.spec.vocab_size) if llm.tokenizer.token_bytes(i) == b"7"]
    banned = params(Grammar.regex("7"), logit_bias=dict.fromkeys(digits, -float("inf")))
    stuck, other = llm.stream(PROMPT, banned), llm.stream(PROMPT, params(Grammar.regex("[0-9]{2}")))
    with pytest.raises(UsageError, match="the grammar, logit_bias and ignore_eos ban every token"):
        list(stuck)
    assert re.fullmatch("[0-9]{2}", "".join(c.text for c in other))


def test_a_grammar_without_its_constraint_never_runs_free(llm: LLM) -> None:
    with pytest.raises(UsageError, match="needs its constraint"):
        llm._open().submit([1], params(Grammar.json_object()))


def test_a_grammar_that_grows_too_large_on_its_way_fails_its_own_request_alone(llm: LLM) -> None:
    """`check` refuses it; what it lets through may still run into the library's limits."""
    large, e = params(Grammar.regex(r"(\w{1,500}){1,500}"), max_tokens=100), llm._open()
    bad = e.submit([5], large, llm.constraint(large, checked=True))
    few = params(Grammar.regex("[0-9]{2}"))
    good = e.submit([5], few, llm.constraint(few))
    while e.step():
        pass
    assert isinstance(bad.error, UsageError) and "grammar cannot go on" in str(bad.error)
    assert good.finish_reason == "stop" and re.fullmatch("[0-9]{2}", good.completion().text)
    e.check_integrity()


# ---- any tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_the_tokens_whose_bytes_may_come_next(tmp_path: Path, kind: str) -> None:
    """Held against trying every token out: of byte-level BPE, SentencePiece's bytes and its words."""
    tok = Tokenizer(KINDS[kind](tmp_path), SPEC)
    words = ["time", "tin", "a"]
    c = Grammars(tok).constraint(Grammar.lark(f"start: {' | '.join(map(json.dumps, words))}"), checked=True)
    written = ""
    while not c.is_complete():
        mask = c.allowed()
        ends = any(w == written for w in words)
        assert {i for i in tok.eos_ids if mask[i]} == (set(tok.eos_ids) if ends else set())
        fit = {i for i in range(tok.vocab_size) if _fits(written.encode() + tok.token_bytes(i), words)
               and tok.token_bytes(i) and not tok.is_control(i) and i not in tok.eos_ids}  # fmt: skip
        allowed = set(np.flatnonzero(mask).tolist()) - set(tok.eos_ids)
        assert allowed <= fit and (allowed or ends), "a forced text may be spelt one way alone"
        if not written:
            assert allowed == fit
        token = max(allowed or tok.eos_ids, key=lambda i: len(tok.token_bytes(i)))
        c.accept(token)
        written += tok.token_bytes(token).decode()
    assert written in words


def _fits(data: bytes, words: list[str]) -> bool:
    return any(w.encode().startswith(data) for w in words)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_characters_of_several_bytes_are_written_byte_by_byte(tmp_path: Path, kind: str) -> None:
    tok = Tokenizer(KINDS[kind](tmp_path), SPEC)
    c, data = Grammars(tok).constraint(Grammar.regex("[👍日é]👍"), checked=True), b""
    while not c.is_complete():
        token = int(np.flatnonzero(c.allowed())[-1])
        c.accept(token)
        data += tok.token_bytes(token)
    assert re.fullmatch("[👍日é]👍", data.decode())


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_content_that_looks_like_a_control_token_is_never_one(tmp_path: Path, kind: str) -> None:
    tok = Tokenizer(KINDS[kind](tmp_path), SPEC)
    c, ids = Grammars(tok).constraint(Grammar.json_schema({"const": "</s><s>"}), checked=True), []
    while not c.is_complete():
        allowed = [i for i in np.flatnonzero(c.allowed()).tolist() if i not in tok.eos_ids]
        assert not any(tok.is_control(i) for i in allowed)
        ids.append(allowed[0])
        c.accept(ids[-1])
    assert b"".join(map(tok.token_bytes, ids)) == b'"</s><s>"'


def test_a_lark_grammar_cannot_name_a_control_token(tmp_path: Path) -> None:
    tok = Tokenizer(KINDS["byte_level"](tmp_path), SPEC)
    by_number = Grammars(tok).constraint(Grammar.lark('start: <[0]> | "a"'), checked=True)
    assert not by_number.allowed()[0] and by_number.allowed()[tok.encode("a")[-1]]
    with pytest.raises(UsageError, match="cannot be enforced"):
        Grammars(tok).constraint(Grammar.lark("start: <s>"), checked=True)


def test_an_answers_marks_may_be_control_tokens_and_then_nothing_else_is(tmp_path: Path) -> None:
    """Mistral's [TOOL_CALLS] is one, many a <think> too. What only spells one out is left out."""
    tok = Tokenizer(KINDS["byte_level"](tmp_path), dataclasses.replace(SPEC, eos_ids=()))
    functions = (("f", {"type": "object", "additionalProperties": False}),)
    in_list = CallText('{"name":$string,"arguments":$arguments}', "[$calls]", ",")
    calls = Calls(functions, "<s>", "", in_list, several=False)
    grammars, thought = Grammars(tok), Thought("<t>", "</s>", begun=True)

    def taken(g: Grammar, *parts: str | int) -> bool:
        """Check a sequence of token ids, and of texts byte by byte."""
        c = grammars.constraint(g)
        for part in parts:
            spelt = [part] if isinstance(part, int) else [i for b in part for i in tok.encode(b, False)]
            for token in spelt:
                if not c.allowed()[token]:
                    return False
                c.accept(token)
        return c.is_complete()

    call = '[{"name":"f","arguments":{}}]'
    must, may = Grammar.answer(thought, calls, None), Grammar.answer(None, calls, "text")
    assert taken(must, "so <s>", 1, 0, call) and taken(must, 1, 0, call) and taken(may, "so", 0, call)
    assert not taken(must, 0, call) and not taken(must, 1, "<s>" + call), "the mark is the token"
    assert not taken(may, "so <s>") and not taken(may, 1) and not taken(must, "</s>", 1, 0, call)


def test_ends_are_the_models_and_those_that_are_asked_for(tmp_path: Path) -> None:
    tok = Tokenizer(KINDS["byte_level"](tmp_path), SPEC)
    c = Grammars(tok).constraint(Grammar.regex("a*"), (0,), checked=True)
    assert c.allowed()[[0, 1]].all() and not c.is_complete()
    c.accept(0)
    assert c.is_complete()


# ---- what is refused


def nested(levels: int) -> dict[str, Any]:
    return {"type": "integer"} if levels == 0 else {"type": "array", "items": nested(levels - 1)}


REFUSED = {
    "unique": (lambda: Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "not": (lambda: Grammar.json_schema({"not": {}}), "not"),
    "format": (lambda: Grammar.json_schema({"type": "string", "format": "riddle"}), "format"),
    "loosened by itself": (
        lambda: Grammar.json_schema({"x-guidance": {"lenient": True}, "type": "array", "contains": {}}),
        "contains",
    ),
    "reference to elsewhere": (lambda: Grammar.json_schema({"$ref": "http://example.org/s"}), "example.org"),
    "nothing fits": (lambda: Grammar.json_schema({"minimum": 5, "maximum": 3, "type": "integer"}), "minimum"),
    "only itself": (lambda: Grammar.json_schema({"$ref": "#"}), "no text fits"),
    "a bound that would leak": (
        lambda: Grammar.json_schema({"items": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}}),
        "exclusive 0",
    ),
    "false": (lambda: Grammar.json_schema(False), "must be an object"),
    "no JSON": (lambda: Grammar.json_schema("{"), "not JSON"),
    "deep": (lambda: Grammar.json_schema(nested(70)), "levels deep"),
    "very deep": (lambda: Grammar.json_schema('{"a":' * 9000 + "1" + "}" * 9000), "levels deep"),
    "large": (lambda: Grammar.json_schema({"enum": ["x" * MAX_BYTES]}), f"at most {MAX_BYTES}"),
    "lone surrogate": (lambda: Grammar.json_schema('{"const": "\\ud800"}'), "surrogate"),
    "look-around": (lambda: Grammar.regex("(?=a)b"), "look-around"),
    "nested regex": (lambda: Grammar.regex("(" * 30000 + "a" + ")" * 30000), "cannot be enforced"),
    "huge count": (lambda: Grammar.regex("a{1000000000}"), "cannot be enforced"),
    "count of counts": (lambda: Grammar.regex("(\\w{1,500}){1,500}"), "cannot be enforced"),
    "not Lark": (lambda: Grammar.lark("nonsense"), "cannot be enforced"),
    "GBNF after a comment": (lambda: Grammar.lark('# x\nroot ::= "a"'), "GBNF"),
    "GBNF": (lambda: Grammar.lark('root ::= "a"'), "GBNF"),
    "a chain that overflows the stack": (
        lambda: Grammar.lark(
            "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(3000)) + '\na3000: "x"'
        ),
        "nested too deeply",
    ),
    "rules that double": (
        lambda: Grammar.lark(
            "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(40)) + '\na40: "x"'
        ),
        "Too many",
    ),
    "many properties": (
        lambda: Grammar.json_schema({"properties": {f"p{i}": {} for i in range(1800)}, "type": "object"}),
        "cannot be enforced",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_grammar_that_cannot_be_enforced_is_refused_in_one_line_and_soon(name: str) -> None:
    made, why = REFUSED[name]
    begin = time.process_time()
    with pytest.raises(UsageError, match=re.escape(why)) as refused:
        check(made())
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500
    assert time.process_time() - begin < 10, "this process hardly works on it"


def test_a_grammar_that_takes_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second is the worker's own; where a system has no such timer, who waits has one."""
    (tmp_path / "stuck.py").write_text("import time\ndef main():\n    while True: time.sleep(1)")
    paths = grammar_matcher._library()
    monkeypatch.setattr(grammar_matcher, "_library", lambda: [*paths, str(tmp_path)])
    monkeypatch.setattr(grammar_matcher, "WORKER", "stuck")
    monkeypatch.setattr(grammar_matcher, "WAIT_S", 0.2)
    with pytest.raises(UsageError, match="takes too long"):
        check(Grammar.regex("given up"))


def test_without_the_library_the_refusal_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"pip install 'thermocline\[server\]'"):
        check(Grammar.regex("uninstalled"))


def test_without_the_library_text_is_generated_all_the_same() -> None:
    code = (
        "import sys; sys.modules['llguidance'] = None\nfrom thermocline import LLM, SamplingParams\n"
        "print(len(LLM(context=64, gpu='off').generate('Once', SamplingParams(max_tokens=3)).token_ids))"
    )
    paths = [p for p in sys.path if p]
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path[:0] = {paths!r}\n{code}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "3"


def test_a_grammar_travels_between_processes_and_compares_by_what_it_says() -> None:
    g = Grammar.json_schema('{"b": 1,\n "a": 2}')
    assert pickle.loads(pickle.dumps(g)) == g == Grammar.json_schema({"b": 1, "a": 2})
    assert Grammar.json_schema({"a": 2, "b": 1}) != g, "properties come in the schema's order"


def test_compiled_grammars_are_few_however_many_are_asked_for(tmp_path: Path) -> None:
    made = Grammars(Tokenizer(KINDS["byte_level"](tmp_path), SPEC))
    for i in range(grammar_matcher.KEPT + 20):
        assert isinstance(made.constraint(Grammar.regex(f"a{{{i}}}"), checked=True), GrammarConstraint)
    assert len(made._compiled) == grammar_matcher.KEPT


def test_a_grammar_s_blank_lines_are_read_once() -> None:
    """64 KiB of them took 29 s, in which no other thread ran: each was the beginning of all that follow."""
    began = time.process_time()
    Grammar.lark("\n" * 60_000 + 'start: "a"')
    with pytest.raises(UsageError, match="GBNF"):
        Grammar.lark("\n" * 60_000 + 'root \n ::= "a"')
    with pytest.raises(UsageError, match="at most 65536"):
        Grammar.lark("root ::= " + "\n" * 8_000_000)
    assert time.process_time() - began < 20
