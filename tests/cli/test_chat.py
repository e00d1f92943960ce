"""`thermocline chat` as a person at a terminal and as a script meet it; `LLM.chat` as a program does."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import thermocline as package
from thermocline import LLM, SamplingParams, UsageError
from thermocline.cli import conversation

CHATML = (
    "{% for m in messages %}{{ bos_token + m['role'] + '\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token + 'assistant\n' }}{% endif %}"
)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPT = r">[ \x08]"
ANSWERING = r"\?2004l[\s\S]{80}"  # the line editor has let go of the terminal, and there is text
FLAGS = ("--temp", "0", "-t", "1", "--ignore-eos")


@pytest.fixture(scope="session")
def chat_pack(tiny_hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from thermocline.cli import main

    source = shutil.copytree(tiny_hf, tmp_path_factory.mktemp("chat") / "hf")
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    path = source.with_name("pack")
    assert main.main(["pack", str(source), "-o", str(path), "--format", "f32", "-q"]) == 0
    return path


@pytest.fixture
def llm(chat_pack: Path) -> Iterator[LLM]:
    with LLM(chat_pack, threads=1, context=2048) as llm:
        yield llm


def environment(home: Path) -> dict[str, str]:
    paths = [str(Path(package.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "XDG_STATE_HOME": str(home), "TERM": "xterm"}


# ---- in Python


def test_llm_chat_answers_and_streams_the_same(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    done = llm.chat(messages, GREEDY)
    with llm.stream_chat(messages, GREEDY) as stream:
        text = "".join(chunk.text for chunk in stream)
    assert text == done.text and len(done.token_ids) == 40
    assert llm.generate("hello", GREEDY).text != done.text
    with pytest.raises(UsageError, match="at least one message"):
        llm.chat([])


def test_an_answer_ends_at_the_templates_end_of_turn(llm: LLM) -> None:
    """Not only at the model's own end token: here the template ends its turns with another."""
    template = CHATML.replace("eos_token", "bos_token")
    bias = {256: 1000.0}
    with LLM(llm.path, threads=1, context=256, chat_template=template) as other:
        done = other.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=9, logit_bias=bias))
    assert (done.finish_reason, done.token_ids, done.text) == ("stop", [256], "")


def test_a_turn_computes_only_what_is_new(llm: LLM) -> None:
    """However long the conversation: all but the last block of what was there is known."""
    from thermocline.cli.conversation import Conversation

    done: list[Any] = []

    def speak(start: Callable[[], Any]) -> Any:
        with start() as stream:
            for _ in stream:
                pass
        done.append(stream.completion)
        return done[-1]

    chat = Conversation(llm, GREEDY, speak, lambda text: None)
    for i in range(6):
        chat.take(f"message {i}")
    for before, after in pairwise(done):
        there = before.figures.prompt_tokens + before.figures.tokens
        assert after.figures.cached_tokens > there - 33
    chat.take("/regen")
    assert done[-1].text == done[-2].text
    assert done[-1].figures.cached_tokens > done[-2].figures.prompt_tokens - 33


# ---- as a script


def piped(pack: Path, cwd: Path, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "thermocline", "chat", "-m", str(pack), *FLAGS, *flags]
    return subprocess.run(command, cwd=cwd, env=environment(cwd), input=text, capture_output=True, text=True)


