"""The process that renders a chat template, as its caller sees it. `template_worker.py` runs in it."""

from __future__ import annotations

import json
from typing import Any

from thermocline.errors import BadFile, Unsupported, UsageError
from thermocline.text.confined_process import ConfinedProcess, ProcessEnded, paths_of

WORKER = "thermocline.text.template_worker"

OWN, SPOKEN, ANSWERS = 1, 2, 254  # as in template_worker.py
Span = tuple[
    int, int, int
]  # start, stop, author: OWN is the template, SPOKEN + i % ANSWERS the answer messages[i]


class TemplateProcess:
    """Renders one template. Safe to use from several threads."""

    def __init__(self, source: str, name: str) -> None:
        """`name`: where the template comes from, for errors."""
        self._source, self._name = source, name
        try:
            self._confined = ConfinedProcess(WORKER, paths_of("jinja2", "markupsafe"))
        except LookupError as e:
            raise Unsupported(f"chat templates need {e}; install it with `pip install {e}`") from None

    def render(
        self, messages: list[dict[str, Any]], tokens: dict[str, str], variables: dict[str, Any]
    ) -> tuple[str, list[Span]]:
        """Return the text and its spans by author. Text outside all spans came with the messages."""
        ask = {"template": self._source, "messages": messages, "tokens": tokens, "variables": variables}
        try:
            reply = json.loads(self._confined.ask(json.dumps(ask).encode()))
        except ProcessEnded as e:
            reply = {"error": "bad", "why": f"it {e}"}
        if "error" not in reply:
            return reply["text"], [(start, stop, who) for start, stop, who in reply["spans"]]
        why = " ".join(str(reply["why"]).split())[:300]
        if reply["error"] == "refused":
            raise UsageError(f"the model's chat template refuses this conversation: {why}")
        raise BadFile(f"{self._name}: not a usable chat template: {why}")

    def close(self) -> None:
        self._confined.close()
