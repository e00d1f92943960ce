"""Loading: every byte checked, the first thing that is wrong named, whatever the disk and the system do."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from thermocline import _native
from thermocline.errors import BadFile, IOFailure
from thermocline.machine import hardware
from thermocline.pack.pack import Pack
from thermocline.session import weights

BLOCK = 65536
CHUNK = 2 << 20  # what a reader claims at a time (csrc/storage/store.cpp)
LARGE = 64 << 20  # an arena from here on is filled by direct reads
SIZE = 5 * CHUNK + 3 * BLOCK + 777  # neither whole chunks, nor whole blocks, nor whole sectors
LINUX = sys.platform == "linux"


def file_of(path: Path, nbytes: int = SIZE) -> Path:
    with open(path, "wb") as f:
        f.write(np.random.default_rng(nbytes).bytes(nbytes))
        os.fsync(f.fileno())  # dirty pages cannot be dropped from the cache
    return path


def checksums_of(path: Path) -> _native.U32:
    """Of a file that is then no longer in the page cache, from where it would be read."""
    data = path.read_bytes()
    if LINUX:
        with open(path, "rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return np.array([_native.crc32c(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)], np.uint32)


def crc_by_bit(data: bytes, seed: int) -> int:
    """CRC-32C as RFC 3720 has it: reflected polynomial 0x82f63b78."""
    crc = ~seed & 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return ~crc & 0xFFFFFFFF


@pytest.mark.parametrize("n", [0, 1, 7, 8, 511, 1535, 1536, 1537, 3079, 4608])
def test_checksums_are_crc32c(n: int) -> None:
    data = np.random.default_rng(n).bytes(n + 1)
    assert _native.crc32c(data[1:], 7) == crc_by_bit(data[1:], 7)
    assert _native.crc32c(b"123456789") == 0xE3069283


def loaded(
    path: Path, crcs: _native.U32, *, arena: int = LARGE, begin: int = 0, end: int = SIZE
) -> tuple[int, int]:
    memory = _native.Arena(arena)
    return _native.begin_blocks(memory, str(path), [(begin, end, begin)], crcs, BLOCK).wait()


@pytest.fixture(params=[SIZE, LARGE], ids=["through the cache", "direct"])
def arena_bytes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("directory", ["disk", "tmpfs"])
def test_every_block_arrives_where_it_belongs(directory: str, arena_bytes: int, tmp_path: Path) -> None:
    """tmpfs, and the 777 bytes at the end, are what a direct read may be refused."""
    path = tmp_path / "f"
    if directory == "tmpfs":
        if not Path("/dev/shm").is_dir():
            pytest.skip("no tmpfs here")
        path = Path(f"/dev/shm/thermocline-test-{os.getpid()}")
    try:
        crcs = checksums_of(file_of(path))
        for begin, end in ((0, SIZE), (3 * BLOCK, SIZE), (BLOCK, 4 * CHUNK + 5), (CHUNK, CHUNK)):
            partial = crcs.copy()
            if end % BLOCK and end != SIZE:  # the last block is cut: its checksum too
                last = end // BLOCK
                partial[last] = _native.crc32c(path.read_bytes()[last * BLOCK : end])
            assert loaded(path, partial, arena=arena_bytes, begin=begin, end=end) == (0, -1)
    finally:
        path.unlink()


def test_the_lowest_damaged_block_is_named_however_the_readers_race(arena_bytes: int, tmp_path: Path) -> None:
    path = file_of(tmp_path / "f")
    crcs = checksums_of(path)
    damaged = [37, 38, 65, 96, len(crcs) - 1]
    while damaged:
        crcs[damaged] ^= 1
        for _ in range(10):
            assert loaded(path, crcs, arena=arena_bytes) == (0, damaged[0])
        crcs[damaged] ^= 1
        damaged.pop(0)


def test_a_file_that_ends_early_is_named_at_its_first_missing_block(arena_bytes: int, tmp_path: Path) -> None:
    path = file_of(tmp_path / "f")
    crcs = checksums_of(path)
    for cut in (SIZE - 1, 3 * CHUNK + 5, 3 * CHUNK, BLOCK, 1, 0):
        os.truncate(path, cut)
        assert loaded(path, crcs, arena=arena_bytes) == (-1, cut // BLOCK)
    crcs[0] ^= 1
    file_of(path, 3 * CHUNK)
    assert loaded(path, crcs, arena=arena_bytes) == (0, 0), "damage comes before the missing end"


def test_files_that_cannot_be_read_give_their_errno(arena_bytes: int, tmp_path: Path) -> None:
    crcs = np.zeros(SIZE // BLOCK + 1, np.uint32)
    assert loaded(tmp_path / "none", crcs, arena=arena_bytes) == (errno.ENOENT, 0)
    if LINUX:
        assert loaded(tmp_path, crcs, arena=arena_bytes) == (errno.EISDIR, 0)
        assert loaded(Path("/proc/self/mem"), crcs, arena=arena_bytes) == (errno.EIO, 0)


# ---- a disk and a system that misbehave

# Every third read is interrupted, none gives more than half of what is asked, direct ones must be of whole
# pages, where some file systems quietly read others through the cache.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

static ssize_t bad_read(int fd, void* to, size_t n, off_t at) {
    static __thread unsigned calls;
    ssize_t (*real)(int, void*, size_t, off_t) = dlsym(RTLD_NEXT, "pread");
    const char* broken = getenv("BROKEN_AT");
    if (calls++ % 3 == 0) return errno = EINTR, -1;
    if (n > 8192) n = n / 2 & ~(size_t)4095;
    if (broken && at <= atol(broken) && atol(broken) < at + (off_t)n) return errno = EIO, -1;
    if (fcntl(fd, F_GETFL) & O_DIRECT && (n | at) % 4096) return errno = EINVAL, -1;
    return real(fd, to, n, at);
}
ssize_t pread(int fd, void* to, size_t n, off_t at) { return bad_read(fd, to, n, at); }
ssize_t pread64(int fd, void* to, size_t n, off_t at) { return bad_read(fd, to, n, at); }
"""
LOAD = """
import resource, sys
import numpy as np
from thermocline import _native
from thermocline.machine import hardware
path, crcs, arena, end, block, room = sys.argv[1], np.load(sys.argv[2]), *map(int, sys.argv[3:])
memory = _native.Arena(arena)
if room:
    used = hardware._fields_kib(hardware.ROOT / "proc/self/status")["VmSize"]
    resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
print(*_native.begin_blocks(memory, path, [(0, end, 0)], crcs, block).wait())
"""


