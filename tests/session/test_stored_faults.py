"""Experts and rows of FFNs on a disk that misbehaves: the same tokens or a typed error, and others live on.

test_faults.py says the same of neurons, test_disk_experts.py and test_dense_stream.py of native code alone.
"""

from __future__ import annotations

import ctypes  # noqa: F401  (for the processes)
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial  # noqa: F401  (for the processes)
from pathlib import Path
from typing import Any, NamedTuple

import bad_reads
import pytest
import test_experts_on_disk
import test_rows_on_disk
import test_synth

from thermocline import SamplingParams
from thermocline.cli import main
from thermocline.errors import BadFile, IOFailure, ThermoclineError
from thermocline.opening.open_model import open_model
from thermocline.pack.stored_model import StoredModel
from thermocline.plan.disk import dense_split, expert_split
from thermocline.session import resident  # noqa: F401  (for the processes)
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPTS = [[(7 * i + i * i) % 512 for i in range(12)], [5, 6, 7], [511]]
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("qwen3-30b-a3b", {"num_experts": 16}),
    "rows": ("llama-2-7b", {"intermediate_size": 2048}),
}
Answer = tuple[list[int], str]


class Stored(NamedTuple):
    """A model of `SHAPES`, as a GGUF or a pack."""

    kind: str
    path: Path

    @property
    def file(self) -> Path:
        return self.path / "weights.bin" if self.path.is_dir() else self.path


def small_pieces(setattr: Any = setattr) -> None:
    """Those of a real model's reads would be larger than all of this one's FFNs."""
    setattr(expert_split, "PIECE_BYTES", 20 << 10)
    setattr(expert_split, "DEPTH", 8)
    setattr(dense_split, "RECORD_BYTES", 20 << 10)
    setattr(dense_split, "WINDOW", 5)
    setattr(dense_split, "ARRANGING", 2)


@pytest.fixture(autouse=True)
def pieces_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch.setattr)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory of each kind, with the model as a pack and as a GGUF."""
    made = {}
    for kind, (shape, sizes) in SHAPES.items():
        base = made[kind] = tmp_path_factory.mktemp(kind)
        config = test_synth.config_file(base, shape, **sizes)
        synth = ["synth", str(config), "--format", "q4_0", "-o", str(base / "pack"), "-q"]
        assert main.main([*synth, "--gguf", str(base / "m.gguf")]) == 0
    return made


@pytest.fixture(params=[(kind, form) for kind in SHAPES for form in ("m.gguf", "pack")], ids="-".join)
def stored(request: pytest.FixtureRequest, models: dict[str, Path]) -> Stored:
    kind, form = request.param
    return Stored(kind, models[kind] / form)


@pytest.fixture
def own(stored: Stored, tmp_path: Path) -> Stored:
    """A copy, to spoil."""
    return copied(stored, tmp_path)


def copied(stored: Stored, directory: Path) -> Stored:
    to = directory / stored.path.name
    if stored.path.is_dir():
        shutil.copytree(stored.path, to, ignore=shutil.ignore_patterns("verified*"))
    else:
        shutil.copy(stored.path, to)
    return Stored(stored.kind, to)


def opened(stored: Stored) -> Session:
    """With a third of the experts or rows in memory."""
    model: StoredModel = open_model(stored.path, "", None)
    options = EngineOptions(context=64, max_batch=2, threads=2)
    if stored.kind == "experts":
        return Session(model, options, test_experts_on_disk.with_slots(model, 5))
    return Session(model, options, test_rows_on_disk.with_records(model, 0.3))


def outcomes(session: Session) -> list[Answer | ThermoclineError]:
    """All answers, two at a time, or why there are not."""
    engine = session.load()
    requests = [engine.submit(p, GREEDY) for p in PROMPTS]
    while engine.step():
        pass
    engine.check_integrity()
    found: list[Answer | ThermoclineError] = []
    for r in requests:
        if r.error is None:
            done = r.completion()
            found.append((done.token_ids, done.figures.logits_hash))
        else:
            assert isinstance(r.error, BadFile | IOFailure), r.error
            found.append(r.error)
    return found


def right_answers(stored: Stored) -> list[Any]:
    """Of the model in memory."""
    with Session.open(open_model(stored.path, "", None), EngineOptions(context=64, max_batch=2)) as session:
        assert not session.from_disk
        return outcomes(session)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bad_reads.library(tmp_path_factory.mktemp("library"))


def printed(code: str, library: Path, stored: Stored, *arguments: str, what: str = "none") -> str:
    """By a Python of its own, which has what this file has, and a disk to spoil."""
    start = """from test_stored_faults import *
