"""The chat page in a real browser: hostile answers stay text, a person finds what a chat should have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from browsing import Tab, chromium, tab
from payloads import PAYLOADS
from scripted import Scripted, scripted
from serving import Served, served
from several import MIB, Machine, new_machine
from test_server_benchmark import bench

from thermocline.server.api.benchmark import report
from thermocline.server.page import assets

pytestmark = pytest.mark.oracle

FOLDER = Path(assets.__file__).parent
FILES = [p for p in FOLDER.iterdir() if p.is_file() and p.suffix != ".py"]
# All elements that text can become.
TAGS = {"LI", "P", "DETAILS", "SUMMARY", "DIV", "SPAN", "BUTTON", "A", "STRONG", "CODE"}
TAGS |= {"TABLE", "THEAD", "TBODY", "TR", "TH", "TD"}
ANSWER = """# Heat

Water has *layers*, and **one** of them is [thin](https://example.org/thermocline):

| depth | temperature |
|---:|:---|
| 10 m | 18 °C |

1. warm
2. cold
   - colder

> said `someone`

```python
def depth():
	return "<b>40 m</b>"
```
"""

CONTRASTS = """() => {
    const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = (c) => c.slice(0, 3).map((x) => x / 255).map((x) =>
        x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
        .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = (e) => {
        const c = rgb(getComputedStyle(e).backgroundColor);
        return c[3] === 0 ? ground(e.parentElement) : c;
    };
    const opaque = (e) => !e || getComputedStyle(e).opacity === "1" && opaque(e.parentElement);
    const wrong = [];
    for (const e of document.querySelectorAll("body *")) {
        const says = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
        if (!says || !e.checkVisibility() || e.closest(".unseen, .skip")) continue;
        const [a, b] = [light(rgb(getComputedStyle(e).color)), light(ground(e))];
        const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (contrast < 4.5 || !opaque(e)) wrong.push([e.outerHTML.slice(0, 80), contrast]);
    }
    return wrong;
}"""


# ---- the files, without a browser


@pytest.fixture(scope="module")
def chat() -> Iterator[Scripted]:
    with scripted() as found:
        yield found


@pytest.fixture
def script(chat: Scripted) -> Iterator[Scripted]:
    """The scripted server as new."""
    yield chat
    chat.in_bytes = chat.engine.endless = chat.engine.failing = False
    chat.engine.answer, chat.engine.state, chat.engine.bench = (), "ready", None
    chat.engine.gone.clear()


def test_every_file_of_the_page_is_served_as_what_it_is(chat: Scripted) -> None:
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    assert {file for file, _ in assets.FILES.values()} == {p.name for p in FILES}
    for where, (name, _) in assets.FILES.items():
        found = httpx2.get(chat.url + where, timeout=60)
        assert found.content == (FOLDER / name).read_bytes()
        assert found.headers["content-type"].split(";")[0] == kinds[Path(name).suffix]
        assert "script-src 'self'" in found.headers["content-security-policy"]
        known = {"If-None-Match": found.headers["etag"]}
        assert found.headers["cache-control"] == "no-cache"
        again = httpx2.get(chat.url + where, headers=known, timeout=60)
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path", ["/page/", "/page/../page.py", "/page/%2e%2e/page.py", "/page/APP.js", "/page/x.js"]
)
def test_nothing_else_is_served(chat: Scripted, path: str) -> None:
    assert httpx2.get(chat.url + path, timeout=60).status_code == 404


def test_the_page_has_no_inline_code_and_names_no_other_place() -> None:
    index = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|\sstyle=|<style", index)
    for file in FILES:
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"\b(?:https?:)?//[a-z]+\.[a-z]", text), file
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), file
        assert max(map(len, text.splitlines())) <= 110, file


# ---- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def shown(browser: Any, script: Scripted) -> Iterator[Tab]:
    with tab(browser, script.url) as found:
        yield found.begin()


def test_hostile_text_is_shown_and_does_nothing(shown: Tab, script: Scripted) -> None:
    """Send payloads as questions and as long answers, some byte by byte, some letter by letter."""
    for i in range(0, len(PAYLOADS), 10):
        texts, seen = zip(*PAYLOADS[i : i + 10], strict=True)
        whole = "\n\n".join(texts)
        script.in_bytes = i % 20 == 0
        script.engine.answer = [whole[at : at + 64] for at in range(0, len(whole), 64)]
        script.engine.answer = script.engine.answer if script.in_bytes else list(whole)
        shown.ask(whole)
        for n in (-1, -2):
            blocks = shown.page.locator("#log .body").all()[n].locator("> *")
            assert blocks.all_text_contents() == list(seen)
    elements = "[...document.querySelectorAll('#log *')].map((e) => e.tagName)"
    assert set(shown.page.evaluate(elements)) <= TAGS
    links = """[...document.querySelectorAll('#log a')]
        .map((e) => [e.protocol, e.rel, e.getAttributeNames().sort().join()])"""
    safe = ("https:", "noopener noreferrer nofollow", "href,rel,target,title")
    assert {tuple(x) for x in shown.page.evaluate(links)} == {safe}
    assert shown.page.evaluate("document.scripts.length") == 2


def test_hostile_history_is_shown_and_does_nothing(shown: Tab) -> None:
    """Whatever is in the browser's storage, from titles on, is text too; what is broken is left out."""
    kept = {f"thermocline.conversation.{i}": json.dumps({
        "id": str(i), "title": text, "updated": -i,
        "messages": [{"role": r, "content": text, "thought": text} for r in ("user", "assistant")],
    }) for i, (text, _) in enumerate(PAYLOADS)}  # fmt: skip
    kept |= {"thermocline.conversation.x": "{", "thermocline.conversation.y": '{"id": "y", "messages": [1]}'}
    shown.page.evaluate("kept => { for (const [k, v] of Object.entries(kept)) localStorage[k] = v; }", kept)
    shown.begin()
    titles = shown.page.locator("#conversations .open")
    assert titles.all_text_contents() == [text for text, _ in PAYLOADS]
    titles.nth(4).click()
    assert shown.texts() == [PAYLOADS[4][1]] * 2
    assert shown.page.title() == f"{PAYLOADS[4][0]} – Thermocline"


def test_a_stored_message_with_other_types_is_shown_and_the_page_lives(shown: Tab) -> None:
    """A thought that was no string left the page dead, at every visit: it is opened where it was left."""
    odd = {"toString": 1, "valueOf": 1}
    for i, value in enumerate((7, {}, [], True, odd)):
        message = {"role": "assistant", "content": f"kept {i}", "thought": value, "finish": value}
        message |= {"timings": {"predicted_n": value, "predicted_per_second": value}}
        kept = {"id": "odd", "updated": value, "messages": [{"role": "user", "content": "a"}, message]}
        stored = {"conversation.odd": kept, "open": "odd"}
        shown.page.evaluate(
            "all => { for (const [k, v] of Object.entries(all)) localStorage[`thermocline.${k}`] = v; }",
            {k: json.dumps(v) for k, v in stored.items()},
        )
        shown.begin()
        assert shown.texts() == ["a", f"kept {i}"]
    assert shown.page.locator("#conversations .open").count() == 1


def test_hostile_spaces_take_no_time(shown: Tab) -> None:
    """Expressions that took the square of a line's length: 60,000 spaces stopped the page for 1.4 s."""
    n = 60_000
    space, half = " " * n, " " * (n // 2)
    lines = [
        "~~~" + space + "`",
        "~" * n + "`",
        "# a" + space + "x",
        "# " + space + "x",
        "# a " + "# " * n + "x",
    ]
    lines += [
        "a|b\n" + d for d in (half + half + "x-", "-" + space + "x", "|" + half + "-" + half + "x", "-|" * n)
    ]
    lines += [("[a](" + " " * 1900) * (n // 2000), ("[a](b" + " " * 1900) * (n // 2000)]
    lines += ["|".join("a" * 3000) + "\n" + "-|" * 3000 + ("\n" + "|".join("b" * 3000)) * 3]
    took = shown.page.evaluate(
        """async (texts) => {
        const { render } = await import("/page/markdown.js");
        return texts.map((text) => {
            const begin = performance.now();
            render(document.createElement("div"), text);
            return performance.now() - begin;
        });
    }""",
        lines,
    )
    assert max(took) < 700, took  # 25 where it is linear


def test_events_are_read_the_same_wherever_they_are_split(shown: Tab) -> None:
    """Into two at every byte, and into single bytes: all ways to end a line, and every hostile text."""
    odd = '\ufeff: comment\r\ndata: {"a": "é🦊"}\r\n\r\ndata:one\rdata: two\r\revent: x\n\nid: 1\ndata\n\n'
    odd += "data: three\r\ndata: four\r\n\r\n"
    hostile = [json.dumps(text, ensure_ascii=False) for text, _ in PAYLOADS]
    text = odd + "".join(f"data: {x}\n\n" for x in hostile) + "data:  b\n\ndata: not ended"
    found = shown.page.evaluate(
        """async (text) => {
        const { EventParser } = await import("/page/api.js");
        const bytes = new TextEncoder().encode(text);
        const read = (parts) => {
            const parser = new EventParser();
            const decoder = new TextDecoder();
            return JSON.stringify(parts.flatMap((p) => parser.push(decoder.decode(p, { stream: true }))));
        };
        const made = new Set([read([...bytes].map((b) => Uint8Array.of(b)))]);
        for (let i = 0; i <= bytes.length; i++) made.add(read([bytes.subarray(0, i), bytes.subarray(i)]));
        return [...made];
    }""",
        text,
    )
    assert [json.loads(x) for x in found] == [['{"a": "é🦊"}', "one\ntwo", "", "three\nfour", *hostile, " b"]]


def test_markdown_is_shown_as_what_it_means(shown: Tab, script: Scripted) -> None:
    script.engine.answer = list(ANSWER)
    shown.ask("what is it?")
    body = shown.page.locator("#log li:last-child .body").first
    for selector, text in {
        "h3": "Heat", "em": "layers", "strong": "one", "a": "thin", "th": "depth", "td.right": "10 m",
        "ol > li ul > li": "colder", "blockquote code": "someone", "figcaption span": "python",
        "pre code": 'def depth():\n\treturn "<b>40 m</b>"',
    }.items():  # fmt: skip
        assert body.locator(selector).first.text_content() == text, selector
    assert body.locator("ol > li").count() == 2


def test_code_and_messages_can_be_copied(browser: Any, script: Scripted) -> None:
    script.engine.answer = [ANSWER]
    allowed = ["clipboard-read", "clipboard-write"]
    with tab(browser, script.url, permissions=allowed) as found:
        found.begin().ask("what is it?")
        code = 'def depth():\n\treturn "<b>40 m</b>"'
        for selector, text in ((".code button", code), ("li:last-child .tools :text('Copy')", ANSWER)):
            button = found.page.locator(f"#log {selector}").first.element_handle()
            button.click()
            found.until(lambda button=button: button.text_content() == "Copied")  # type: ignore[misc]
            assert found.page.evaluate("navigator.clipboard.readText()") == text


def test_an_answer_can_be_stopped_and_what_there_is_stays(shown: Tab, script: Scripted) -> None:
    script.engine.endless = True
    shown.say("go on")
    shown.until(lambda: len(shown.last()) > 40)
    shown.page.keyboard.press("Escape")
    assert shown.answered().startswith("and on and on")
    assert script.engine.gone.wait(5), "the engine was not told"
    assert "stopped" in shown.page.text_content("#log li:last-child .foot")


def test_answers_can_be_had_again_and_earlier_messages_changed(shown: Tab, script: Scripted) -> None:
    script.engine.answer = ["one"]
    shown.ask("first")
    script.engine.answer = ["two"]
    shown.ask("second")
    script.engine.answer = ["three"]
    shown.page.click(".regenerate")
    shown.page.wait_for_selector("#log :text('three')")
    shown.answered()
    assert shown.texts() == ["first", "one", "second", "three"]
    script.engine.answer = ["four"]
    shown.page.click("#log li:first-child .edit")
    shown.page.fill(".editor textarea", "changed")
    shown.page.keyboard.press("Enter")
    shown.page.wait_for_selector("#log :text('four')")
    shown.answered()
    assert shown.texts() == ["changed", "four"]
    tokenizer = script.model.tokenizer
    assert tokenizer.decode(script.engine.prompts[-1]).strip() == "changed"


def test_settings_and_the_system_prompt_are_sent_and_kept(shown: Tab, script: Scripted) -> None:
    script.engine.answer = ["yes"]
    given = {"temperature": 0.25, "top_k": 7, "top_p": 0.5, "min_p": 0.125, "max_tokens": 9, "seed": 11}
    shown.page.click("#open-settings")
    assert shown.page.get_attribute("[name=temperature]", "placeholder") == "0.7"
    for name, value in given.items():
        shown.page.fill(f"[name={name}]", str(value))
    shown.page.fill("[name=system]", "Be brief.")
    shown.page.click("#settings-save")
    for _ in range(2):
        shown.ask("is it so?")
        asked = script.engine.asked[-1]
        assert {name: getattr(asked, name) for name in given} == given
        assert script.model.tokenizer.decode(script.engine.prompts[-1]).strip().startswith("Be brief.")
        shown.begin()


def test_history_is_kept_renamed_exported_and_deleted(shown: Tab, script: Scripted) -> None:
    script.engine.answer = ["an answer"]
    shown.ask("a question")
    shown.begin()
    assert shown.texts() == ["a question", "an answer"]
    shown.page.click("#new")
    assert shown.texts() == []
    shown.ask("another")
    titles = shown.page.locator("#conversations .open")
    assert titles.all_text_contents() == ["another", "a question"]

    titles.nth(1).hover()
    shown.page.click("[aria-label='Rename: a question']")
    shown.page.fill("#conversations input", "renamed")
    shown.page.keyboard.press("Enter")
    assert set(titles.all_text_contents()) == {"another", "renamed"}

    with shown.page.expect_download() as download:
        shown.page.click("#export-all")
    exported = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))
    assert {c["title"] for c in exported["conversations"]} == {"", "renamed"}
    assert exported["conversations"][0]["messages"][0] == {"role": "user", "content": "another"}

    for button, left in (("Keep it", 2), ("Delete", 1)):
        titles.nth(0).hover()
        shown.page.click(f"[aria-label='Delete: {titles.nth(0).text_content()}']")
        shown.page.click(f"#confirm >> text='{button}'")
        shown.until(lambda: not shown.page.is_visible("#confirm"))
        shown.until(lambda left=left: titles.count() == left)  # type: ignore[misc]
    shown.begin()
    assert titles.count() == 1


def test_an_error_is_one_line_with_a_way_on(shown: Tab, script: Scripted) -> None:
    script.engine.failing = True
    shown.say("hello")
    shown.page.wait_for_selector("#retry:visible")
    assert shown.page.text_content("#notice-text") == "the disk is on fire"
    script.engine.failing, script.engine.answer = False, ["better"]
    shown.page.click("#retry")
    assert shown.answered() == "better"
    assert shown.page.is_hidden("#notice") and shown.texts() == ["hello", "better"]


def test_loading_is_shown_until_the_server_is_ready(browser: Any, script: Scripted) -> None:
    script.engine.state = "loading"
    assert script.server.models.default is not None
    script.server.models.default.progress = "loading", 1, 4
    with tab(browser, script.url) as found:
        found.awaited.add("503")
        found.page.goto(found.url)
        found.page.wait_for_selector("#loading-text:text('Loading the model: 25 %')")
        assert found.page.evaluate("document.querySelector('#loading-bar').value") == 0.25
        assert found.page.is_disabled("#send")
        script.engine.state = "ready"
        found.page.wait_for_selector("#send:enabled")
        assert found.page.is_hidden("#loading")


def test_a_key_is_asked_for_and_forgotten_with_the_tab(browser: Any) -> None:
    with scripted(keys=["open sesame"]) as s, tab(browser, s.url) as found:
        s.engine.answer = ["come in"]
        found.awaited.add("401")
        found.page.goto(found.url)
        for key in ("wrong", "open sesame"):
            found.page.fill("#key", key)
            with found.page.expect_response("**/v1/models"):
                found.page.press("#key", "Enter")
        found.page.wait_for_selector("#send:enabled")
        assert found.ask("hello") == "come in"
        assert "sesame" not in found.page.evaluate("JSON.stringify(localStorage)")
        found.begin()  # the tab remembers it
        assert found.texts() == ["hello", "come in"]


def test_an_answer_is_not_lost_where_another_one_does_not_come(shown: Tab, script: Scripted) -> None:
    script.engine.answer = ["the only one"]
    shown.ask("hello")
    script.engine.answer, script.engine.failing = [], True
    shown.page.click(".regenerate")
    shown.page.wait_for_selector("#retry:visible")
    assert shown.texts() == ["hello", "the only one"]
    script.engine.answer, script.engine.failing = ["another"], False
    shown.page.click("#retry")
    shown.page.wait_for_selector("#log :text('another')")
    shown.answered()
    assert shown.texts() == ["hello", "another"]


def test_trying_again_waits_for_a_server_that_is_not_ready(shown: Tab, script: Scripted) -> None:
    """The engine crashed, or the server was started anew: "Try again" is enough, once."""
    shown.awaited.add("503")
    script.engine.state, script.engine.answer = "loading", ["back again"]
    shown.say("hello")
    shown.page.wait_for_selector("#retry:visible")
    shown.page.click("#retry")
    shown.page.wait_for_selector("#loading:visible")
    assert shown.page.is_disabled("#send")
    script.engine.state = "ready"
    assert shown.answered() == "back again"
    assert shown.texts() == ["hello", "back again"]


def test_a_conversation_deleted_during_an_answer_stays_deleted(shown: Tab, script: Scripted) -> None:
    script.engine.endless = True
    shown.say("a secret")
    shown.until(lambda: len(shown.last()) > 40)
    shown.page.reload()  # the list shows what was saved
    shown.page.wait_for_selector("#send:enabled")
    shown.page.click(".regenerate")
    shown.until(lambda: len(shown.last()) > 40)
    shown.page.locator("#conversations .open").hover()
    shown.page.click("[aria-label='Delete: a secret']")
    shown.page.click("#confirm >> text='Delete'")
    shown.until(lambda: shown.texts() == [])
    assert script.engine.gone.wait(5), "the engine was not told"
    assert "secret" not in shown.page.evaluate("JSON.stringify(localStorage)")


def test_two_tabs_do_not_undo_each_others_messages(shown: Tab, script: Scripted) -> None:
    script.engine.answer = ["one"]
    shown.ask("first")
    other = Tab(shown.page.context.new_page(), shown.url).begin()
    assert other.texts() == ["first", "one"]
    script.engine.answer = ["two"]
    other.ask("second")
    shown.until(lambda: shown.texts() == ["first", "one", "second", "two"])
    script.engine.answer = ["three"]
    shown.ask("third")
    other.until(lambda: other.texts() == ["first", "one", "second", "two", "third", "three"])
    other.page.locator("#conversations .open").hover()
    other.page.click("[aria-label='Delete: first']")
    other.page.click("#confirm >> text='Delete'")
    shown.until(lambda: shown.texts() == [])


def test_a_name_is_typed_in_peace_while_an_answer_grows(shown: Tab, script: Scripted) -> None:
    script.engine.answer = ["one"]
    shown.ask("first")
    script.engine.endless = True
    shown.page.click(".regenerate")
    shown.page.locator("#conversations .open").hover()
    shown.page.click("[aria-label='Rename: first']")
    shown.page.fill("#conversations input", "half a na")
    shown.page.evaluate("document.getElementById('stop').click()")  # no click: it would end the typing
    shown.page.wait_for_selector(".regenerate")
    shown.page.type("#conversations input", "me")
    shown.page.keyboard.press("Enter")
    assert shown.page.text_content("#conversations .open") == "half a name"


def test_a_long_conversation_opens_at_its_end_and_only_that_is_laid_out(shown: Tab) -> None:
    """Laying out all of 2000 messages took seconds, twice for each answer."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": ANSWER} for i in range(300)]
    kept = {"id": "long", "title": "", "system": "", "created": 1, "updated": 1, "messages": messages}
    shown.page.evaluate(
        """kept => {
            localStorage.setItem("thermocline.conversation.long", JSON.stringify(kept));
            localStorage.setItem("thermocline.open", '"long"');
        }""",
        kept,
    )
    shown.begin()
    assert len(shown.texts()) == 300
    laid = (
        "e => [...document.querySelectorAll(e)].filter(x => x.checkVisibility({contentVisibilityAuto: true}))"
    )
    shown.until(lambda: shown.page.evaluate(laid + ".length", "#log .body > h3") < 30)
    assert (
        shown.page.locator("#log > li:last-child .foot").bounding_box()["y"]
        < shown.page.viewport_size["height"]
    )


def test_each_paragraph_is_written_in_its_own_direction(shown: Tab, script: Scripted) -> None:
    script.engine.answer = ["# שלום\n\nمرحبا `x = 1`\n\n- عنصر\n\n```\ncode\n```\n\nplain text"]
    shown.ask("שלום")
    directions = shown.page.eval_on_selector_all(
        "#log li:last-child :is(h3, p:not(.who), ul, .code)",
        "all => all.map(e => getComputedStyle(e).direction)",
    )
    assert directions == ["rtl", "rtl", "rtl", "ltr", "ltr"]
    assert shown.page.evaluate("getComputedStyle(document.getElementById('title')).direction") == "rtl"


def test_all_text_is_readable(shown: Tab, script: Scripted) -> None:
    """WCAG's contrast for text, 4.5, of all that is shown on its ground, and nothing is made fainter."""
    script.engine.answer = [ANSWER]
    shown.ask("hello")
    for scheme in ("light", "dark"):
        shown.page.emulate_media(color_scheme=scheme)
        faint = shown.page.evaluate(CONTRASTS)
        assert faint == [], scheme


@pytest.mark.parametrize("width", [320, 1100])
def test_it_fits_and_follows_the_theme(browser: Any, script: Scripted, width: int) -> None:
    script.engine.answer = [ANSWER + "x" * 300 + " " + "`" + "y" * 300 + "`"]
    with tab(browser, script.url, viewport={"width": width, "height": 640}) as found:
        found.begin().page.set_input_files("#attached", [attached("n" * 120, b"text")])
        found.page.wait_for_selector("#files li")
        assert found.page.evaluate("document.documentElement.scrollWidth") == width
        found.ask("w" * 200)
        assert found.page.evaluate("document.documentElement.scrollWidth") == width
        assert found.page.evaluate("document.querySelector('#scroll').scrollWidth") <= width
        for scheme in ("light", "dark"):
            found.page.emulate_media(color_scheme=scheme)
            for label, bright in (("light", True), ("dark", False), ("as the system", scheme == "light")):
                found.page.click("#theme")
                assert found.page.get_attribute("#theme", "aria-label") == f"Theme: {label}"
                assert (found.brightness() > 200) == bright and (found.brightness() < 50) != bright
        if width == 320:
            assert found.page.is_hidden("#new")
            found.page.click("#open-shelf")
            found.page.wait_for_selector("#new:visible")
            found.page.keyboard.press("Escape")
            found.page.wait_for_selector("#new", state="hidden")


def test_every_control_has_a_name_and_the_keyboard_reaches_it(shown: Tab, script: Scripted) -> None:
    script.engine.answer = ["yes"]
    shown.ask("hello")
    names = """[...document.querySelectorAll('button, input, textarea, [role=img]')]
        .filter((e) => e.checkVisibility())
        .filter((e) => !e.ariaLabel && !e.labels?.[0]?.textContent.trim())
        .filter((e) => e.textContent.trim().length < 2)"""
    assert shown.page.evaluate(f"{names}.map((e) => e.outerHTML)") == []
    reached = set()
    shown.page.evaluate("document.activeElement.blur()")
    for _ in range(32):
        shown.page.keyboard.press("Tab")
        reached.add(shown.page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert reached >= {
        "new",
        "open-machine",
        "theme",
        "open-settings",
        "attach",
        "input",
        "send",
        "Edit",
        "Copy",
        "Again",
        "export-all",
    }


# ---- tools, thoughts, files


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}"
    "{% endfor %}{{ tools | tojson if tools }}{# <tool_call> #}{# <think> #}"
)


@pytest.fixture(scope="module")
def thinking_chat() -> Iterator[Scripted]:
    with scripted(template=TEMPLATE) as found:
        yield found


@pytest.fixture
def thinking(thinking_chat: Scripted) -> Iterator[Scripted]:
    """A scripted server whose model thinks and calls functions."""
    yield thinking_chat
    thinking_chat.engine.endless, thinking_chat.engine.answer = False, ()


def prompt_of(script: Scripted) -> str:
    return str(script.model.tokenizer.decode(script.engine.prompts[-1]))


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def with_tools(found: Tab) -> None:
    found.page.click("#open-settings")
    found.page.click("#tools-example")
    found.page.click("#settings-save")


def test_thoughts_are_folded_and_what_they_say_stays_text(browser: Any, thinking: Scripted) -> None:
    thinking.engine.answer = ["<think>", PAYLOADS[0][0], "</think>", "so it is"]
    with tab(browser, thinking.url) as found:
        assert found.begin().ask("is it?") == "so it is"
        summary = found.page.locator("#log li:last-child .thought > summary")
        assert re.fullmatch(r"Thought for .* s|Thoughts", summary.text_content())
        inner = found.page.locator("#log li:last-child .thought > div")
        assert not inner.is_visible()
        summary.click()
        assert inner.is_visible() and inner.text_content() == PAYLOADS[0][1]
        thinking.engine.answer, thinking.engine.endless = ["<think>"], True
        found.say("think for ever")
        found.until(lambda: summary.text_content() == "Thinking…")
        found.page.keyboard.press("Escape")
        found.answered()


def test_calls_are_shown_and_take_results_that_a_person_gives(browser: Any, thinking: Scripted) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    thinking.engine.answer = [
        "I look.",
        call("get_weather", place="Zürich"),
        call("get_weather", place=hostile),
    ]
    with tab(browser, thinking.url) as found:
        with_tools(found.begin())
        found.ask("what is the weather?")
        assert '"get_weather"' in prompt_of(thinking) and '"enum"' in prompt_of(thinking)
        heads = found.page.locator("#log .call .head code")
        assert heads.all_text_contents() == ["get_weather"] * 2
        given = found.page.locator("#log .call > pre").all_text_contents()
        assert [json.loads(x) for x in given] == [{"place": "Zürich"}, {"place": hostile}]
        assert found.page.locator("#log img").count() == 0
        found.begin()  # it is kept
        areas = found.page.locator("#log .call textarea")
        areas.nth(0).fill('{"degrees": 18}')
        areas.nth(1).fill(hostile)
        thinking.engine.answer = ["18 degrees"]
        found.page.click("#log .results")
        found.until(lambda: found.last() == "18 degrees")
        prompt = prompt_of(thinking)
        assert f'<tool>{{"degrees": 18}}<tool>{hostile}' in prompt, "in the order of the calls"
        assert prompt.index("<assistant>I look.") < prompt.index("Zürich") < prompt.index("<tool>")
        results = found.page.locator("#log .call .result > pre")
        assert json.loads(results.nth(0).text_content()) == {"degrees": 18}
        assert results.nth(1).text_content() == hostile and found.page.locator("#log img").count() == 0
        found.begin()
        assert found.page.locator("#log .call .result").count() == 2
        assert found.page.locator("#log .call textarea").count() == 0
        found.page.click(".regenerate")  # from the results on
        found.answered()
        assert prompt_of(thinking) == prompt


def test_functions_that_are_no_json_are_not_taken(browser: Any, thinking: Scripted) -> None:
    with tab(browser, thinking.url) as found:
        found.begin().page.click("#open-settings")
        for text, why in (
            ("{", "Not JSON"),
            ('[{"description": "?"}]', "Function 1 has no name."),
            ('{"name": "f", "parameters": [1]}', "f: its parameters are no JSON schema."),
        ):
            found.page.fill("[name=tools]", text)
            found.page.click("#settings-save")
            assert found.page.is_visible("#settings")
            assert why in found.page.text_content("#settings-wrong")
        found.page.click("#settings-cancel")
        thinking.engine.answer = ["yes"]
        found.ask("are there functions?")
        assert "parameters" not in prompt_of(thinking)


def attached(name: str, data: bytes) -> dict[str, Any]:
    return {"name": name, "mimeType": "application/octet-stream", "buffer": data}


def test_text_files_are_sent_with_a_message_and_stay_with_it(shown: Tab, script: Scripted) -> None:
    script.engine.answer = ["read"]
    files = [attached("a`b<i>.md", "x = 1 é\n```\n".encode()), attached("wide.txt", "wide".encode("utf-16"))]
    shown.page.set_input_files("#attached", files)
    shown.page.wait_for_selector("#files li:nth-child(2)")
    shown.page.set_input_files("#attached", [attached("dropped.txt", b"no")])
    shown.page.click("[aria-label='Remove dropped.txt']")
    shown.ask("what is it?")
    prompt = prompt_of(script)
    assert "````\nx = 1 é\n```\n````" in prompt, "a fence that the file does not close"
    assert "wide" in prompt and prompt.rstrip().endswith("what is it?") and "dropped" not in prompt
    assert shown.page.is_hidden("#files")
    for _ in range(2):
        assert shown.page.locator("#log .files button").all_text_contents() == ["a`b<i>.md", "wide.txt"]
        shown.begin()
    shown.page.click("#log .files button >> nth=0")
    assert shown.page.text_content("#file-text") == "x = 1 é\n```\n"
    shown.page.click("#file >> text=Close")
    shown.page.click("#log li:first-child .edit")
    shown.page.fill(".editor textarea", "and now?")
    shown.page.keyboard.press("Enter")
    shown.answered()
    assert "x = 1 é" in prompt_of(script) and prompt_of(script).rstrip().endswith("and now?")


def test_files_that_are_no_text_or_too_large_are_refused_politely(shown: Tab) -> None:
    files = [
        attached("a.pdf", b"%PDF-1.7 \xff\xfe\x00"), attached("b.bin", b"text\x00text"),
        attached("c.txt", b"x" * (512 * 1024 + 1)), attached("good.txt", b"fine"),
    ]  # fmt: skip
    shown.page.set_input_files("#attached", files)
    shown.page.wait_for_selector("#notice:visible")
    said = shown.page.text_content("#notice-text")
    assert "a.pdf is not a text file." in said and "b.bin is not a text file." in said
    assert "c.txt has 512 KiB; at most 512 KiB fit." in said and "good.txt" not in said
    assert shown.page.locator("#files li").count() == 1 and shown.page.is_hidden("#retry")
    shown.page.click("#notice-close")
    shown.page.set_input_files("#attached", [attached(f"{i}.txt", b"x" * (500 * 1024)) for i in range(3)])
    shown.page.wait_for_selector("#notice:visible")
    assert "2.txt is too much; a message takes 1.0 MiB." in shown.page.text_content("#notice-text")
    assert shown.page.locator("#files li").count() == 3


def test_a_file_can_be_dropped(shown: Tab) -> None:
    shown.page.evaluate("""() => {
        const data = new DataTransfer();
        data.items.add(new File(["dropped text"], "dropped.txt"));
        for (const kind of ["dragenter", "dragover", "drop"]) {
            const how = { bubbles: true, cancelable: true, dataTransfer: data };
            document.querySelector("main").dispatchEvent(new DragEvent(kind, how));
        }
    }""")
    shown.page.wait_for_selector("#files li")
    assert "dropped.txt" in shown.page.text_content("#files li") and shown.page.is_hidden("#drop")


def test_exported_conversations_can_be_imported_and_other_files_cannot(shown: Tab, script: Scripted) -> None:
    script.engine.answer = ["an answer"]
    shown.ask("a question")
    with shown.page.expect_download() as download:
        shown.page.click("#export-all")
    exported = Path(download.value.path()).read_bytes()
    for data, said in (
        (b"{", "not imported, it is not JSON"),
        (b'{"conversations": []}', "not imported, it was not exported by this page"),
        (exported.replace(b'"user"', b'"root"'), "not imported, there is no conversation in it"),
        (exported.replace(b"a question", b"another question"), "Imported 1 conversation."),
    ):
        shown.page.set_input_files("#imported", [attached("x.json", data)])
        shown.until(lambda said=said: said in shown.page.text_content("#shelf-said"))  # type: ignore[misc]
    titles = shown.page.locator("#conversations .open")
    assert sorted(titles.all_text_contents()) == ["a question", "another question"]
    shown.page.click("text=another question")
    assert shown.texts() == ["another question", "an answer"]


# ---- models and the machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Engines that answer with their model's name, and load as it says."""
    return new_machine(monkeypatch)


@pytest.fixture
def directory(machine: Machine, tmp_path: Path) -> Iterator[Served]:
    """Two models, with memory for one of them; no request gets one without naming it."""
    for name in ("large&b", "small"):
        (tmp_path / f"{name}.gguf").write_bytes(bytes(5))
    ram = (MIB + 128 * MIB) / 2**30
    with served(directory=tmp_path, models_max=4, ram=ram) as made:
        yield made


def test_one_of_several_models_can_be_chosen(browser: Any, directory: Served, machine: Machine) -> None:
    with tab(browser, directory.url) as found:
        asked: list[Any] = []
        found.page.on("request", lambda r: asked.append(r))
        found.begin()
        assert found.page.is_hidden("#model")
        options = found.page.locator("#models option")
        assert options.all_text_contents() == ["large&b (not loaded)", "small (not loaded)"]
        assert machine.loads == [], "a look at the page loads nothing"
        found.page.select_option("#models", "small")
        found.page.wait_for_selector("#send:enabled")
        assert machine.loads == []
        assert found.ask("is it small?") == "small.gguf"
        found.until(lambda: options.all_text_contents() == ["large&b (not loaded)", "small"])
        found.page.select_option("#models", "large&b")
        found.page.wait_for_selector("#send:enabled")
        assert found.ask("is it large?") == "large&b.gguf"
        assert machine.loads == ["small.gguf", "large&b.gguf"]
        posted = [r.post_data_json["model"] for r in asked if r.url.endswith("/v1/chat/completions")]
        assert posted == ["small", "large&b"]
        for route in ("/props", "/activity"):
            named = [r.url.partition(route)[2] for r in asked if route in r.url]
            assert list(dict.fromkeys(named)) == ["?model=small", "?model=large%26b"]
        notes = found.page.locator("#log .assistant .foot > span").all_text_contents()
        assert notes[0].startswith("small · ") and notes[1].startswith("large&b · ")
        found.begin()
        assert found.page.input_value("#models") == "large&b", "the choice is remembered"


def test_a_model_that_is_chosen_while_the_list_comes_stays_chosen(browser: Any, directory: Served) -> None:
    with tab(browser, directory.url) as found:
        found.begin()
        held: list[Any] = []
        found.page.route("**/v1/models", lambda route: held.append(route))
        found.page.dispatch_event("#models", "pointerdown")
        found.until(lambda: len(held) == 1)
        found.page.select_option("#models", "small")
        found.until(lambda: len(held) == 2)
        held[1].continue_()
        found.page.wait_for_selector("#send:enabled")
        shown = found.page.query_selector("#models option")
        held[0].continue_()
        found.until(lambda: not shown.evaluate("node => node.isConnected"))
        assert found.page.input_value("#models") == "small"


def test_the_page_begins_with_a_model_that_is_loaded(
    browser: Any, directory: Served, machine: Machine
) -> None:
    with directory.client() as c:
        c.post("/tokenize", json={"model": "small", "content": "a"})
    with tab(browser, directory.url) as found:
        found.begin()
        assert found.page.input_value("#models") == "small" and machine.loads == ["small.gguf"]


def test_a_model_that_loads_for_an_answer_shows_how_far_it_is(
    browser: Any, directory: Served, machine: Machine
) -> None:
    machine.slow.add("small.gguf")
    with tab(browser, directory.url) as found:
        found.begin()
        found.page.select_option("#models", "small")
        found.page.wait_for_selector("#send:enabled")
        found.say("hello")
        found.page.wait_for_selector("#loading-text:text('Loading small: 25 %')")
        found.until(lambda: "small (loading…)" in found.page.text_content("#models"))
        machine.go()
        assert found.answered() == "small.gguf"
        assert found.page.is_hidden("#loading")


def test_a_model_that_cannot_be_loaded_says_why(browser: Any, directory: Served, machine: Machine) -> None:
    machine.broken["large&b.gguf"] = 1
    with tab(browser, directory.url) as found:
        found.awaited.add("400")
        found.begin()
        found.say("hello")
        found.until(lambda: "large&b.gguf is broken" in found.page.text_content("#notice-text"))
        found.page.select_option("#models", "small")
        found.page.wait_for_selector("#send:enabled")

        def is_answered() -> bool:
            if found.page.input_value("#input"):  # Enter does nothing while the page looks at the other model
                found.page.press("#input", "Enter")
            return found.last() == "small.gguf"

        found.page.fill("#input", "you, then")
        found.until(is_answered)


def test_a_directory_without_models_says_so(browser: Any, machine: Machine, tmp_path: Path) -> None:
    with served(directory=tmp_path, models_max=4, ram=1.0) as made, tab(browser, made.url) as found:
        found.page.goto(found.url)
        found.until(lambda: "no model yet" in found.page.text_content("#notice-text"))
        (tmp_path / "small.gguf").write_bytes(bytes(5))
        found.page.click("#retry")
        assert found.page.wait_for_selector("#send:enabled")
        assert found.ask("hello") == "small.gguf"


def test_the_benchmark_says_what_bounds_the_machine(shown: Tab, script: Scripted) -> None:
    shown.awaited |= {"409", "429"}
    script.engine.bench = None
    shown.page.click("#open-machine")
    shown.page.click("#measure")
    shown.until(lambda: "went first" in shown.page.text_content("#measured"))
    assert shown.page.is_hidden("#found") and shown.page.is_enabled("#measure")
    shown.page.click("#measure")
    shown.until(lambda: "try again in" in shown.page.text_content("#measured"))
    shown.page.route("**/benchmark", lambda route: route.fulfill(json=report(bench())))
    shown.page.click("#measure")
    shown.page.wait_for_selector("#found:visible")
    assert shown.page.text_content("#bound") == "Memory sets the pace."
    figures = shown.page.inner_text("#figures")
    assert "12 GB/s, of which a token uses 10" in figures and "12 tokens a second" in figures
    width = shown.page.evaluate("document.querySelector('.bar-fill').style.width")
    assert width == "83%"
    for scheme in ("light", "dark"):
        shown.page.emulate_media(color_scheme=scheme)
        assert shown.page.evaluate(CONTRASTS) == []
    shown.page.keyboard.press("Escape")
    assert shown.page.is_hidden("#machine")


def mixture_report(hit_rate: float | None) -> dict[str, Any]:
    """Of 48 layers with 128 experts: each uses expert 0 for each token, and others now and then."""
    used = [[0, 8], *([e, 1] for e in range(3, 40))]
    experts = {"n": 128, "n_used": len(used), "used": used, "hit_rate": hit_rate}
    layers = [{"active": 0.04, "computed": 0.04, "asked": 0.05, "experts": experts} for _ in range(48)]
    disk = None if hit_rate is None else {"gb_per_s": 1.0, "hit_rate": hit_rate}
    tiers = {"gpu": None, "ram": {"gb_per_s": 31.0}, "disk": disk}
    return {"tokens": 8, "tokens_per_s": 24.0, "gb_per_s": 31.0, "layers": layers, "tiers": tiers}


@pytest.mark.parametrize("hit_rate", [None, 0.75])
def test_a_mixture_s_strip_shows_experts_and_what_was_found_in_memory(
    shown: Tab, hit_rate: float | None
) -> None:
    take = "async (report) => (await import('/page/strip.js')).take(report)"
    for _ in range(3):
        shown.page.evaluate(take, mixture_report(hit_rate))
    text = shown.page.inner_text("#strip-text")
    assert "38 of 128 experts in use" in text and ("75 % found in memory" in text) == (hit_rate is not None)
    label = shown.page.get_attribute("#strip-picture", "aria-label")
    assert label.count("38 of 128") == 48 and ("Found in memory: 75 %" in label) == (hit_rate is not None)
    box = shown.page.locator("#strip-picture").bounding_box()
    for y, said in (
        (0.2, "layer 0, expert 0: 100 % of tokens"),
        (box["height"] - 3, "layer 0: 75 % found in memory"),
    ):
        if y < 1 or hit_rate is not None:
            shown.page.mouse.move(box["x"] + 2, box["y"] + y)
            shown.until(lambda said=said: shown.page.text_content("#strip-about") == said)  # type: ignore[misc]
    row = """(y) => {
        const c = document.getElementById("strip-picture");
        return [...c.getContext("2d").getImageData(2, y, 1, 1).data];
    }"""
    always, never = shown.page.evaluate(row, 0), shown.page.evaluate(row, 100)
    assert always != never and shown.page.evaluate(row, 20) not in (always, never)


# ---- with the engine itself


@pytest.fixture(scope="module")
def real() -> Iterator[Served]:
    with served(chat_template=None) as found:
        yield found


def test_the_bundled_model_continues_a_text_and_its_layers_are_seen(browser: Any, real: Served) -> None:
    with tab(browser, real.url) as found:
        found.begin()
        found.page.click("#open-settings")
        assert found.page.is_hidden("[name=system]")
        found.page.fill("[name=temperature]", "0")
        found.page.fill("[name=max_tokens]", "150")
        found.page.click("#settings-save")
        assert found.ask("Once upon a time") == greedy(real, "Once upon a time", 150)
        found.page.wait_for_selector("#strip:visible")
        assert re.search(
            r"tok/s · \d.* % of neurons active · .*RAM .* GB/s", found.page.inner_text("#strip-text")
        )
        picture = found.page.get_attribute("#strip-picture", "aria-label")
        assert picture.count("%") == 6, "a share for each layer"
        assert len(found.pixels()) >= 3, "layers differ, and so do their colours"
        before = found.texts()
        found.say("")  # on from there
        found.page.wait_for_selector("#log li:nth-child(3) .regenerate")
        found.begin()
        assert found.texts()[:2] == before and len(found.texts()) == 3


def greedy(real: Served, prompt: str, n: int) -> str:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": n}
    with real.client() as c:
        text: str = c.post("/v1/completions", json=body).json()["choices"][0]["text"]
        return text