@pytest.fixture
def bad_disk(tmp_path: Path) -> dict[str, str]:
    """The environment of a process whose reads are interrupted and short."""
    compiler = shutil.which("cc")
    if not LINUX or compiler is None:
        pytest.skip("needs Linux and a C compiler")
    source, library = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}


def in_a_process(
    path: Path, crcs: _native.U32, arena: int, environment: Mapping[str, str], room: int = 0
) -> list[int]:
    np.save(path.with_suffix(".npy"), crcs)
    argv = [path, path.with_suffix(".npy"), arena, SIZE, BLOCK, room]
    command = [sys.executable, "-P", "-c", LOAD, *map(str, argv)]
    ran = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return [int(word) for word in ran.stdout.split()]


def test_interrupted_and_short_reads_go_on(
    bad_disk: dict[str, str], arena_bytes: int, tmp_path: Path
) -> None:
    path = file_of(tmp_path / "f")
    assert in_a_process(path, checksums_of(path), arena_bytes, bad_disk) == [0, -1]


def test_a_block_the_disk_cannot_read_is_named(
    bad_disk: dict[str, str], arena_bytes: int, tmp_path: Path
) -> None:
    path = file_of(tmp_path / "f")
    crcs = checksums_of(path)
    broken = {**bad_disk, "BROKEN_AT": str(70 * BLOCK)}
    assert in_a_process(path, crcs, arena_bytes, broken) == [errno.EIO, 70]
    crcs[[69, 71]] ^= 1
    assert in_a_process(path, crcs, arena_bytes, broken) == [0, 69], "damage in the same chunk comes first"


