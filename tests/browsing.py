"""The system's Chromium, driven by Playwright, and what a page did there that it should not have done."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE_MS = 10_000


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Skips, saying why, where there is no browser or nothing to drive it with."""
    needed = "needs playwright: pip install '.[test-all]'"
    api = pytest.importorskip("playwright.sync_api", reason=needed)
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no browser here: none of {', '.join(NAMES)}")
    with api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Tab:
    """A page in a profile of its own. `wrong`: dialogs, errors, the policy violated, foreign requests."""

    page: Any
    url: str
    wrong: list[str] = field(default_factory=list)
    awaited: set[str] = field(default_factory=set)  # of errors on the console: those a test provokes

    def begin(self) -> Tab:
        self.page.goto(self.url)
        self.page.wait_for_selector("#send:enabled")
        return self

    def say(self, text: str) -> None:
        self.page.fill("#input", text)
        self.page.press("#input", "Enter")

    def ask(self, text: str) -> str:
        """The answer, once it is whole."""
        self.say(text)
        return self.answered()

    def answered(self) -> str:
        self.page.wait_for_selector("#send:visible")
        self.page.wait_for_selector("#log li:last-child .regenerate")
        return self.last()

    def until(self, holds: Callable[[], bool]) -> None:
        """As `page.wait_for_function`, for which the page's policy is too strict."""
        for _ in range(PATIENCE_MS // 20):
            if holds():
                return
            self.page.wait_for_timeout(20)
        raise AssertionError("it did not come about")

    def last(self) -> str:
        found: str = self.page.text_content("#log li:last-child .body")
        return found

    def texts(self) -> list[str]:
        found: list[str] = self.page.locator("#log .body").all_text_contents()
        return found

    def brightness(self) -> float:
        colour = self.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3

    def pixels(self) -> set[tuple[int, ...]]:
        """The colours of the picture's uppermost row, each of six layers' at its left end."""
        data = self.page.evaluate("""() => {
            const c = document.getElementById("strip-picture");
            const at = (i) => c.getContext("2d").getImageData((i * c.width) / 6 + 3, 3, 1, 1).data;
            return [0, 1, 2, 3, 4, 5].map((i) => [...at(i)]);
        }""")
        return {tuple(x) for x in data}


@contextlib.contextmanager
def tab(browser: Any, url: str, **how: Any) -> Iterator[Tab]:
    context = browser.new_context(**how)
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(
        "document.addEventListener('securitypolicyviolation',"
        " e => console.error('violates', e.violatedDirective, e.blockedURI))"
    )
    found = Tab(context.new_page(), url.rstrip("/") + "/")
    page, wrong = found.page, found.wrong

    def dialog(d: Any) -> None:
        wrong.append(f"dialog {d.message}")
        d.dismiss()

    def console(message: Any) -> None:
        if message.type == "error" and not any(part in message.text for part in found.awaited):
            wrong.append(message.text)

    page.on("dialog", dialog)
    page.on("console", console)
    page.on("pageerror", lambda e: wrong.append(str(e)))
    page.on("popup", lambda _: wrong.append("a window"))
    ours = (found.url, "blob:" + found.url)
    context.on("request", lambda r: r.url.startswith(ours) or wrong.append(f"request {r.url}"))
    try:
        yield found
        assert wrong == [], wrong
    finally:
        context.close()
