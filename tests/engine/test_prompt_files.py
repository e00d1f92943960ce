"""The directory of a prompt cache: whole files or none, by content, within a limit, whoever shares it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from logged import logged

from thermocline.engine.prompt_cache import files as prompt_files
from thermocline.engine.prompt_cache.files import PromptFiles
from thermocline.errors import BadFile, IOFailure, UsageError

MODEL, OTHER = b"m" * 32, b"o" * 32
SIZES = [100, 4096, 7]
TEXT = b"t" * 32


def content(seed: int) -> list[bytes]:
    return [bytes((seed + i) % 256 for i in range(n)) for n in SIZES]


def opened(path: Path, model: bytes = MODEL, limit: int = 1 << 20) -> PromptFiles:
    found = PromptFiles.open(path, model, limit)
    assert found is not None
    return found


def write(files: PromptFiles, text: bytes, seed: int = 1, used_ns: int = 1, valid: bool = True) -> int:
    sections = (memoryview(x) for x in content(seed))
    return files.write(text, "k0", sections, SIZES, used_ns, lambda: valid)


def read(files: PromptFiles, text: bytes = TEXT, part: str = "k0") -> list[bytes]:
    buffer = memoryview(bytearray(max(SIZES)))
    return [bytes(x) for x in files.sections(text, part, SIZES, buffer)]


def name(i: int) -> bytes:
    return i.to_bytes(32, "big")


def stored(files: PromptFiles) -> list[Path]:
    return sorted(p for p in files.directory.rglob("*") if p.is_file() and p.name != prompt_files.MARKER)


def size(files: PromptFiles) -> int:
    return sum(p.stat().st_size for p in stored(files))


def test_another_process_reads_what_was_written(tmp_path: Path) -> None:
    assert write(opened(tmp_path / "new" / "dir"), TEXT) == size(opened(tmp_path / "new" / "dir"))
    later = opened(tmp_path / "new" / "dir")
    assert later.has(TEXT, "k0") and not later.has(TEXT, "k1") and not later.has(b"u" * 32, "k0")
    assert read(later) == content(1)


def test_another_models_files_are_not_found(tmp_path: Path) -> None:
    write(opened(tmp_path), TEXT)
    assert not opened(tmp_path, OTHER).has(TEXT, "k0")


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    files = opened(tmp_path)
    write(files, TEXT)
    (path,) = stored(files)
    whole = path.read_bytes()
    for at in [*range(0, len(whole) - sum(SIZES)), *range(len(whole) - sum(SIZES), len(whole), 31)]:
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        with pytest.raises(BadFile):
            read(files)
    path.write_bytes(whole)
    assert read(files) == content(1)


@pytest.mark.parametrize("cut", [0, 1, 50, 100, 4000, -1, None])
def test_a_file_of_another_length_is_found(tmp_path: Path, cut: int | None) -> None:
    files = opened(tmp_path)
    write(files, TEXT)
    (path,) = stored(files)
    whole = path.read_bytes()
    path.write_bytes(whole + b"x" if cut is None else whole[:cut])
    with pytest.raises(BadFile):
        read(files)


def test_a_file_in_the_place_of_another_is_found(tmp_path: Path) -> None:
    files = opened(tmp_path)
    write(files, TEXT)
    write(files, name(1), seed=2)
    other, path = stored(files)
    path.write_bytes(other.read_bytes())
    with pytest.raises(BadFile, match="not of this text"):
        read(files)


def test_a_file_that_is_cut_while_it_is_read_is_found(tmp_path: Path) -> None:
    files = opened(tmp_path)
    write(files, TEXT)
    (path,) = stored(files)
    sections = files.sections(TEXT, "k0", SIZES, memoryview(bytearray(max(SIZES))))
    assert bytes(next(sections)) == content(1)[0]
    os.truncate(path, 200)
    with pytest.raises(BadFile):
        list(sections)


def test_what_changed_while_it_was_copied_is_not_kept(tmp_path: Path) -> None:
    files = opened(tmp_path)
    assert write(files, TEXT, valid=False) == 0 and stored(files) == []


# ---- the directory


def test_a_directory_of_another_version_is_one_line_and_stays_as_it_is(tmp_path: Path) -> None:
    for text in (json.dumps({prompt_files.MARKER_KEY: 2}), "{", "[" * 3000, json.dumps({"x": 1}), "7"):
        (tmp_path / prompt_files.MARKER).write_text(text)
        with logged() as lines:
            assert PromptFiles.open(tmp_path, MODEL, 1 << 20) is None
        (line,) = lines
        assert "a prompt cache of version" in line and "it is not used" in line
        assert [p.name for p in tmp_path.iterdir()] == [prompt_files.MARKER]


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="has other files and is no prompt cache"):
        PromptFiles.open(tmp_path, MODEL, 1 << 20)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_place_where_nothing_can_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(IOFailure, match="no prompt cache can be kept there"):
        PromptFiles.open(tmp_path / "file", MODEL, 1 << 20)


@pytest.mark.skipif(sys.platform == "win32", reason="modes are POSIX'")
def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    files = opened(tmp_path / "d")
    write(files, TEXT)
    assert (tmp_path / "d").stat().st_mode & 0o77 == 0


# ---- the limit


def test_the_least_recently_used_goes_first_whichever_model_it_is_of(tmp_path: Path) -> None:
    one = write(opened(tmp_path), name(0), used_ns=5)
    limit = 10 * one + one // 2
    files, other = opened(tmp_path, limit=limit), opened(tmp_path, OTHER, limit=limit)
    for i in range(1, 10):
        write(files if i % 2 else other, name(i), used_ns=10 + i)
        assert size(files) <= limit
    files.use(name(0), "k0", 100)
    write(files, name(10), used_ns=30)
    assert files.has(name(0), "k0"), "it was used again"
    assert not files.has(name(1), "k0") and files.has(name(9), "k0") and files.has(name(10), "k0")
    for i in range(11, 60):
        write(files, name(i), used_ns=1000 + i)
        assert size(files) <= limit
    assert [i for i in range(60) if files.has(name(i), "k0")][-1] == 59
    assert not any(files.has(name(i), "k0") or other.has(name(i), "k0") for i in range(45))


def test_what_is_larger_than_the_limit_is_not_written(tmp_path: Path) -> None:
    files = opened(tmp_path, limit=1000)
    assert write(files, TEXT) == 0 and stored(files) == []


def test_only_its_own_files_are_ever_deleted(tmp_path: Path) -> None:
    files = opened(tmp_path, limit=9000)
    write(files, name(0))
    notes = [tmp_path / "notes", stored(files)[0].parent / "notes", tmp_path / ("ab" * 32)]
    for path in notes:
        path.write_bytes(bytes(20_000))
        os.utime(path, ns=(0, 0))
    for i in range(9):
        write(files, name(i), used_ns=i)
    assert all(path.exists() for path in notes) and files.has(name(8), "k0")


def test_what_a_crash_left_is_removed_and_what_is_being_written_stays(tmp_path: Path) -> None:
    files = opened(tmp_path)
    write(files, TEXT)
    (path,) = stored(files)
    left, now = (path.with_name(f".{path.name}.{digit * 16}") for digit in "ab")
    for beside in (left, now):
        beside.write_bytes(b"half")
    os.utime(left, (time.time() - 7200,) * 2)
    write(opened(tmp_path), name(1))
    assert not left.exists() and now.exists()


# ---- what the system does


class Refusing:
    """A file whose disk is full after some bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room = file, room

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Refusing:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: memoryview) -> int:
        if self._room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = int(self._file.write(data[: max(1, len(data) // 2)]))  # in pieces, as the system may
        self._room -= written
        return written


@pytest.mark.parametrize("room", [0, 100, 5000])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    files = opened(tmp_path)
    monkeypatch.setattr(prompt_files, "open", lambda *a, **k: Refusing(open(*a, **k), room), raising=False)  # noqa: SIM115
    if room < 5000:
        with pytest.raises(OSError, match="No space"):
            write(files, TEXT)
        assert stored(files) == []
    else:
        assert write(files, TEXT)
        monkeypatch.undo()
        assert read(files) == content(1)


WRITER = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_prompt_files import name, opened, write
files, i = opened(Path(sys.argv[1]), limit=200_000), 0
print("begun", flush=True)
while True:
    write(files, name(i % 40), seed=i % 40, used_ns=i)
    i += 1
"""


@pytest.mark.slow
def test_two_processes_share_it_and_a_killed_one_leaves_whole_files(tmp_path: Path) -> None:
    """One writes until it is killed; others read, write and evict meanwhile. Nothing found is wrong."""
    where = tmp_path / "shared"
    argv = [sys.executable, "-c", WRITER, str(where), *filter(None, sys.path)]
    writer = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert writer.stdout is not None and writer.stdout.readline().strip() == b"begun"
    stop, found = threading.Event(), list[int]()

    def reads() -> Iterator[int]:
        files = opened(where, limit=200_000)
        while not stop.is_set():
            for i in range(40):
                try:
                    assert read(files, name(i)) == content(i)
                except FileNotFoundError:
                    continue
                yield i

    reader = threading.Thread(target=lambda: found.extend(reads()))
    reader.start()
    mine = opened(where, limit=100_000)
    for i in range(400):
        write(mine, name(i % 40), seed=i % 40, used_ns=i)
    writer.kill()
    writer.wait()
    stop.set()
    reader.join()
    assert found, "nothing was read"
    for path in stored(mine):
        if not path.name.startswith("."):
            text = bytes.fromhex(path.name.removesuffix(".k0"))
            assert read(mine, text) == content(int.from_bytes(text, "big"))
