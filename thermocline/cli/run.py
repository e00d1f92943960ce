"""The commands that write text: `run` and `chat`.

Must not know kernels, tensors or scheduling. What is heavy is imported when a command runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from thermocline.cli import commands, report
from thermocline.cli.console import INTERRUPTED, CtrlC, Progress, emit, emit_json, show_dim
from thermocline.errors import BadFile, IOFailure, ThermoclineError, UsageError
from thermocline.session.options import EngineOptions, ModelOptions

if TYPE_CHECKING:
    from thermocline.cli.conversation import Chat
    from thermocline.cli.repl import Terminal
    from thermocline.engine.request import Completion
    from thermocline.engine.sampler import SamplingParams
    from thermocline.llm import LLM, Stream
    from thermocline.text.grammar import Grammar

log = logging.getLogger(__name__)

MAX_PROMPT_BYTES = 64 << 20


def read_prompt(o: commands.RunOptions) -> str:
    if o.prompt is not None and o.file is not None:
        raise UsageError("both a prompt and --file are given; choose one")
    if o.file is not None:
        with open(o.file, "rb") as f:
            return _decoded(f.read(MAX_PROMPT_BYTES + 1), o.file)
    if o.prompt == "-":
        return _decoded(stdin_bytes().read(MAX_PROMPT_BYTES + 1), "stdin")
    if o.prompt is None:
        raise UsageError('no prompt; try `thermocline run "Once upon a time"`, -f FILE, or -p - for stdin')
    return o.prompt


def stdin_bytes() -> BinaryIO:
    if sys.stdin is None:
        raise IOFailure("standard input is closed")
    return sys.stdin.buffer


def _decoded(data: bytes, name: str) -> str:
    if len(data) > MAX_PROMPT_BYTES:
        raise UsageError(f"{name}: a prompt of more than {MAX_PROMPT_BYTES >> 20} MiB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise BadFile(f"{name}: not UTF-8 text: byte {e.start} is 0x{data[e.start]:02x}") from None


def open_llm(
    o: commands.Generation, progress: Progress, chat_template: str | None = None, max_batch: int = 1
) -> LLM:
    """Everything but the weights: those are read once the prompt is known to fit."""
    from thermocline.llm import LLM

    files, options = model_options(o, chat_template), engine_options(o, max_batch)
    return LLM(files=files, options=options, progress=progress.at, lazy=True)


def model_options(o: commands.Generation, chat_template: str | None) -> ModelOptions:
    """Return which model the command line names, and how its files are read."""
    return ModelOptions(
        model=o.model,
        format=o.format,
        activation=o.activation,
        cache_dir=commands.cache_dir(o.cache_dir),
        chat_template=chat_template,
        generation_config=o.generation_config,
    )


def engine_options(o: commands.Generation, max_batch: int) -> EngineOptions:
    """Return what the command line says of a session."""
    return EngineOptions(
        sparsity=o.sparsity,
        context=o.ctx_size or None,
        max_batch=max_batch,
        threads=o.threads if o.threads > 0 else None,
        ram=o.ram,
        gpu=o.gpu,
        vram=o.vram,
        disable=o.disable,
    )


def sampling(o: commands.Generation) -> dict[str, Any]:
    """What is said of it, as `SamplingParams` has it: the rest is the model's own."""
    free = {
        "temperature": o.temp, "top_k": o.top_k, "top_p": o.top_p, "min_p": o.min_p,
        "repeat_penalty": o.repeat_penalty, "repeat_last_n": o.repeat_last_n
    }  # fmt: skip
    return {
        **{name: value for name, value in free.items() if value is not None},
        **({} if o.n_predict is None else {"max_tokens": o.n_predict if o.n_predict > 0 else None}),
        "presence_penalty": o.presence_penalty,
        "frequency_penalty": o.frequency_penalty,
        "seed": o.seed if o.seed >= 0 else None,
        "stop": o.stop,
        "logit_bias": dict(o.logit_bias),
        "ignore_eos": o.ignore_eos,
    }


def params_for(llm: LLM, o: commands.Generation, form: Grammar | None) -> SamplingParams:
    from thermocline.engine.generation_config import completed

    return replace(completed(sampling(o), llm.recommended), grammar=form)


def form_of(o: commands.Form) -> Grammar | None:
    """What answers have to be; refused before a model is opened where that cannot be kept to."""
    given = {
        "--json-schema": o.json_schema, "--json-schema-file": o.json_schema_file,
        "--grammar": o.grammar, "--grammar-file": o.grammar_file
    }  # fmt: skip
    asked = [(flag, text) for flag, text in given.items() if text is not None]
    if not asked:
        return None
    from thermocline.cli.conversation import text_of
    from thermocline.text import grammar_matcher
    from thermocline.text.grammar import Grammar

    if len(asked) > 1:
        raise UsageError(f"{' and '.join(flag for flag, _ in asked)}: only one of them can be kept to")
    flag, text = asked[0]
    text = text_of(Path(text)) if flag.endswith("-file") else text
    found = Grammar.json_schema(text) if flag.startswith("--json") else Grammar.lark(text)
    grammar_matcher.check(found)
    return found