def test_a_pipe_is_one_turn_a_line_and_commands_work(chat_pack: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("from a file\n")
    said = (
        'one\n/read notes.txt\n"""\ntwo\n/not a command"""\n/system Be brief.\n/save a.json\nthree\\\nmore\n'
    )
    ran = piped(chat_pack, tmp_path, said + "/load a.json\n/save b.json\n/exit\nnever\n", "-n", "5")
    assert ran.returncode == 0, ran.stderr
    saved = json.loads((tmp_path / "a.json").read_text())["messages"]
    assert saved == json.loads((tmp_path / "b.json").read_text())["messages"]
    assert [m["role"] for m in saved] == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in saved if m["role"] != "assistant"] == [
        "Be brief.", "one", "from a file\n\ntwo\n/not a command",
    ]  # fmt: skip
    assert saved[2]["content"] + "\n" in ran.stdout and ran.stderr.count("tok/s") >= 3
    assert "\x1b" not in ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("said", "code", "why"),
    [
        ("/nonsense\n", 2, "/help"),
        ("/regen\n", 2, "nothing to regenerate"),
        ("/read absent\n", 4, "absent"),
        ("/save\n", 2, "name of a file"),
        ("/load bad.json\n", 3, "not a saved conversation"),
        ("hi\n/save bad.json\n", 3, "not a saved conversation"),
        ('"""\nunfinished\n', 2, "ends inside a message"),
        ("far too long " * 30 + "\n", 2, "/clear begins a new conversation"),
    ],
)
def test_what_goes_wrong_in_a_script_ends_it(
    said: str, code: int, why: str, chat_pack: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.json").write_text("{}")
    ran = piped(chat_pack, tmp_path, said, "-c", "128", "-n", "3", "-q")
    assert (ran.returncode, ran.stderr.count("\n")) == (code, 1), ran.stderr
    assert why in ran.stderr


def test_a_model_without_a_template_is_refused_kindly(thermocline: Callable[..., Any]) -> None:
    ran = thermocline("chat")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "thermocline run" in ran.err and "--template FILE" in ran.err


def test_the_engine_is_told_which_marks_an_answer_has(
    chat_pack: Path, monkeypatch: pytest.MonkeyPatch, thermocline: Callable[..., Any]
) -> None:
    """It looks for stop strings, and `Said` knows what is not shown."""
    told: list[dict[int, bool]] = []

    class Watched(conversation.Conversation):
        def __init__(self, llm: LLM, params: SamplingParams, *more: Any, **named: Any) -> None:
            told.append(dict(params.marks))
            super().__init__(llm, params, *more, **named)

    monkeypatch.setattr(conversation, "Conversation", Watched)
    monkeypatch.setattr("thermocline.cli.said.Said.marks", {5: False})
    monkeypatch.setattr("thermocline.cli.commands.chat.stdin_bytes", lambda: io.BytesIO())
    assert thermocline("chat", "-m", chat_pack, *FLAGS).code == 0 and told == [{5: False}]


def test_a_template_can_be_given(tiny_pack: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages[-1].content }}")
    ran = piped(tiny_pack, tmp_path, "hi\n", "--template", "t.jinja", "-n", "3")
    assert ran.returncode == 0 and "3 tokens" in ran.stderr


# ---- at a terminal


class Screen:
    """`thermocline chat` on a pseudo-terminal."""

    def __init__(self, pack: Path, cwd: Path, *flags: str) -> None:
        self.fd, theirs = pty.openpty()
        command = [sys.executable, "-P", "-m", "thermocline", "chat", "-m", str(pack), *FLAGS, *flags]

        def in_a_session() -> None:
            os.setsid()
            import fcntl
            import termios

            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            command, cwd=cwd, env=environment(cwd), stdin=theirs, stdout=theirs, stderr=theirs,
            preexec_fn=in_a_session,
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""

    def until(self, pattern: str, seconds: float = 30) -> str:
        """Read until it appears in what is new; -> that."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < end, f"no {pattern!r} in {self.seen[-2000:]!r}"
            if select.select([self.fd], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:
                    raise AssertionError(f"ended before {pattern!r}: {self.seen[-2000:]!r}") from None
        new, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return new

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def end(self) -> int:
        try:
            while os.read(self.fd, 65536):
                pass
        except OSError:
            pass
        os.close(self.fd)
        return self.process.wait(timeout=30)


def test_a_conversation_at_a_terminal(chat_pack: Path, tmp_path: Path) -> None:
    screen = Screen(chat_pack, tmp_path, "-c", "32768")
    screen.until("/help lists")
    screen.until(PROMPT)
    screen.type("go on\r")
    screen.until(ANSWERING)  # it never ends by itself
    screen.type("\x03")
    screen.until("stopped.*tok/s")
    screen.until(PROMPT)
    assert screen.process.poll() is None, "Ctrl-C ended the program"
    screen.type("/regen\r")
    screen.until(ANSWERING)
    screen.type("\x03")
    assert "known" in screen.until("stopped.*known")
    screen.until(PROMPT)
    screen.type("half a line\x03/nope\r")  # Ctrl-C clears what is typed
    screen.until("/nope is no command")
    screen.until(PROMPT)
    screen.type("\x03")
    screen.until("Ctrl-C again")
    screen.until(PROMPT)
    screen.type("\x03")
    assert screen.end() == 0
    history = tmp_path / "thermocline" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "+go on" in history.read_text() and "half" not in history.read_text()


def test_ctrl_d_leaves_and_the_template_process_is_gone(chat_pack: Path, tmp_path: Path) -> None:
    screen = Screen(chat_pack, tmp_path, "-n", "3")
    screen.until(PROMPT)
    screen.type("hi\r")
    screen.until("3 tokens")
    screen.until(PROMPT)
    screen.type("\x04")
    assert screen.end() == 0


def test_ctrl_c_ends_a_script(chat_pack: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "thermocline", "chat", "-m", str(chat_pack), *FLAGS, "-c", "32768"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(tmp_path),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    assert process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and b"Traceback" not in err
