"""Files that appear under their name whole, or not at all."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from thermocline.errors import IOFailure


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to. It replaces `path` if the body succeeds, and is removed otherwise.

    A killed process leaves it as `NAME.tmp-PID`; the next call for the same `path` removes it. Raises
    IOFailure.
    """
    if path.exists() and not path.is_file():  # root could put a file in the place of /dev/null
        raise IOFailure(f"{path}: is a directory, device, pipe or socket, not a file")
    remove_stale(path)
    tmp = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        yield tmp
        os.replace(tmp, path)
    except OSError as e:
        raise IOFailure(f"{path}: cannot write: {e.strerror or e}") from None
    finally:
        with suppress(OSError):  # the file may never have been made
            tmp.unlink()


def remove_stale(path: Path) -> None:
    """Remove the temporary files of `path` whose writer is dead."""
    if sys.platform == "win32":
        return  # os.kill(pid, 0) would end the writer
    with suppress(OSError):
        for found in path.parent.iterdir():
            m = re.fullmatch(re.escape(path.name) + r"\.tmp-(\d{1,10})", found.name)
            if m is not None and not found.is_symlink() and found.is_file() and not alive(int(m[1])):
                found.unlink()


def alive(pid: int) -> bool:
    """Return whether another process has this id."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
