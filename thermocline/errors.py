"""Every error that a user can meet, and the exit code that the command line gives it.

    ThermoclineError            1   any other error that is raised on purpose
    |-- UsageError              2   the request is wrong: a flag, a value, a prompt too long
    |-- BadFile                 3   a file is not what it claims: truncated, foreign, corrupted
    |-- IOFailure               4   the system refused: missing, no permission, disk full, read error
    |-- OutOfBudget             5   it does not fit in memory (raised before anything is loaded)
    |-- Unsupported             6   understood, but this build cannot run it
    |-- NumericalError          7   the model produced NaN or infinity instead of an answer
    `-- DeviceFailure           8   the GPU or its driver failed, or has less memory than it reported

The message is one line for a person: what is wrong, where, and what to do about it. These classes and
codes are a contract (docs/reference/errors-and-exit-codes.md); `tests/cli/test_errors.py` provokes each.
"""

from __future__ import annotations


def raised_at(error: BaseException) -> tuple[str, int] | None:
    """Return the (file, line) that raised an error; None if it was never raised.

    A log may name that place even if the error's message may quote a user's text.
    """
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return None if at is None else (at.tb_frame.f_code.co_filename, at.tb_lineno)


def place_of(error: BaseException) -> str:
    """Return " at FILE:LINE" for the end of a message, or "" if the error was never raised."""
    at = raised_at(error)
    return "" if at is None else f" at {at[0]}:{at[1]}"


class ThermoclineError(Exception):
    """Base of every error raised on purpose."""

    exit_code = 1


class UsageError(ThermoclineError):
    exit_code = 2


class BadFile(ThermoclineError):
    exit_code = 3


class IOFailure(ThermoclineError):
    exit_code = 4


class OutOfBudget(ThermoclineError):
    exit_code = 5


class Unsupported(ThermoclineError):
    exit_code = 6


class NumericalError(ThermoclineError):
    exit_code = 7


class DeviceFailure(ThermoclineError):
    exit_code = 8
