"""A disk that misbehaves under a running model: the same tokens or a typed error, and the others live on."""

from __future__ import annotations

import contextlib
import ctypes  # noqa: F401
import functools
import gc  # noqa: F401
import io  # noqa: F401
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bad_reads
import numpy as np
import pytest
import tiny
from safetensors.numpy import save_file

from thermocline import LLM, SamplingParams
from thermocline.cli import main
from thermocline.engine.request import Completion
from thermocline.errors import BadFile, IOFailure, OutOfBudget, ThermoclineError
from thermocline.llm import Stream
from thermocline.pack.pack import Pack, read_tensor
from thermocline.pack.predictor import LayerPredictor, write_predictors
from thermocline.plan.disk import disk_split
from thermocline.plan.memory import GIB
from thermocline.session import store

FFN = 2048  # neurons of a layer: two layers' bundles are 2 MiB
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
PROMPTS = ["Cold", "w", "The thermocline is a thin layer"]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In order of hotness, with predictors that take one neuron in twenty for active."""
    base = tmp_path_factory.mktemp("faults")
    tensors, rng = tiny.tensors(), np.random.default_rng(5)
    for i in range(tiny.LAYERS):
        for name, shape in (("gate", (FFN, tiny.DIM)), ("up", (FFN, tiny.DIM)), ("down", (tiny.DIM, FFN))):
            w = rng.standard_normal(shape) / 8
            tensors[f"model.layers.{i}.mlp.{name}_proj.weight"] = w.astype(np.float32)
    source, out = tiny.hf_directory(base / "hf", intermediate_size=FFN), base / "pack"
    save_file(tensors, str(source / "model.safetensors"))
    assert main.main(["pack", str(source), "-o", str(out), "--format", "f32", "-q"]) == 0
    (text := base / "text").write_text(" ".join(PROMPTS) * 10)
    assert main.main(["profile", str(out), "--corpus", str(text), "--samples", "0", "-q"]) == 0
    made, predictors = Pack.open(out), []
    for i in range(tiny.LAYERS):
        gate = read_tensor(made, f"layers.{i}.gate.weight").view(np.float32)
        u, s, v = np.linalg.svd(gate, full_matrices=False)
        scores, thresholds = np.ascontiguousarray(u[:, :32] * s[:32]), np.full(FFN, 1.2, np.float32)
        predictors.append(LayerPredictor("svd", v[:32], scores, None, thresholds, hot=0))
    write_predictors(made, predictors, {})
    return out


@pytest.fixture
def own(pack: Path, tmp_path: Path) -> Path:
    """A copy, to spoil."""
    return shutil.copytree(pack, tmp_path / "pack")


@pytest.fixture(autouse=True)
def tiny_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    small_buffers(monkeypatch.setattr)


def small_buffers(setattr: Any = setattr) -> None:
    """Those of a real model's reads would be larger than all of this one's neurons."""
    setattr(disk_split, "BUFFER_BYTES", 1 << 16)
    for module in (disk_split, store):
        setattr(module, "DEPTH", 16)


def opened(pack: Path, ram: float | None = None, sparsity: str = "exact", **asked: Any) -> LLM:
    asked = {"threads": 2, "context": 128, "max_batch": 2} | asked
    return LLM(pack, ram=ram, sparsity=sparsity, **asked)


@functools.cache
def bounds(pack: Path, sparsity: str) -> tuple[int, int]:
    """Bytes: the least that is enough, and all of the model."""
    with opened(pack, None, sparsity, lazy=True) as llm:
        low, most = 0, llm.memory_bytes
    high = most
    while high - low > 4096:
        middle = (low + high) // 2
        try:
            opened(pack, middle / GIB, sparsity, lazy=True).close()
            high = middle
        except OutOfBudget:
            low = middle
    return high, most


def budget(pack: Path, part: float = 0.5, sparsity: str = "exact") -> float:
    """GiB: `part` of the way from the least that is enough to all of the model."""
    low, high = bounds(pack, sparsity)
    return (low + part * (high - low)) / GIB


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bad_reads.library(tmp_path_factory.mktemp("library"))


def process(code: str, library: Path, *argv: object) -> subprocess.CompletedProcess[str]:
    """Of a Python of its own, which has what this file has, and a disk to spoil."""
    start = "from test_faults import *\nbad = ctypes.CDLL(None).bad_reads\nsmall_buffers()\n"
    path = os.pathsep.join(p for p in sys.path if p)
    spoilt = bad_reads.environment(library, "none")
    return subprocess.run(
        [sys.executable, "-P", "-c", start + code, *map(str, argv)],
        env={**os.environ, "PYTHONPATH": path, **spoilt},
        capture_output=True,
        text=True,
        check=False,
    )


def printed(code: str, library: Path, *argv: object) -> str:
    ran = process(code, library, *argv)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def tokens(done: Completion) -> tuple[list[int], str]:
    return done.token_ids, done.figures.logits_hash


def outcome(stream: Stream) -> tuple[list[int], str] | ThermoclineError:
    """All of its tokens, or why there are not."""
    with stream:
        try:
            for _ in stream:
                pass
        except (BadFile, IOFailure) as e:
            return e
    return tokens(stream.completion)


def outcomes(llm: LLM, prompts: list[str]) -> list[tuple[list[int], str] | ThermoclineError]:
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    got = [outcome(stream) for stream in streams]
    assert llm.session.engine is not None
    llm.session.engine.check_integrity()
    return got


def test_predicted_neurons_and_their_gates_may_be_on_disk(pack: Path) -> None:
    """Any budget gives the bits of the same mode in memory."""
    with opened(pack, None, "predict") as llm:
        want = outcomes(llm, PROMPTS)
    gates = set()
    for part in (0.0, 0.3, 0.5, 0.8, 0.95):
        with opened(pack, budget(pack, part, "predict"), "predict") as llm:
            assert llm.session.arrangement is not None
            gates.add(llm.session.arrangement.gates is not None)
            assert outcomes(llm, PROMPTS) == want
    assert gates == {False, True}


# ---- reads that fail

EVERY_READ = """
pack, ram, step = sys.argv[1:]
command = ["run", "-m", pack, "--ram", ram, "--sparsity", "predict", "-c", "128", "-t", "2", "-n", "2"]

