"""A command under a memory limit that counts the page cache, in a memory cgroup of its own. Linux, root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class MemoryLimit:
    """A cgroup that allows `limit` bytes. `command` wraps a command so that it runs inside."""

    def __init__(self, limit: int) -> None:
        old = (V1 / "memory.limit_in_bytes").exists()
        self.path = (V1 if old else V2) / f"thermocline-{os.getpid()}"
        self._peak = "memory.max_usage_in_bytes" if old else "memory.peak"
        self.path.mkdir()
        (self.path / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit))

    def command(self, command: list[str | Path]) -> list[str]:
        enter = f'echo $$ > "{self.path}/cgroup.procs" && exec "$@"'
        return ["sh", "-c", enter, "sh", *map(str, command)]

    def peak_bytes(self) -> int:
        """Memory and page cache charged, at most, since the start."""
        return int((self.path / self._peak).read_text())

    def remove(self) -> None:
        self.path.rmdir()


@contextmanager
def memory_limit(limit: int) -> Iterator[MemoryLimit]:
    """Raises SystemExit where this system gives no memory cgroup."""
    try:
        group = MemoryLimit(limit)
    except OSError as e:
        raise SystemExit(f"no memory cgroup of our own here ({e}); run as root") from None
    try:
        yield group
    finally:
        group.remove()


def drop_from_cache(path: Path) -> None:
    """A file's pages leave the page cache: they would be charged to whoever read them first."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


if __name__ == "__main__":  # python bench/disk/memory_limit.py GIB COMMAND…
    import sys

    with memory_limit(int(float(sys.argv[1]) * 2**30)) as inside:
        code = subprocess.call(inside.command(list(sys.argv[2:])))
        print(f"peak {inside.peak_bytes() / 2**30:.2f} GiB", file=sys.stderr)
    raise SystemExit(code)