@pytest.mark.skipif(not LINUX, reason="needs RLIMIT_AS as Linux has it")
def test_without_memory_for_more_threads_one_reads_alone(arena_bytes: int, tmp_path: Path) -> None:
    path = file_of(tmp_path / "f")
    assert in_a_process(path, checksums_of(path), arena_bytes, {}, room=4 << 20) == [0, -1]


# ---- the page cache


def cached_pages(path: Path) -> int | None:
    """Of the file, in the page cache; None where the kernel does not say (cachestat, Linux 6.5)."""
    if not LINUX:
        return None
    counts, everything = (ctypes.c_uint64 * 5)(), (ctypes.c_uint64 * 2)(0, 0)
    with open(path, "rb") as f:
        if ctypes.CDLL(None).syscall(451, f.fileno(), everything, counts, 0):
            return None
    return int(counts[0])


def disk_bytes() -> int:
    """What this process has had read from disks."""
    words = Path("/proc/self/io").read_text().split()
    return int(words[words.index("read_bytes:") + 1])


@pytest.fixture
def uncached(tmp_path: Path) -> tuple[Path, _native.U32]:
    path = file_of(tmp_path / "f")
    crcs = checksums_of(path)
    if cached_pages(path) != 0:
        pytest.skip("cannot tell the page cache's content here, or cannot empty it (tmpfs)")
    return path, crcs


def test_a_large_load_leaves_the_page_cache_as_it_is(uncached: tuple[Path, _native.U32]) -> None:
    """Else the weights would be in memory twice. The tail that is no whole sector may go through it."""
    path, crcs = uncached
    before = disk_bytes()
    assert loaded(path, crcs) == (0, -1)
    assert (cached_pages(path) or 0) < CHUNK // mmap.PAGESIZE and disk_bytes() - before >= SIZE // 4096 * 4096
    path.read_bytes()
    before = disk_bytes()
    assert loaded(path, crcs) == (0, -1)
    assert disk_bytes() - before < CHUNK, "what is in the cache is taken from there"


def test_a_small_load_stays_in_the_page_cache_for_the_next(uncached: tuple[Path, _native.U32]) -> None:
    path, crcs = uncached
    assert loaded(path, crcs, arena=SIZE) == (0, -1)
    assert (cached_pages(path) or 0) * mmap.PAGESIZE >= SIZE


# ---- huge pages


def test_small_pages_are_gathered_into_huge_ones() -> None:
    """As where memory was in pieces when it was filled: then decode would be slower than it need be."""
    before = hardware.huge_page_bytes()
    if before is None or tuple(map(int, os.uname().release.split(".")[:2])) < (6, 1):
        pytest.skip("needs MADV_COLLAPSE (Linux 6.1)")
    disable, prctl = 41, ctypes.CDLL(None).prctl  # PR_SET_THP_DISABLE: no huge pages for this process
    try:
        assert prctl(disable, 1, 0, 0, 0) == 0
        arena = _native.Arena(4 * CHUNK)
        for at in range(0, arena.nbytes, mmap.PAGESIZE):
            arena.write(at, np.ones(1, np.uint8))
    finally:
        prctl(disable, 0, 0, 0, 0)
    assert hardware.huge_page_bytes() == before
    arena.gather_pages()
    assert (hardware.huge_page_bytes() or 0) >= before + arena.nbytes


# ---- a pack