def ran(how):
    out, err = io.StringIO(), io.StringIO()
    bad(how)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.main([*command, "--temp", "0", "--ignore-eos", "-q", "Cold"])
    return code, out.getvalue(), err.getvalue()

seen = ctypes.CDLL(None).bad_reads_seen
code, want, err = ran(b"none")
assert code == 0 and len(want) > len("Cold"), err
reads, met, failed = seen(), 0, 0
for n in range(1, reads + 1, int(step)):
    code, out, err = ran(b"eio %d" % n)
    met += seen() >= n
    if n % 32 == 0:
        gc.collect()  # an error holds the frames it has been through, and these the model
    if code == 0:
        assert out == want, (n, out)
        continue
    failed += 1
    assert want.startswith(out), (n, out)
    assert code == 4 and err.count("\\n") == 1, (n, err)
    assert "weights.bin: " in err and "nput/output error" in err, (n, err)
print(reads, met, failed)
"""


@pytest.mark.parametrize("step", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_whichever_read_of_a_run_fails_there_is_the_same_text_or_one_line(
    pack: Path, library: Path, step: int
) -> None:
    """From the first of loading to the last of the last token. A call that has reads ahead begins again."""
    ram = budget(pack, 0.4, "predict")
    reads, met, failed = map(int, printed(EVERY_READ, library, pack, ram, step).split())
    assert reads > 100 and met > 0.9 * (reads // step)
    assert failed > 0.3 * (reads // step), "those of loading"


COMPANY = """
pack, ram, method = sys.argv[1:]
store._native.Reader = functools.partial(store._native.Reader, method=method)
with opened(Path(pack), float(ram)) as llm:
    want = outcomes(llm, PROMPTS)
    for how in (b"short", b"interrupted", b"busy"):
        bad(how)
        assert outcomes(llm, PROMPTS) == want, how
    bad(b"none")
    outcomes(llm, PROMPTS)
    reads, lived, failed, ended = ctypes.CDLL(None).bad_reads_seen(), 0, 0, 0
    for n in range(1, reads, 29):
        for how in (b"eio", b"end"):
            bad(b"%s %d" % (how, n))
            for got, right in zip(outcomes(llm, PROMPTS), want, strict=True):
                assert got == right or isinstance(got, IOFailure), (how, n, got)
                lived, failed = lived + (got == right), failed + (got != right)
        bad(b"eio_from %d" % n)
        streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS]
        got = [outcome(stream) for stream in streams[:2]]
        bad(b"none")
        assert outcome(streams[2]) == want[2], "it waited, and the disk is well again"
        assert all(g == w or isinstance(g, IOFailure) for g, w in zip(got, want)), (n, got)
        ended += sum(isinstance(g, IOFailure) for g in got)
    assert outcomes(llm, PROMPTS) == want
