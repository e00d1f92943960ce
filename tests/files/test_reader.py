"""Asynchronous reads: every byte or a named failure, whatever the disk and the system do."""

from __future__ import annotations

import ctypes  # noqa: F401
import errno
import gc
import os
import resource  # noqa: F401
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import bad_reads
import numpy as np
import pytest
from test_store import cached_pages

from thermocline import _native

SIZE = 4 << 20
SECTOR = 512
DEPTH, BUFFER = 16, 16384
LINUX = sys.platform == "linux"
METHODS = ["io_uring", "threads"] if LINUX else ["threads"]
Read = tuple[int, int]  # offset, bytes


def file_of(path: Path, nbytes: int = SIZE) -> Path:
    with open(path, "wb") as f:
        f.write(np.random.default_rng(nbytes).bytes(nbytes))
        os.fsync(f.fileno())
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return file_of(tmp_path_factory.mktemp("reader") / "f")


@pytest.fixture(params=[(m, d) for m in METHODS for d in (True, False)], ids=lambda p: f"{p[0]}-{p[1]}")
def reader_of(request: pytest.FixtureRequest) -> Callable[[Path], _native.Reader]:
    """A reader by each method, direct and through the cache."""
    method, direct = request.param
    return lambda path: open_reader(path, method=method, direct=direct)


def open_reader(path: Path, *, method: str = "", direct: bool = True, depth: int = DEPTH) -> _native.Reader:
    try:
        return _native.Reader(str(path), depth=depth, buffer_bytes=BUFFER, method=method, direct=direct)
    except OSError as e:
        if method != "io_uring" or e.errno not in (errno.ENOSYS, errno.EPERM):
            raise
        pytest.skip("this system has no io_uring for us")


def take_all(reader: _native.Reader, n: int) -> dict[int, int]:
    """The next n answers: tag -> error."""
    done: list[tuple[int, int]] = []
    end = time.monotonic() + 600
    while len(done) < n and time.monotonic() < end:
        done += reader.take(wait=True)
    assert len(done) == len(dict(done)) == n
    return dict(done)


def read_all(reader: _native.Reader, reads: list[Read]) -> dict[int, bytes | int]:
    """Each read's bytes, or its error; as many at a time as there are buffers."""
    out: dict[int, bytes | int] = {}
    for first in range(0, len(reads), DEPTH):
        some = reads[first : first + DEPTH]
        assert reader.submit([(at, n, i, first + i) for i, (at, n) in enumerate(some)])
        for tag, error in take_all(reader, len(some)).items():
            out[tag] = error or reader.buffer(tag - first)[: reads[tag][1]].tobytes()
    return out


