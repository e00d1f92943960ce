"""Fixtures that several test files share. No network, no GPU, no global state."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import one_thread  # noqa: F401  (first)
import pytest
import tiny

from thermocline import _native
from thermocline.cli import main
from thermocline.machine import hardware, this_machine
from thermocline.pack import blocks

pytest_plugins = ["selection"]
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Third-party data beside the repository; tests that use it carry the `shared` mark."""
    if not SHARED.is_dir():
        pytest.skip(f"needs {SHARED}, which is not here")
    return SHARED


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """A suite in a script's background (`nohup`) begins with SIGINT ignored, and a child inherits that."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The person's own THERMOCLINE_ variables and cache stay out; ISA stays, so a level can be tested."""
    for name in list(os.environ):
        ours = name.startswith("THERMOCLINE_") and name != "THERMOCLINE_ISA"
        if ours or name.startswith(("HF_", "HUGGINGFACE_", "TRANSFORMERS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # a test of the hub says where its own is
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(what for, bytes) of each arena that is allocated from here on."""
    taken: list[tuple[str, int]] = []
    made = blocks.new_arena

    def new_arena(nbytes: int, what: str) -> _native.Arena:
        taken.append((what, nbytes))
        return made(nbytes, what)

    monkeypatch.setattr(blocks, "new_arena", new_arena)
    return taken


@pytest.fixture(autouse=True)
def little_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No claim is about this machine's speed, and a gigabyte of new memory takes up to a second each time."""
    monkeypatch.setattr(hardware, "ROOF_BYTES", 32 << 20)
    monkeypatch.setattr(hardware, "DOCTOR_SECONDS", 0.02)
    monkeypatch.setattr(this_machine, "ARENA_BYTES", 16 << 20)
    monkeypatch.setattr(this_machine, "SECONDS", 0.02)


@pytest.fixture(scope="session")
def tiny_hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model as a Hugging Face directory."""
    return tiny.hf_directory(tmp_path_factory.mktemp("tiny") / "hf")


@pytest.fixture(scope="session")
def tiny_pack(tiny_hf: Path) -> Path:
    """The same, packed in f32."""
    path = tiny_hf.with_name("pack")
    assert main.main(["pack", str(tiny_hf), "-o", str(path), "--format", "f32", "-q"]) == 0
    return path


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def thermocline(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """The command line in this process: thermocline("run", "-m", path, ...) -> exit code, stdout, stderr."""

    def run(*argv: str | Path) -> Ran:
        capsys.readouterr()
        code = main.main([str(a) for a in argv])
        return Ran(code, *capsys.readouterr())

    return run