bad = ctypes.CDLL(None).bad_reads
small_pieces()
stored = Stored(sys.argv[1], Path(sys.argv[2]))
"""
    ran = subprocess.run(
        [sys.executable, "-P", "-c", start + code, *stored[:1], str(stored.path), *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            **bad_reads.environment(library, what),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


# ---- reads that fail

LOADING = """
want, tries = right_answers(stored), int(sys.argv[3])
bad(b"none")
with opened(stored) as session:
    assert outcomes(session) == want
reads = ctypes.CDLL(None).bad_reads_seen()
for how in (b"eio_from 1", *(b"eio %d" % n for n in range(1, reads, reads // tries + 1))):
    bad(how)
    with opened(stored) as session:
        try:
            got = outcomes(session)
        except IOFailure as e:
            assert "nput/output error" in str(e) and str(e).count(str(stored.path)) == 1, (how, e)
            print(how.decode())
            continue
    for g, w in zip(got, want, strict=True):
        assert g == w or isinstance(g, IOFailure) and str(stored.path) in str(g), (how, g)
"""


@pytest.mark.parametrize("tries", [3, pytest.param(80, marks=pytest.mark.slow)])
def test_whichever_read_fails_a_model_answers_as_ever_or_says_why_not(
    stored: Stored, library: Path, tries: int
) -> None:
    """From the first of loading to the last of the last token."""
    assert printed(LOADING, library, stored, str(tries)).startswith("eio_from 1\n")


COMPANY = """
with opened(stored) as session:
    want = outcomes(session)
    for how in (b"short", b"interrupted", b"busy"):
        bad(how)
        assert outcomes(session) == want, how
    bad(b"none")
    outcomes(session)
    reads, lived, failed = ctypes.CDLL(None).bad_reads_seen(), 0, 0
    for n in range(1, reads, reads // int(sys.argv[3]) + 1):
        for how in (b"eio", b"end", b"eio_from"):
            bad(b"%s %d" % (how, n))
            for got, right in zip(outcomes(session), want, strict=True):
                assert got == right or isinstance(got, IOFailure), (how, n, got)
                lived, failed = lived + (got == right), failed + (got != right)
        bad(b"none")
        assert outcomes(session) == want, n
print(lived, failed)
"""


@pytest.mark.parametrize("tries", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_requests_outlive_reads_that_fail(stored: Stored, library: Path, tries: int) -> None:
    """Two at a time and one that waits. One bad read costs nobody an answer who has company."""
    lived, failed = map(int, printed(COMPANY, library, stored, str(tries)).split())
    assert lived > 0 and failed > 0


SLOW = """
resident._native.ExpertFiles = partial(resident._native.ExpertFiles, method="threads")
bad(b"slow 2")
with opened(stored) as session:
    assert outcomes(session) == right_answers(stored)
    assert "threads" in session.store.how, session.store.how
"""


def test_a_slow_disk_changes_no_bit(stored: Stored, library: Path) -> None:
    printed(SLOW, library, stored)


FORBIDDEN = """
with opened(stored) as session:
    assert outcomes(session) == right_answers(stored)
    assert "io_uring refused: EPERM" in session.store.how, session.store.how
"""


def test_without_io_uring_threads_read_and_that_is_said(stored: Stored, library: Path) -> None:
    printed(FORBIDDEN, library, stored, what="forbidden")


# ---- files that change, and other systems


@contextmanager
def written_over(file: Path, at: int, data: bytes) -> Iterator[None]:
    """The file's bytes from `at` on are others for a while. Its time stays, as after a fault of the disk."""
    before = os.stat(file)

    def write(data: bytes) -> bytes:
        with file.open("r+b") as f:
            f.seek(at)
            was = f.read(len(data))
            f.seek(at)
            f.write(data)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        return was

    was = write(data)
    yield
    write(was)


def test_other_bytes_than_at_first_cost_those_their_answers_who_need_them(own: Stored) -> None:
    """Each sum is made when its bytes are first read; whoever needs the others still has the right answer."""
    with opened(own) as session:
        want = outcomes(session)
        t = session.pack.tensors["layers.1.down.weight"]
        (rows,) = session.pack.file_rows("layers.1.down.weight", 0, 1, 0)
        with written_over(own.file, rows.at, b"\xa5" * t.bytes):
            for got, right in zip(outcomes(session), want, strict=True):
                if got != right:
                    assert isinstance(got, BadFile) and "changed" not in str(got)
                    assert str(own.file) in str(got) and "checksum mismatch" in str(got)
            assert outcomes(session) != want
        assert outcomes(session) == want


def test_a_file_that_is_cut_is_said_to_have_changed_and_lives_on_when_it_is_whole(own: Stored) -> None:
    content, before = own.file.read_bytes(), os.stat(own.file)
    with opened(own) as session:
        want = outcomes(session)
        os.truncate(own.file, len(content) // 8)
        for got in outcomes(session):
            assert isinstance(got, BadFile | IOFailure)
            assert str(own.file) in str(got) and "changed" in str(got)
        with own.file.open("r+b") as f:
            f.write(content)
        os.utime(own.file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert outcomes(session) == want


def replaced(file: Path) -> None:
    """By one of zeros. Who has opened it reads the old one."""
    new = file.with_name("new")
    new.write_bytes(bytes(file.stat().st_size))
    new.replace(file)


def test_a_file_that_is_replaced_is_read_on_where_its_bytes_are_known(own: Stored) -> None:
    with opened(own) as session:
        want = outcomes(session)
        replaced(own.file)
        assert outcomes(session) == want
    with pytest.raises(BadFile), opened(own) as session:
        session.load()


def test_a_file_that_is_replaced_before_its_bytes_are_known_is_refused(own: Stored) -> None:
    """Nothing vouches for what is read of it for the first time."""
    with opened(own) as session:
        session.load()
        replaced(own.file)
        for got in outcomes(session):
            assert isinstance(got, IOFailure) and "changed" in str(got) and str(own.file) in str(got)


def test_a_file_in_memory_is_read_through_the_page_cache_and_that_is_said(stored: Stored) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no tmpfs here")
    there = Path(f"/dev/shm/thermocline-test-{os.getpid()}")
    there.mkdir()
    try:
        with opened(copied(stored, there)) as session:
            assert outcomes(session) == right_answers(stored)
            assert session.store is not None
            assert "through the page cache (direct I/O refused: " in session.store.how
    finally:
        shutil.rmtree(there)


def used_twice(stored: Stored) -> list[Any]:
    """Two times by two models, one after the other."""
    found = []
    for _ in range(2):
        with opened(stored) as session:
            found.append([outcomes(session) for _ in range(2)])
    return found


def test_two_processes_share_a_model(own: Stored, library: Path) -> None:
    """From a pack's first use on, when both verify it."""
    theirs: list[str] = []
    other = threading.Thread(target=lambda: theirs.append(printed("print(used_twice(stored))", library, own)))
    other.start()
    ours = used_twice(own)
    other.join()
    assert ours == [[right_answers(own)] * 2] * 2
    assert theirs == [f"{ours}\n"]
    assert not [p for p in own.path.parent.rglob("*") if ".tmp-" in p.name]
