"""The `thermocline` command: options in, data on stdout, everything else on stderr, errors as exit codes.

Each command imports what is heavy when it runs, so that `--help` needs no numpy.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from thermocline import __version__
from thermocline.cli.commands import (
    bench,
    chat,
    deploy,
    doctor,
    evaluate,
    inspect_pack,
    model_cache,
    pack,
    plan,
    profile_pack,
    run,
    serve,
    synth,
    train,
)
from thermocline.cli.commands.routing import routes, trace
from thermocline.cli.console import INTERRUPTED, LogLines, emit, log_lines
from thermocline.cli.environment import check_environment, debugging
from thermocline.errors import IOFailure, OutOfBudget, ThermoclineError, UsageError
from thermocline.options import add_arguments, read_options

log = logging.getLogger(__name__)

BROKEN_PIPE = 141  # 128 + SIGPIPE
EXIT_CODES = (
    "exit codes: 0 ok, 2 usage, 3 bad file, 4 I/O, 5 does not fit in memory, 6 unsupported, "
    "7 the model gives NaN, 8 the GPU fails, 130 interrupted, 1 anything else"
)


@dataclass(frozen=True)
class Command:
    """A command's options, which are its flags and its help, and the function that carries it out."""

    options: type[Any]
    run: Callable[[Any], int]


COMMANDS = {
    "run": Command(run.RunOptions, run.run),
    "chat": Command(chat.ChatOptions, chat.chat),
    "serve": Command(serve.ServeOptions, serve.serve),
    "deploy": Command(deploy.DeployOptions, deploy.deploy),
    "pack": Command(pack.PackOptions, pack.pack),
    "synth": Command(synth.SynthOptions, synth.synth),
    "inspect": Command(inspect_pack.InspectOptions, inspect_pack.inspect),
    "verify": Command(inspect_pack.VerifyOptions, inspect_pack.verify),
    "profile": Command(profile_pack.ProfileOptions, profile_pack.profile),
    "train": Command(train.TrainOptions, train.train),
    "plan": Command(plan.PlanOptions, plan.plan),
    "bench": Command(bench.BenchOptions, bench.bench),
    "eval": Command(evaluate.EvalOptions, evaluate.evaluate),
    "routes": Command(routes.RoutesOptions, routes.routes),
    "trace": Command(trace.TraceOptions, trace.trace),
    "doctor": Command(doctor.DoctorOptions, doctor.doctor),
    "pull": Command(model_cache.PullOptions, model_cache.pull),
    "ls": Command(model_cache.LsOptions, model_cache.ls),
    "rm": Command(model_cache.RmOptions, model_cache.rm),
}


# ---- in: arguments


class Parser(argparse.ArgumentParser):
    """argparse's parser, with wrong usage raised like every other error and no abbreviated flags."""

    def error(self, message: str) -> Any:
        raise UsageError(f"{message}; see `{self.prog} --help`")


class Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        emit(f"thermocline {__version__}\n")
        parser.exit()


def parser() -> Parser:
    top = Parser(
        prog="thermocline",
        description="Run language models, computing only the neurons a token needs.",
        epilog=f"{EXIT_CODES}. Each option of a command has an environment twin; see `run --help`.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action=Version, nargs=0, help="print the version")
    commands = top.add_subparsers(metavar="COMMAND", dest="command", parser_class=Parser)
    for name, command in COMMANDS.items():
        about = command.options.__doc__ or ""
        sub = commands.add_parser(name, help=about, description=about, epilog=EXIT_CODES, allow_abbrev=False)
        add_arguments(sub, command.options)
    return top


def carry_out(argv: Sequence[str], lines: LogLines) -> int:
    found, rest = parser().parse_known_args(argv)
    given = vars(found)
    name = given.pop("command")
    if rest:
        hint = "" if rest[0].startswith("-") else " (a text of several words needs quotes)"
        raise UsageError(f"unknown argument {rest[0]!r}{hint}; see `thermocline {name or ''} --help`")
    if name is None:
        raise UsageError('no command; try `thermocline run "Once upon a time"` or `thermocline --help`')
    for variable in check_environment(os.environ, (command.options for command in COMMANDS.values())):
        log.warning(f"warning: {variable} is not an option")
    options = read_options(COMMANDS[name].options, given, os.environ)
    lines.quiet = getattr(options, "quiet", False)
    return COMMANDS[name].run(options)


# ---- main: the one place where errors become a line and an exit code


def _silence_stdout() -> None:
    """Keep the interpreter's last flush from failing too: nobody reads stdout any more."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # not a real file: nothing to flush to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed(message: str, code: int) -> int:
    if debugging(os.environ):
        traceback.print_exc()
    log.error(message)
    return code


def _os_error(e: OSError) -> str:
    where = f"{e.filename}: " if e.filename is not None else ""
    return f"{where}{e.strerror or e}"


def main(argv: Sequence[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    with log_lines() as lines:
        return exit_code(sys.argv[1:] if argv is None else argv, lines)


def exit_code(argv: Sequence[str], lines: LogLines) -> int:
    """Run a command. An error becomes a line on stderr and its exit code."""
    try:
        try:
            code = carry_out(argv, lines)
        except SystemExit as e:  # --help and --version
            code = int(e.code or 0)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except ThermoclineError as e:
        return _failed(str(e), e.exit_code)
    except BrokenPipeError:
        _silence_stdout()
        return BROKEN_PIPE
    except OSError as e:
        _silence_stdout()
        return _failed(_os_error(e), IOFailure.exit_code)
    except MemoryError:
        return _failed("out of memory; see `thermocline doctor` for what is free", OutOfBudget.exit_code)
    except KeyboardInterrupt:
        return _failed("interrupted", INTERRUPTED)
    except Exception as e:  # a bug: still one line, and the way to see the rest
        return _failed(
            f"internal error: {type(e).__name__}: {e} (THERMOCLINE_DEBUG=1 shows the traceback)", 1
        )