print(lived, failed, ended)
"""


@pytest.mark.parametrize("method", ["io_uring", "threads"])
def test_requests_outlive_reads_that_fail(pack: Path, library: Path, method: str) -> None:
    """Two at a time and one that waits. A step that failed is tried again for each of its requests alone: one
    bad read costs nobody his answer who has company, and a disk that stays bad those who need it.
    """
    lived, failed, ended = map(int, printed(COMPANY, library, pack, budget(pack), method).split())
    assert lived > 2 * failed > 0 and ended > 3  # of about 30, 6 and 8


def test_a_damaged_neuron_costs_those_who_need_it_their_answers(own: Path, pack: Path) -> None:
    """Company or not; it is named."""
    lone = 0
    with opened(own, budget(pack), disable=("cache",)) as llm:
        want = outcomes(llm, PROMPTS[:2])
        bundle = Pack.open(own).tensors["layers.1.bundle"]
        for neuron in range(0, FFN, 97):
            with flipped(own / "weights.bin", bundle.offset + neuron * bundle.stride + 5):
                alone = [outcomes(llm, [prompt])[0] for prompt in PROMPTS[:2]]
                together = outcomes(llm, PROMPTS[:2])
            for got, other, right in zip(together, alone, want, strict=True):
                assert str(got) == str(other) and (got == right or isinstance(got, BadFile))
                named = f"layers.1.bundle: neuron {neuron}: checksum mismatch"
                assert got == right or named in str(got)
            lone += sum(got != right for got, right in zip(together, want, strict=True)) == 1
        assert outcomes(llm, PROMPTS[:2]) == want
    assert lone > 0, "one of the two went on"


@contextlib.contextmanager
def flipped(file: Path, at: int) -> Iterator[None]:
    """One bit of the file is another."""

    def flip() -> None:
        with open(file, "r+b") as f:
            f.seek(at)
            byte = f.read(1)[0]
            f.seek(at)
            f.write(bytes([byte ^ 4]))

    flip()
    yield
    flip()


# ---- files that change, and other systems


def test_a_file_that_is_written_over_or_cut_is_said_to_have_changed(own: Path, pack: Path) -> None:
    file = own / "weights.bin"
    content = file.read_bytes()
    since = "the file has changed since it was opened"
    with opened(own, budget(pack)) as llm:
        want = outcomes(llm, PROMPTS)
        bundle = Pack.open(own).tensors["layers.1.bundle"]
        for spoilt, kind, words in (
            (content[: bundle.offset], IOFailure, "the file ends early"),
            (bytes(len(content)), BadFile, "checksum mismatch"),
        ):
            write_over(file, spoilt)
            for got in outcomes(llm, PROMPTS):
                assert isinstance(got, kind) and re.search(
                    rf"{file}: layers\.\d\.(bundle|gate\.weight): neuron \d+: {words}; {since}", str(got)
                )
            write_over(file, content)
            assert outcomes(llm, PROMPTS) == want


def write_over(file: Path, content: bytes) -> None:
    with open(file, "r+b") as f:
        f.truncate(len(content))
        f.write(content)


def test_a_pack_that_is_replaced_is_read_to_the_end(own: Path, pack: Path) -> None:
    """What was opened is still there; who opens the path next gets the new one, or is told that it is bad."""
    with opened(own, budget(pack)) as llm:
        want = outcomes(llm, PROMPTS)
        new = own.with_name("new")
        new.write_bytes(bytes((own / "weights.bin").stat().st_size))
        new.replace(own / "weights.bin")
        assert outcomes(llm, PROMPTS) == want
    with pytest.raises(BadFile, match="checksum mismatch"):
        opened(own, budget(pack))


def test_a_pack_in_memory_is_read_through_the_page_cache_and_that_is_said(
    pack: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no tmpfs here")
    with opened(pack) as llm:
        want = outcomes(llm, PROMPTS)
    there = Path(f"/dev/shm/thermocline-test-{os.getpid()}")
    try:
        shutil.copytree(pack, there)
        with opened(there, budget(pack)) as llm:
            assert outcomes(llm, PROMPTS) == want
    finally:
        shutil.rmtree(there)
    assert "through the page cache (direct I/O refused: " in " ".join(caplog.messages)


SHARED = """
pack, ram = sys.argv[1:]
with opened(Path(pack), float(ram)) as llm:
    got = [outcomes(llm, PROMPTS) for _ in range(10)]
