"""`thermocline chat`: a conversation at a terminal, or over a pipe."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thermocline.cli.console import CtrlC, ProgressBar, emit, show_dim, stdin_bytes
from thermocline.cli.environment import default_state_dir
from thermocline.cli.generation import (
    GenerationOptions,
    GrammarOptions,
    grammar_of,
    open_llm,
    params_for,
)
from thermocline.errors import ThermoclineError
from thermocline.options import json_object, nonempty, opt

if TYPE_CHECKING:
    from thermocline.cli.conversation import Conversation
    from thermocline.cli.repl import Terminal
    from thermocline.cli.said import Said
    from thermocline.engine.request import Completion
    from thermocline.llm import Stream

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChatOptions(GrammarOptions, GenerationOptions):
    """Talk with a model that was made to chat; /help there lists its commands."""

    system: str | None = opt(
        None, nonempty, "TEXT", "Conversation", "What the model is told before the first message.",
        flags="-sys --system-prompt", shown="nothing"
    )  # fmt: skip
    template: str | None = opt(
        None, nonempty, "FILE", "Conversation", "A chat template (Jinja) in place of the model's own.",
        flags="--chat-template-file", shown="the model's"
    )  # fmt: skip
    template_vars: Mapping[str, Any] | None = opt(
        None, json_object, "JSON", "Conversation",
        "Variables for the template, such as '{\"enable_thinking\": false}'.",
        flags="--chat-template-kwargs", shown="none"
    )  # fmt: skip


def chat(o: ChatOptions) -> int:
    from thermocline.cli import repl
    from thermocline.cli.conversation import Conversation, text_of
    from thermocline.cli.said import Said

    template = text_of(Path(o.template)) if o.template else None
    grammar = grammar_of(o)
    with ProgressBar(quiet=o.quiet) as progress, open_llm(o, progress, template) as llm:
        params = params_for(llm, o, grammar)
        _ = llm.chat_template.stop_ids  # refuses a model without a template early, and starts its process
        params = replace(params, marks=Said(llm).marks)
        llm.load()
        show: Callable[[str], None] = (lambda text: None) if o.quiet else show_dim
        alone = not repl.is_terminal()
        answering = partial(speak_or_leave if alone else speak, said=partial(Said, llm))
        talk = Conversation(llm, params, answering, show, system=o.system, variables=o.template_vars)
        if alone:
            lines = repl.Lines(stdin_bytes())
            while (entry := repl.entry(lines)) is not None and talk.take(*entry):
                pass
        else:
            show("type a message; /help lists what else there is")
            history = default_state_dir(os.environ) / "chat_history"
            converse(talk, repl.Terminal(history, show_dim))
    return 0


def converse(talk: Conversation, terminal: Terminal) -> None:
    """Take turns until the person leaves. An error ends its turn alone, with a line."""
    from thermocline.cli import repl

    leaving = False
    while True:
        try:
            entry = repl.entry(terminal)
            if entry is None or not talk.take(*entry):
                return
            leaving = False
        except KeyboardInterrupt:
            if leaving:
                return
            leaving = True
            show_dim("Ctrl-C again, or Ctrl-D, leaves")
        except ThermoclineError as e:
            log.error(str(e))


class AnswerStopped(KeyboardInterrupt):
    """Ctrl-C in the middle of a step, which is given up; the program goes on."""


class StopsAnswer(CtrlC):
    """Ctrl-C ends the answer, and gives up the token or piece of prompt that is being computed; a third one
    waits for nothing else either.
    """

    stream: Stream | None = None
    presses = 0

    def _on(self, *_: object) -> None:
        self.presses += 1
        if self.presses > 2:
            raise KeyboardInterrupt
        if self.stream is not None:
            self.stream.cancel()
            if self.stream.computing:
                raise AnswerStopped


def speak(start: Callable[[], Stream], said: Callable[[], Said]) -> Completion | None:
    """Stream an answer to stdout. None where Ctrl-C came before there was one."""
    with StopsAnswer() as ctrl_c:
        stream, answer = start(), said()
        ctrl_c.stream = stream
        with stream, contextlib.suppress(AnswerStopped):
            for chunk in stream if not ctrl_c.presses else ():
                emit(answer.add(chunk))
        left, done = answer.end(stream.completion)
        emit(left + "\n")
    return done if done.token_ids else None


def speak_or_leave(start: Callable[[], Stream], said: Callable[[], Said]) -> Completion | None:
    """Stream an answer to stdout. Ctrl-C ends the program: nobody is asked what to do next."""
    done = speak(start, said)
    if done is None or done.finish_reason == "cancelled":
        raise KeyboardInterrupt
    return done