def some_reads(count: int = 100) -> list[Read]:
    rng = np.random.default_rng(count)
    sizes = rng.integers(1, BUFFER // SECTOR + 1, count) * SECTOR
    return [(int(rng.integers(0, (SIZE - n) // SECTOR + 1)) * SECTOR, int(n)) for n in sizes]


def expected(path: Path, reads: list[Read]) -> dict[int, bytes | int]:
    data = path.read_bytes()
    return {i: data[at : at + n] for i, (at, n) in enumerate(reads)}


# ---- what it promises


def test_every_byte_arrives(reader_of: Callable[[Path], _native.Reader], file: Path) -> None:
    reads = some_reads()
    assert read_all(reader_of(file), reads) == expected(file, reads)


def test_through_the_cache_any_byte_may_be_asked_for(file: Path) -> None:
    reads = [(0, 1), (1, 4097), (SIZE - 1, 1), (SIZE - 777, 777), (SECTOR - 1, 2)]
    for method in METHODS:
        reader = open_reader(file, method=method, direct=False)
        assert reader.alignment == 1
        assert read_all(reader, reads) == expected(file, reads)


@pytest.mark.parametrize("rest", [0, 1, 511, 512, 513, 4095])
def test_a_file_that_ends_early_is_said_to(
    rest: int, reader_of: Callable[[Path], _native.Reader], tmp_path: Path
) -> None:
    path = file_of(tmp_path / "f", 8192 + rest)
    reader = reader_of(path)
    whole = (8192 + rest) // SECTOR * SECTOR
    reads = [(0, 8192), (whole - SECTOR, SECTOR), (whole, SECTOR), (4096, 8192), (1 << 30, SECTOR)]
    got = read_all(reader, reads)
    assert got == {**expected(path, reads), 2: -1, 3: -1, 4: -1}


def test_no_more_than_depth_are_in_flight(reader_of: Callable[[Path], _native.Reader], file: Path) -> None:
    reader = reader_of(file)
    reads = [(0, SECTOR, i, i) for i in range(DEPTH)]
    assert not reader.submit([*reads, (0, SECTOR, 0, DEPTH)])
    assert reader.take(wait=True) == [], "nothing of it was begun"
    assert reader.submit(reads[1:])
    assert not reader.submit(reads[:2])
    assert reader.submit(reads[:1])
    assert take_all(reader, DEPTH) == dict.fromkeys(range(DEPTH), 0)
    assert reader.submit(reads) and take_all(reader, DEPTH) == dict.fromkeys(range(DEPTH), 0)


def test_threads_may_share_one_reader(reader_of: Callable[[Path], _native.Reader], file: Path) -> None:
    """Each submits its reads and takes whatever is done: every tag arrives once, at one of them."""
    reader, data, rounds = reader_of(file), file.read_bytes(), 60
    done: list[tuple[int, int]] = []
    idle = [list(range(k, DEPTH, 4)) for k in range(4)]  # buffers of each thread, given back by whoever takes
    wrong: list[int] = []

    def work(k: int) -> None:
        begun = 0
        while begun < rounds or len(done) < 4 * rounds:
            if begun < rounds and idle[k]:
                buffer, tag = idle[k].pop(), k * rounds + begun
                assert reader.submit([(tag * SECTOR, BUFFER, buffer, tag << 8 | buffer)])
                begun += 1
            for tag, error in reader.take(wait=begun == rounds):
                at, buffer = (tag >> 8) * SECTOR, tag & 255
                if error or reader.buffer(buffer).tobytes() != data[at : at + BUFFER]:
                    wrong.append(tag)
                idle[buffer % 4].append(buffer)
                done.append((tag, error))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and sorted(tag >> 8 for tag, _ in done) == list(range(4 * rounds))


def test_what_a_thread_submitted_outlives_it(reader_of: Callable[[Path], _native.Reader], file: Path) -> None:
    reader = reader_of(file)
    reads = [(i * BUFFER, BUFFER, i, i) for i in range(DEPTH)]
    for _ in range(5):
        thread = threading.Thread(target=reader.submit, args=(reads,))
        thread.start()
        thread.join()
        assert take_all(reader, DEPTH) == dict.fromkeys(range(DEPTH), 0)


def test_direct_reads_leave_the_page_cache_alone(tmp_path: Path) -> None:
    path = file_of(tmp_path / "f")
    if not LINUX:
        pytest.skip("needs Linux's page cache")
    with open(path, "rb") as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    reader = open_reader(path)
    if cached_pages(path) != 0 or not reader.how.endswith(", direct"):
        pytest.skip("cannot tell the page cache's content here, or direct I/O is refused")
    assert all(isinstance(got, bytes) for got in read_all(reader, some_reads()).values())
    assert cached_pages(path) == 0


def test_a_reader_may_go_while_it_reads(reader_of: Callable[[Path], _native.Reader], file: Path) -> None:
    for _ in range(4):
        reader = reader_of(file)
        buffers = [reader.buffer(i) for i in range(DEPTH)]
        assert reader.submit([(i * BUFFER, BUFFER, i, i) for i in range(DEPTH)])
        del reader, buffers
        gc.collect()


def test_a_measurement_reads_all_or_says_why_not(
    reader_of: Callable[[Path], _native.Reader], file: Path
) -> None:
    reader = reader_of(file)
    offsets = np.arange(100, dtype=np.uint64) * BUFFER
    assert reader.measure(offsets, BUFFER, 600.0) == (100, 0)
    assert reader.measure(offsets, BUFFER, 0.0) == (0, 0), "no time, no reads"
    offsets[50:] = SIZE
    assert reader.measure(offsets, BUFFER, 600.0) == (50, -1)


def test_what_cannot_be_read_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    for method in METHODS:
        with pytest.raises(FileNotFoundError):
            open_reader(tmp_path / "none", method=method)
    for depth in (0, 4097):
        with pytest.raises(ValueError, match="depth"):
            open_reader(tmp_path, depth=depth)
    with pytest.raises(ValueError, match="method"):
        open_reader(tmp_path, method="magic")


# ---- files that change


def test_a_file_that_shrinks_or_is_replaced_is_noticed(
    reader_of: Callable[[Path], _native.Reader], tmp_path: Path
) -> None:
    path = file_of(tmp_path / "f")
    reads = [(0, BUFFER), (SIZE - BUFFER, BUFFER)]
    before = expected(path, reads)
    reader = reader_of(path)
    assert not reader.changed and read_all(reader, reads) == before
    file_of(tmp_path / "other", SIZE + SECTOR).rename(path)
    assert reader.changed and read_all(reader, reads) == before, "what it opened is still there"
    reader = reader_of(path)
    assert not reader.changed
    os.truncate(path, SIZE // 2)
    got = read_all(reader, reads)
    assert reader.changed and got[1] == -1 and isinstance(got[0], bytes)
    reader = reader_of(path)
    path.unlink()
    assert reader.changed


# ---- a system that refuses


def in_a_process(code: str, *argv: str | Path, **environment: str) -> str:
    """What `code` prints in a Python of its own, which it may spoil. It has what this file has."""
    start = "from test_reader import *\n"
    path = os.pathsep.join(p for p in sys.path if p)
    ran = subprocess.run(
        [sys.executable, "-P", "-c", start + code, *map(str, argv)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


FORBID = """
class Filter(ctypes.Structure):
    _fields_ = [("n", ctypes.c_ushort), ("code", ctypes.c_char_p)]
def instruction(code, jump, fall, k): return np.array([code | jump << 16 | fall << 24, k], "<u4").tobytes()
refuse = 0x00050000 | errno.EPERM
is_setup, allow = instruction(0x15, 0, 1, 425), instruction(6, 0, 0, 0x7FFF0000)
program = instruction(0x20, 0, 0, 0) + is_setup + instruction(6, 0, 0, refuse) + allow
prctl = ctypes.CDLL(None).prctl
assert prctl(38, 1, 0, 0, 0) == 0
filter = Filter(4, program)
assert prctl(22, 2, ctypes.byref(filter), 0, 0) == 0
path = Path(sys.argv[1])
reader, reads = open_reader(path), some_reads()
assert read_all(reader, reads) == expected(path, reads)
print(reader.how)
"""


@pytest.mark.skipif(not LINUX, reason="needs seccomp")
def test_where_io_uring_is_forbidden_threads_read_and_it_is_said(file: Path) -> None:
    assert in_a_process(FORBID, file) == f"{DEPTH} threads, direct (io_uring refused: EPERM)"


LIMIT = """
header, none = (ctypes.c_uint32 * 2)(0x20080522), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capset(header, none) == 0  # no capabilities: root may lock what it likes
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
path = Path(sys.argv[1])
reader, reads = open_reader(path), some_reads()
assert read_all(reader, reads) == expected(path, reads)
print(reader.how)
"""


@pytest.mark.skipif(not LINUX, reason="needs Linux's capabilities")
def test_where_no_memory_may_be_locked_any_memory_will_do(tmp_path: Path) -> None:
    path = file_of(tmp_path / "f")
    how = in_a_process(LIMIT, path)
    assert how == "io_uring, direct (buffers not registered: ENOMEM)" or "threads" in how


SECTORS = """
path = Path(sys.argv[1])
for sectors in (512, 4096, 8192):
    ctypes.CDLL(None).bad_reads(f"sectors {sectors}".encode())
    reader = open_reader(path, method="threads")
    print(reader.alignment, reader.how)
"""


def test_where_the_system_does_not_say_how_reads_must_lie_it_is_tried(file: Path, tmp_path: Path) -> None:
    library = bad_reads.library(tmp_path)
    assert in_a_process(SECTORS, file, **bad_reads.environment(library, "none")).splitlines() == [
        f"512 {DEPTH} threads, direct",
        f"4096 {DEPTH} threads, direct",
        f"1 {DEPTH} threads, through the page cache (direct I/O refused: EOPNOTSUPP)",
    ]


def test_a_file_in_memory_is_read_through_the_cache(file: Path) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no tmpfs here")
    path = Path(f"/dev/shm/thermocline-test-{os.getpid()}")
    try:
        path.write_bytes(file.read_bytes())
        reader = open_reader(path)
        assert reader.how.endswith("through the page cache (direct I/O refused: EOPNOTSUPP)")
        assert read_all(reader, [(1, 777)]) == expected(path, [(1, 777)])
    finally:
        path.unlink()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking with threads: that is what is tried
def test_a_forked_process_leaves_its_parents_reader_alone(
    reader_of: Callable[[Path], _native.Reader], file: Path
) -> None:
    reader = reader_of(file)
    assert reader.submit([(0, SECTOR, 0, 1)])
    child = os.fork()
    if not child:
        code = 1
        try:
            reader.submit([(0, SECTOR, 1, 2)])
        except RuntimeError:
            code = 0 if reader.take(wait=True) == [] else 2
        del reader  # waits for nothing
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert take_all(reader, 1) == {1: 0}


READ = """
path = Path(sys.argv[1])
wanted = expected(path, some_reads())
for _ in range(20): assert read_all(open_reader(path), some_reads()) == wanted
"""


def test_two_processes_may_read_one_file(file: Path) -> None:
    other = threading.Thread(target=in_a_process, args=(READ, file))
    other.start()
    reads = some_reads()
    while other.is_alive():
        assert read_all(open_reader(file), reads) == expected(file, reads)
    other.join()


# ---- a disk that is slow


@pytest.mark.skipif(not LINUX, reason="needs io_uring")
def test_a_reader_waits_for_its_reads_before_it_goes(tmp_path: Path) -> None:
    """Else they would write into memory that is somebody else's by then. What another process then sends
    through the pipe is still read by it, not left there."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    try:
        reader = open_reader(path, method="io_uring", direct=False)
        assert reader.submit([(0, BUFFER, 0, 1)])
        code = f"import os, sys; os.write(int(sys.argv[1]), bytes({BUFFER}))"
        with subprocess.Popen([sys.executable, "-c", code, str(writer)], pass_fds=[writer]) as other:
            del reader
        assert other.returncode == 0
        os.set_blocking(writer, False)
        with pytest.raises(BlockingIOError):
            os.read(writer, 1)
    finally:
        os.close(writer)


@pytest.mark.skipif(not LINUX, reason="needs io_uring")
def test_waiting_for_a_disk_that_does_not_answer_ends(tmp_path: Path) -> None:
    """So that Ctrl-C is looked at. The slowest disk is a pipe that nobody writes to."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    try:
        reader = open_reader(path, method="io_uring", direct=False)
        assert reader.submit([(0, BUFFER, 3, 7)])
        waits = []
        for _ in range(3):
            start = time.monotonic()
            assert reader.take(wait=True) == []
            waits.append(time.monotonic() - start)
        assert 0.09 < min(waits) < 20
        for some in (b"a" * 100, b"b" * (BUFFER - 100)):
            os.write(writer, some)
        assert take_all(reader, 1) == {7: 0}
        assert reader.buffer(3).tobytes() == b"a" * 100 + b"b" * (BUFFER - 100)
    finally:
        os.close(writer)


SLOW = """
reader = open_reader(Path(sys.argv[1]), method="threads")
assert reader.submit([(0, SECTOR, 0, 7)])
start = time.monotonic()
assert reader.take(wait=True) == []
assert time.monotonic() - start > 0.09
assert take_all(reader, 1) == {7: 0}
"""


def test_waiting_for_a_slow_disk_ends_with_threads_too(file: Path, tmp_path: Path) -> None:
    in_a_process(SLOW, file, **bad_reads.environment(bad_reads.library(tmp_path), "slow 1000"))


# ---- a disk that fails

FAULTS = """
bad = ctypes.CDLL(None).bad_reads
path, method, direct = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
reads = some_reads(40)
right = expected(path, reads)
reader = open_reader(path, method=method, direct=direct)
def under(what):
    bad(what.encode())
    got = read_all(reader, reads)
    return {i: g for i, g in got.items() if g != right[i]}
for what in ("short", "interrupted", "busy"):
    assert under(what) == {}, what
for n in range(1, len(reads) + 1):
    assert list(under(f"eio {n}").values()) == [errno.EIO], n
    assert list(under(f"end {n}").values()) == [-1], n
assert sorted(under("eio_from 31").values()) == [errno.EIO] * 10
assert under("none") == {}, "it works again"
"""


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_whichever_read_fails_it_alone_says_so(method: str, direct: bool, file: Path, tmp_path: Path) -> None:
    """Interrupted and short reads go on; the others' bytes are right; the reader lives."""
    open_reader(file, method=method)
    library = bad_reads.library(tmp_path)
    in_a_process(FAULTS, file, method, str(direct), **bad_reads.environment(library, "none"))


LATE = """
path = Path(sys.argv[1])
reader, reads = open_reader(path, method="io_uring"), some_reads(40)
ctypes.CDLL(None).bad_reads(b"forbidden")
assert set(read_all(reader, reads).values()) == {errno.EPERM}
ctypes.CDLL(None).bad_reads(b"none")
assert read_all(reader, reads) == expected(path, reads)
ctypes.CDLL(None).bad_reads(b"forbidden")
print(open_reader(path).how)
"""


@pytest.mark.skipif(not LINUX, reason="needs io_uring")
def test_io_uring_that_is_forbidden_later_is_an_error_of_the_reads(file: Path, tmp_path: Path) -> None:
    open_reader(file, method="io_uring")
    library = bad_reads.library(tmp_path)
    how = in_a_process(LATE, file, **bad_reads.environment(library, "none"))
    assert how == f"{DEPTH} threads, direct (io_uring refused: EPERM)"