assert all(g == got[0] for g in got)
print(got[0])
"""


def test_two_processes_share_a_pack(own: Path, pack: Path, library: Path) -> None:
    """From its first use on, when both make the checksums of its records."""
    with opened(own) as llm:
        want = outcomes(llm, PROMPTS)
    got: list[str] = []
    shared = functools.partial(printed, SHARED, library, own, budget(pack))
    both = [threading.Thread(target=lambda: got.append(shared())) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert got == [f"{want}\n"] * 2
    assert not [p for p in own.iterdir() if ".tmp-" in p.name] and (own / "records.safetensors").exists()


FULL = """
import resource, sys
from thermocline.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
sys.exit(main.main(["bench", "-m", sys.argv[1], "--trace", sys.argv[2], "-n", "8", "-t", "1", "-q"]))
"""


def test_a_trace_that_finds_no_room_is_one_line_and_leaves_no_file(pack: Path, tmp_path: Path) -> None:
    target = tmp_path / "traces" / "a.trace"
    target.parent.mkdir()
    command = [sys.executable, "-P", "-c", FULL, str(pack), str(target)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (4, f"thermocline: {target}: cannot write: File too large\n")
    assert list(target.parent.iterdir()) == []


# ---- Ctrl-C and a disk that is slow

STOPPED = """
import signal
from thermocline.cli.commands import run as cli_text
store._native.Reader = functools.partial(store._native.Reader, method="threads")
pressed = []

def press():
    pressed.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)

def emit(text, original=cli_text.emit):
    original(text)
    if text == "Cold":  # and the first token; the next one waits for the disk
        bad(b"slow 60000")
        threading.Timer(0.3, press).start()

cli_text.emit = emit
command = ["run", "-m", sys.argv[1], "--ram", sys.argv[2], "--sparsity", "predict", "-c", "128", "-t", "2"]
code = main.main([*command, "--temp", "0", "--ignore-eos", "Cold"])
print(time.monotonic() - pressed[0], pressed[0])
sys.exit(code)
"""


def test_the_first_ctrl_c_does_not_wait_for_a_slow_disk(pack: Path, library: Path) -> None:
    """Each read takes a minute. Nobody waits for those that were begun: not the figures, not the end."""
    ran = process(STOPPED, library, pack, budget(pack, 0.4, "predict"))
    took, pressed = map(float, ran.stdout.split()[-2:])
    assert took < 30 and time.monotonic() - pressed < 50
    figures = ran.stderr.splitlines()[-1]
    assert ran.returncode == 130 and "1 token · cancelled" in figures and "Traceback" not in ran.stderr