def run(o: commands.RunOptions) -> int:
    begin = time.perf_counter()
    prompt = read_prompt(o)
    form = form_of(o)
    with Progress(quiet=o.quiet) as progress, open_llm(o, progress, max_batch=o.n_best) as llm:
        params = replace(params_for(llm, o, form), logprobs=o.logprobs)
        answers: list[Completion] = []
        if o.n_best > 1:
            answers = best_of(llm, prompt, params, o)
            done, first_token_s = answers[0], None
        else:
            done, first_token_s = generate(llm, prompt, params, o, begin)
        if o.json or not o.quiet:
            figures = report.figures_of(llm, done, first_token_s, o.model or "bundled")
            if answers:
                figures["answers"] = [report.answer_of(a) for a in answers]
                if o.logprobs is None:  # only asked for to compare the answers
                    del figures["logprobs"]
            if o.json:
                emit_json(figures)
            if not o.quiet:
                log.info(report.line_of(figures))
    return INTERRUPTED if done.finish_reason == "cancelled" else 0


def generate(
    llm: LLM, prompt: str, params: SamplingParams, o: commands.RunOptions, begin: float
) -> tuple[Completion, float | None]:
    """Stream the answer to stdout. -> (it, seconds from `begin` to its first token)."""
    first_token_s = None
    with CtrlC() as ctrl_c, llm.stream(prompt, params) as stream:
        ctrl_c.computing = lambda: stream.computing
        try:
            for chunk in stream:
                if first_token_s is None:
                    first_token_s = time.perf_counter() - begin
                    ctrl_c.patient = True
                    if o.display_prompt and not o.json:
                        emit(prompt)
                if chunk.text and not o.json:
                    emit(chunk.text)
                if ctrl_c.asked:
                    break
        except KeyboardInterrupt:
            pass  # closing the stream makes the answer "cancelled"
        stream.close()
        if not o.json:
            emit("\n")
        return stream.completion, first_token_s


def best_of(llm: LLM, prompt: str, params: SamplingParams, o: commands.RunOptions) -> list[Completion]:
    """The answers, the likeliest, which is printed, first."""
    with CtrlC():
        answers = llm.best_of(o.n_best, prompt, params)
    if not o.json:
        emit((prompt if o.display_prompt else "") + answers[0].text + "\n")
    return answers


# ---- chat


def chat(o: commands.ChatOptions) -> int:
    from thermocline.cli import conversation as chats
    from thermocline.cli import repl

    template = chats.text_of(Path(o.template)) if o.template else None
    form = form_of(o)
    with Progress(quiet=o.quiet) as progress, open_llm(o, progress, template) as llm:
        params = params_for(llm, o, form)
        _ = llm.chat_template.stop_ids  # refuses a model without a template early, and starts its process
        llm.load()
        show: Callable[[str], None] = (lambda text: None) if o.quiet else show_dim
        alone = not repl.is_terminal()
        answering = speak_or_leave if alone else speak
        talk = chats.Chat(llm, params, answering, show, system=o.system, variables=o.template_vars)
        if alone:
            lines = repl.Lines(stdin_bytes())
            while (entry := repl.entry(lines)) is not None and talk.take(*entry):
                pass
        else:
            show("type a message; /help lists what else there is")
            history = commands.default_state_dir(os.environ) / "chat_history"
            converse(talk, repl.Terminal(history, show_dim))
    return 0


def converse(talk: Chat, terminal: Terminal) -> None:
    """Until the person leaves. What goes wrong in a turn is said, and the next begins."""
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
    """In the middle of a step, which is given up; the program goes on."""


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


def speak(start: Callable[[], Stream]) -> Completion | None:
    """Stream an answer to stdout. None where Ctrl-C came before there was one."""
    with StopsAnswer() as ctrl_c:
        stream = start()
        ctrl_c.stream = stream
        with stream:
            shown = 0
            with contextlib.suppress(AnswerStopped):
                for chunk in stream if not ctrl_c.presses else ():
                    emit(chunk.text)
                    shown += len(chunk.text)
        done = stream.completion
        emit(done.text[shown:] + "\n")  # a token may have come while it was stopped
    return done if done.token_ids else None


def speak_or_leave(start: Callable[[], Stream]) -> Completion | None:
    """Where nobody is asked what to do next, Ctrl-C ends the program."""
    done = speak(start)
    if done is None or done.finish_reason == "cancelled":
        raise KeyboardInterrupt
    return done