def test_the_tensor_that_cannot_be_read_is_named(tiny_pack: Path, tmp_path: Path) -> None:
    pack = Pack.open(shutil.copytree(tiny_pack, tmp_path / "pack"))
    inside = pack.tensors["layers.1.attn_out.weight"].offset
    os.truncate(pack.weights_path, inside // BLOCK * BLOCK)
    first = next(n for n, t in pack.tensors.items() if t.offset + t.bytes > inside // BLOCK * BLOCK)
    with pytest.raises(IOFailure, match=rf"ends early at byte \d+ \({first}\)"):
        weights.load(pack, threads=1)


def test_the_first_damaged_tensor_is_named(tiny_pack: Path, tmp_path: Path) -> None:
    pack = Pack.open(shutil.copytree(tiny_pack, tmp_path / "pack"))
    with open(pack.weights_path, "r+b") as f:
        for at in (3 * BLOCK, 1 * BLOCK + 9):
            f.seek(at)
            byte = f.read(1)[0]
            f.seek(at)
            f.write(bytes([byte ^ 4]))
    with pytest.raises(BadFile, match=f"checksum mismatch at byte {BLOCK} "):
        weights.load(pack, threads=1)


def test_progress_rises_to_all_bytes(tiny_pack: Path) -> None:
    pack = Pack.open(tiny_pack)
    told: list[tuple[int, int]] = []
    weights.load(pack, threads=1, progress=lambda *at: told.append(at))
    assert told == sorted(told) and {total for _, total in told} == {pack.weights_bytes}
    assert told[-1][0] == pack.weights_bytes


def test_whoever_is_told_the_progress_can_end_the_load(tiny_pack: Path) -> None:
    """As a handler of Ctrl-C does: the threads end, and the next load is whole."""
    pack = Pack.open(tiny_pack)

    def interrupt(done: int, size: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weights.load(pack, threads=1, progress=interrupt)
    weights.load(pack, threads=1)


def test_a_load_goes_on_while_its_owner_does_other_things(tiny_pack: Path) -> None:
    pack = Pack.open(tiny_pack)
    begun = weights.BegunLoad.of(pack, weights.new_ops(1))
    assert begun.finish().bytes == pack.weights_bytes
    del begun
    weights.BegunLoad.of(pack, weights.new_ops(1))  # nobody waits for this one


def test_whole_blocks_load_to_any_other_place(arena_bytes: int, tmp_path: Path) -> None:
    """And nothing is touched beside that place."""
    path = file_of(tmp_path / "f")
    crcs, data = checksums_of(path), path.read_bytes()
    for begin, end, to in ((0, SIZE, 0), (3 * BLOCK, SIZE, 0), (BLOCK, 4 * BLOCK, 4096), (0, 2 * BLOCK, 704)):
        arena = _native.Arena(arena_bytes)
        arena.write(0, np.full(arena_bytes, 255, np.uint8))
        assert _native.begin_blocks(arena, str(path), [(begin, end, to)], crcs, BLOCK).wait() == (0, -1)
        held = np.ctypeslib.as_array((ctypes.c_uint8 * arena_bytes).from_address(arena.address))
        assert held[to : to + end - begin].tobytes() == data[begin:end]
        assert np.all(held[:to] == 255) and np.all(held[to + end - begin :] == 255)
    with pytest.raises(ValueError, match="outside"):
        _native.begin_blocks(arena, str(path), [(0, SIZE, arena_bytes - SIZE + 1)], crcs, BLOCK)


def test_records_of_an_arena_have_the_checksums_of_their_bytes() -> None:
    arena, other = _native.Arena(8192), _native.Arena(8192)
    data = np.random.default_rng(0).integers(0, 256, 8192, dtype=np.uint8)
    other.write(0, data)
    arena.copy(100, other, 64, 7 * 96)
    found = np.zeros(7, np.uint32)
    arena.checksums(100, 96, found)
    assert found.tolist() == [_native.crc32c(data[64 + i * 96 :][:96]) for i in range(7)]
    for to, start in ((8192 - 95, 0), (0, 8100)):
        with pytest.raises(ValueError, match="outside"):
            arena.copy(to, other, start, 96)
    with pytest.raises(ValueError, match="outside"):
        arena.checksums(8192 - 7 * 96 + 1, 96, found)
