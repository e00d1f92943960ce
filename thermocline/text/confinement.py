"""A confined process, from within: its limits, its permitted system calls, and its loop of requests.

A worker imports all it needs and calls `serve`; from then on it can only compute and answer. This file
imports nothing of the package, so that workers start in milliseconds. On a system without such limits, only
the clock in `confined_process.py` stops a worker.

A frame, in either direction, is a length (four bytes, little-endian) and that many bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Bounds:
    """Processor time and address space that a request may take."""

    cpu_s: float
    memory_bytes: int


def serve(
    answer: Callable[[bytes], bytes],
    bounds: Callable[[bytes], Bounds],
    *,
    most_bytes: int,
    stack_bytes: int = 0,
) -> None:
    """Answer requests until the pipe closes. A request that exceeds its bounds ends the process.

    `most_bytes`: the largest address space of any request. `stack_bytes`: the stack of the answering thread.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asks, answers = sys.stdin.buffer, sys.stdout.buffer

    def loop() -> None:
        harden(most_bytes)
        while (request := _read(asks)) is not None:
            reply = _bounded(answer, request, bounds(request), most_bytes)
            answers.write(LENGTH.pack(len(reply)))
            answers.write(reply)
            answers.flush()

    if not stack_bytes:
        return loop()
    threading.stack_size(stack_bytes)
    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()


def _read(asks: IO[bytes]) -> bytes | None:
    """Return the next frame, or None at the end."""
    head = asks.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    data = asks.read(size)
    return data if len(data) == size else None


def _bounded(answer: Callable[[bytes], bytes], request: bytes, bounds: Bounds, most_bytes: int) -> bytes:
    """Answer within bounds. The timer ends the process even in the middle of C code."""
    _limit("RLIMIT_AS", min(bounds.memory_bytes, most_bytes), most_bytes)
    if not hasattr(signal, "setitimer"):  # Windows
        return answer(request)
    signal.setitimer(signal.ITIMER_PROF, bounds.cpu_s)
    try:
        return answer(request)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


# ---- rights that the process gives up for good


def harden(most_bytes: int) -> None:
    """Give up new files, processes, connections and privileges, and address space beyond `most_bytes`."""
    if hasattr(time, "tzset"):  # reads the time zone's file now
        time.tzset()
        time.localtime()
    for name in ("RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC"):
        _limit(name, 0, 0)
    _limit("RLIMIT_AS", most_bytes, most_bytes)
    filter_system_calls()


def _limit(name: str, soft: int, hard: int) -> None:
    """Lower a limit, where the system has it. Windows has none; macOS lacks some."""
    with contextlib.suppress(ImportError, AttributeError, OSError, ValueError):
        import resource

        _, most = resource.getrlimit(getattr(resource, name))
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(getattr(resource, name), (soft, hard))


# ---- system calls: seccomp, as a program for the kernel

# Machine -> (the kernel's number of it, the number of the call `seccomp`, column of the tables below).
_MACHINES = {"x86_64": (0xC000003E, 317, 0), "aarch64": (0xC00000B7, 277, 1)}
# Memory, time, existing threads, signals to itself, and reading and writing open files.
_ALLOWED = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "close": (3, 57),
    "fstat": (5, 80), "lseek": (8, 62),
    "brk": (12, 214), "mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226),
    "madvise": (28, 233),
    "futex": (202, 98), "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "gettid": (186, 178),
    "getpid": (39, 172), "set_robust_list": (273, 99), "rseq": (334, 293), "membarrier": (324, 283),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132), "restart_syscall": (219, 128),
    "setitimer": (38, 103), "getitimer": (36, 102), "gettimeofday": (96, 169), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    "getrandom": (318, 278), "getrusage": (98, 165), "getrlimit": (97, 163), "setrlimit": (160, 164),
    "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
_OF_ITSELF = {
    "tgkill": (234, 131),
    "prlimit64": (302, 261),
}  # allowed if their first argument is this process
_LOAD, _JUMP_IF, _RETURN = 0x20, 0x15, 0x06  # BPF: BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
_NUMBER, _MACHINE, _ARGUMENT = 0, 4, 16  # in struct seccomp_data; the lower half of the first argument
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
_NO_NEW_PRIVS, _FILTER, _ALL_THREADS = 38, 1, 1  # prctl's, seccomp's


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def filter_system_calls() -> bool:
    """Restrict all threads to the system calls above; any other fails with EPERM.

    Return False if the kernel or the machine does not support that.
    """
    machine = _MACHINES.get(platform.machine()) if sys.platform == "linux" else None
    if machine is None or sys.maxsize < 1 << 32:
        return False
    name, seccomp, column = machine
    code = _program(name, column, os.getpid())
    program = _Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    call = libc.syscall
    call.restype = ctypes.c_long
    if libc.prctl(_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))) != 0:
        return False
    done = call(ctypes.c_long(seccomp), ctypes.c_ulong(_FILTER), ctypes.c_ulong(_ALL_THREADS),
                ctypes.byref(program))  # fmt: skip
    return bool(done == 0)


def _program(machine: int, column: int, pid: int) -> bytes:
    """Return the filter: compare with each call, REFUSE, check the process, REFUSE, ALLOW, KILL."""
    calls = [(n[column], False) for n in _ALLOWED.values()] + [(n[column], True) for n in _OF_ITSELF.values()]
    refuse = 3 + len(calls)
    whose, allow, kill = refuse + 1, refuse + 5, refuse + 6
    code = [(_LOAD, 0, 0, _MACHINE), (_JUMP_IF, 0, kill - 2, machine), (_LOAD, 0, 0, _NUMBER)]
    for at, (number, of_itself) in enumerate(calls, start=3):
        code.append((_JUMP_IF, (whose if of_itself else allow) - at - 1, 0, number))
    code += [(_RETURN, 0, 0, _REFUSE), (_LOAD, 0, 0, _ARGUMENT)]
    code += [(_JUMP_IF, allow - whose - 2, 0, 0), (_JUMP_IF, allow - whose - 3, 0, pid)]
    code += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _KILL)]
    return b"".join(struct.pack("=HBBI", *one) for one in code)
