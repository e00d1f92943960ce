"""Templates that attack: each is refused within a second, with a typed error, and the next one works."""

# ruff: noqa: E501  templates on one line

from __future__ import annotations

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thermocline.errors import BadFile
from thermocline.text.template_process import TemplateProcess
from thermocline.text.template_worker import Environment, TracedText, own

MESSAGES = [{"role": "user", "content": "hello"}]
ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'] }}",
    "{{ (''|attr('__class__')).x }}",
    "{{ ([''] | map(attribute='__class__') | list)[0].x }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{x.__class__}'.format_map({'x': ''}) }}",
    "{{ ('{0.__class__}'.format | attr('__call__'))('') }}",
    "{{ lipsum.__globals__ }}",
    "{{ lipsum() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__.os }}",
    "{{ dict.__globals__ }}",
    "{{ range.__class__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{% macro f() %}{% endmacro %}{{ f._func.__globals__ }}",
    "{% set x = messages.append(1) %}",
    "{% set x = messages[0].update({'role': 'system'}) %}",
    "{% set x = messages[0].pop('role') %}",
    "{{ messages[0].content._mask }}{{ messages[0].content._mask.x.y }}",
    "{{ ''.join.__self__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{{ [].__class__.__base__.__subclasses__() }}",
    "{{ (1).__class__ }}",
    "{{ url_for.__globals__ }}",
    "{{ messages.__reduce_ex__(2) }}",
]
BOMBS = [
    "{% for a in range(99999) %}{% for a in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(10**9) %}{% endfor %}",
    "{{ range(99999) | map('string') | map('length') | sum * 1 }}"
    "{% for a in range(999) %}{{ range(99999) | sum }}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 9**(9**9) }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}",
    "{{ 'a' | center(10**10) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ 'a\nb' | indent(10**10) }}",
    "{{ [1] | batch(10**10, 1) | list }}",
    "{{ ('a ' * 10**6) | wordwrap(1) | length }}{% for i in range(999) %}{{ ('a ' * 10**6) | urlize }}{% endfor %}",
    "{{ strftime_now('%c' * 10**7) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}",
    "{% for a in range(99999) %}{% for a in range(999) %}xxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "{{ " + "(" * 50000 + ")" * 50000 + " }}",
    "{{ " + "[" * 500 + "]" * 500 + " }}{{ x.y }}",
    "{% if a %}" * 3000,
    "{{ 'x' ~ " * 5000,
    "{{ ((10**9)|string * 10**8) | int }}",
    "{{ messages | tojson(indent=10**10) }}",
]


@pytest.mark.parametrize("source", ESCAPES + BOMBS, ids=lambda s: s[:40])
def test_an_attack_is_refused_within_a_second_of_work(source: str) -> None:
    """The limit is on processor time: a busy machine may take longer."""
    sandbox = TemplateProcess(source, "the template")
    before = os.times()
    with pytest.raises(BadFile, match="the template: not a usable chat template: "):
        sandbox.render(MESSAGES, {}, {})
    sandbox.close()
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1


def test_the_next_conversation_is_served_after_a_bomb() -> None:
    sandbox = TemplateProcess(
        "{% if messages[0].content == 'bomb' %}{{ (messages[0].content|length + 5)**(9**9) }}{% endif %}ok",
        "t",
    )
    with pytest.raises(BadFile, match="too long"):
        sandbox.render([{"role": "user", "content": "bomb"}], {}, {})
    assert sandbox.render(MESSAGES, {}, {})[0] == "ok"
    sandbox.close()


def test_the_process_is_started_once_and_ends_with_the_sandbox() -> None:
    sandbox = TemplateProcess("ok", "t")
    assert sandbox._confined._process is None, "started at the first use"
    sandbox.render(MESSAGES, {}, {})
    process = sandbox._confined._process
    assert process is not None
    for _ in range(20):
        sandbox.render(MESSAGES, {}, {})
    assert sandbox._confined._process is process
    sandbox.close()
    assert process.returncode is not None


USES = {"map": "('upper')", "select": "('string')", "reject": "('string')", "selectattr": "('role')",
        "rejectattr": "('role')", "groupby": "('role')", "attr": "('x')", "default": "(1)", "batch": "(2)",
        "slice": "(2)", "replace": "('a', 'b')", "round": "(1)", "format": "(1)", "dictsort": ""}  # fmt: skip


def test_every_filter_of_the_language_works_where_nothing_can_be_opened() -> None:
    """jinja2 imports some of what it needs when that is first used, and codecs are imported like that, too."""
    sandbox, works = TemplateProcess("", "t"), set[str]()
    for name in sorted(Environment().filters):
        for value in ("'a b'", "[1, 2]", "{'a': 1}", "messages", "1.5", "'%s'"):
            sandbox._source = f"{{{{ ({value} | {name}{USES.get(name, '')}) | string }}}}"
            try:
                works.add(name) if sandbox.render(MESSAGES, {}, {})[0] else None
            except BadFile as e:
                assert not re.search("Module|Import|not permitted|unknown encoding", str(e)), name
    assert {"pprint", "wordwrap", "urlize", "tojson"} <= works
    sandbox._source = "{{ 'é\\n'.encode('latin-1') }}{{ strftime_now('%A %x') }}"
    assert sandbox.render(MESSAGES, {}, {})[0].startswith("b'\\xe9\\n'")
    sandbox.close()


def test_a_long_conversation_is_no_bomb() -> None:
    sandbox = TemplateProcess("{% for m in messages %}{{ m.content | trim }}{% endfor %}", "t")
    long = "word " * 400_000
    assert sandbox.render([{"role": "user", "content": long}], {}, {})[0] == long.strip()
    sandbox.close()


# ---- Text does what str does, and its parts remember where they come from

CHARS = st.text("aA b\n\tß", max_size=12)


@given(a=CHARS, b=CHARS, c=st.text("aA b", min_size=1, max_size=2), n=st.integers(-3, 8))
def test_text_is_a_str_that_remembers(a: str, b: str, c: str, n: int) -> None:
    """Own text is given capital letters here in thought: mark which characters of a + b are b's."""
    text = TracedText(a) + own(b)
    for name, args in {
        "strip": (), "lstrip": (c,), "rstrip": (c,), "split": (c, n), "rsplit": (c, n), "splitlines": (True,),
        "partition": (c,), "rpartition": (c,), "replace": (c, "xx", n), "upper": (), "title": (),
        "removeprefix": (c,), "removesuffix": (c,), "__getitem__": (slice(n, None),), "__mul__": (n,),
    }.items():  # fmt: skip
        got, plain = getattr(text, name)(*args), getattr(a + b, name)(*args)
        assert got == plain, name
        for part in [got] if isinstance(got, str) else got:
            assert not isinstance(part, TracedText) or len(part._mask) == len(part), name
    assert list(map(str, text)) == list(a + b)


@given(
    pieces=st.lists(st.tuples(st.sampled_from("ab "), st.booleans()), max_size=14), sep=st.sampled_from("ab")
)
def test_each_character_keeps_its_origin(pieces: list[tuple[str, bool]], sep: str) -> None:
    """Own letters are written as capitals beside: every operation must cut both alike."""
    text = own("").join([own(c) if mine else c for c, mine in pieces])
    origin = "".join("1" if mine else "0" for _, mine in pieces)
    at = 0
    for part in text.split(sep):
        assert "".join(map(str, part._mask)) == origin[at : at + len(part)]  # type: ignore[attr-defined]
        at += len(part) + 1
    left = len(text) - len(str.lstrip(text))
    assert "".join(map(str, text.strip()._mask)) == origin[left : left + len(text.strip())]
