"""The `thermocline` command: options in, data on stdout, everything else on stderr, errors as exit codes.

Must not know kernels, tensors or scheduling. Each command imports what is heavy, so `--help` needs no numpy.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thermocline import __version__
from thermocline.cli import commands as config
from thermocline.cli import offline, offline_options, plan, report, serve, trace
from thermocline.cli.console import INTERRUPTED, Progress, emit, emit_json, note
from thermocline.cli.run import chat, run
from thermocline.errors import BadFile, DeviceFailure, IOFailure, OutOfBudget, ThermoclineError, UsageError
from thermocline.options import add_arguments, read_options

if TYPE_CHECKING:
    from thermocline.machine import hardware
    from thermocline.offline.bench import Bench
    from thermocline.pack.pack import Pack

BROKEN_PIPE = 141  # 128 + SIGPIPE
EXIT_CODES = (
    "exit codes: 0 ok, 2 usage, 3 bad file, 4 I/O, 5 does not fit in memory, 6 unsupported, "
    "7 the model gives NaN, 8 the GPU fails, 130 interrupted, 1 anything else"
)


# ---- in: arguments


class Parser(argparse.ArgumentParser):
    """argparse, with wrong usage raised like every other error, and no guessing of abbreviated flags."""

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
    for name, options in config.COMMANDS.items():
        about = options.__doc__ or ""
        sub = commands.add_parser(name, help=about, description=about, epilog=EXIT_CODES, allow_abbrev=False)
        add_arguments(sub, options)
    return top


def command(argv: Sequence[str]) -> int:
    found, rest = parser().parse_known_args(argv)
    given = vars(found)
    name = given.pop("command")
    if rest:
        hint = "" if rest[0].startswith("-") else " (a text of several words needs quotes)"
        raise UsageError(f"unknown argument {rest[0]!r}{hint}; see `thermocline {name or ''} --help`")
    if name is None:
        raise UsageError('no command; try `thermocline run "Once upon a time"` or `thermocline --help`')
    for variable in config.check_environment(os.environ):
        note(f"warning: {variable} is not an option")
    options = read_options(config.COMMANDS[name], given, os.environ)
    match options:
        case config.RunOptions():
            return run(options)
        case config.ChatOptions():
            return chat(options)
        case config.ServeOptions():
            return serve.serve(options)
        case config.PackOptions():
            return pack(options)
        case config.SynthOptions():
            return synth(options)
        case config.InspectOptions():
            return inspect(options)
        case config.VerifyOptions():
            return verify(options)
        case offline_options.ProfileOptions():
            return offline.profile(options)
        case offline_options.TrainOptions():
            return offline.train(options)
        case offline_options.PlanOptions():
            return plan.plan(options)
        case config.BenchOptions():
            return bench(options)
        case offline_options.EvalOptions():
            return offline.evaluate(options)
        case config.DoctorOptions():
            return doctor(options)
        case config.PullOptions():
            return pull(options)
        case config.LsOptions():
            return ls(options)
        case config.RmOptions():
            return rm(options)
    raise AssertionError(name)


# ---- pack, inspect, verify


def pack(o: config.PackOptions) -> int:
    from thermocline.convert import importer
    from thermocline.hub import download
    from thermocline.pack import pack as packs

    if o.output.endswith(".gguf"):
        return export(o)
    with Progress(quiet=o.quiet) as progress:
        bar = partial(progress.at, "packing")
        source = download.locate(o.source, progress.at)
        cost = importer.pack(
            source, o.output, o.format, overwrite=o.force, progress=bar, activation=o.activation
        )
    about = packs.inspect(packs.Pack.open(o.output))
    if o.json:
        emit_json(about)
    if not o.quiet:
        size, how = report.size(sum(about["files"].values())), about["weight_format"]
        note(f"packed {o.source} as {how} into {o.output}, {size}")
        if cost is not None:
            note(str(cost))
    return 0


def export(o: config.PackOptions) -> int:
    """A pack as one GGUF file."""
    from thermocline.convert import from_gguf, to_gguf

    opened = open_pack(o.source, o.activation)
    if o.format not in (None, opened.weight_format):
        raise UsageError(
            f"{o.source}: has {opened.weight_format} weights, which a GGUF keeps; not {o.format}"
        )
    with Progress(quiet=o.quiet) as progress:
        bar = partial(progress.at, "writing GGUF")
        to_gguf.write_gguf(opened, o.output, overwrite=o.force, progress=bar)
    about = from_gguf.inspect_gguf(Path(o.output))
    if o.json:
        emit_json(about)
    if not o.quiet:
        size, layout = (
            report.size(about["file_bytes"]),
            "PowerInfer's" if opened.spec.sparse else "llama.cpp's",
        )
        note(f"wrote {o.source} as {opened.weight_format} into {o.output}, {size}, in {layout} layout")
    return 0


def synth(o: config.SynthOptions) -> int:
    from thermocline.convert import synthetic, to_gguf
    from thermocline.pack import pack as packs

    model = synthetic.SyntheticModel.of(
        o.shape, o.seed, o.active, o.skew, o.rank, o.hottest_first, o.activation
    )
    if o.gguf is not None:
        to_gguf.check(model.stats.spec, model.optional, o.gguf, o.force)
    with Progress(quiet=o.quiet) as progress:
        model.write(o.output, o.format, overwrite=o.force, progress=partial(progress.at, "writing"))
        made = packs.Pack.open(o.output)
        if o.gguf is not None:
            bar = partial(progress.at, "writing GGUF")
            to_gguf.write_gguf(made, o.gguf, overwrite=o.force, progress=bar)
    about = packs.inspect(made)
    if o.json:
        emit_json(about)
    if not o.quiet:
        layout = " (PowerInfer's layout)" if made.spec.sparse else ""
        too = f" and {o.gguf}{layout}" if o.gguf is not None else ""
        size = report.size(sum(about["files"].values()))
        note(f"wrote random weights ({made.source['name']}) as {o.format} into {o.output}{too}, {size}")
    return 0


def open_pack(model: str | None, activation: str | None = None) -> Pack:
    from thermocline.convert.pack_cache import resolve
    from thermocline.llm import BUNDLED
    from thermocline.pack.pack import Pack

    path = BUNDLED if model is None else Path(model)
    if model is not None and not (path / "pack.json").exists():
        if (path / "config.json").exists() or path.suffix == ".gguf":
            raise UsageError(f"{path}: not a pack; make one with `thermocline pack {path} -o DIR`")
        return Pack.open(resolve(path, config.cache_dir(None), "f32"))  # raises: says what it is instead
    return Pack.open(resolve(path, "", None, activation=activation))


def inspect(o: config.InspectOptions) -> int:
    from thermocline.convert import from_gguf
    from thermocline.pack import pack as packs

    if o.model is not None and from_gguf.is_gguf(Path(o.model)):
        about, rows_of = from_gguf.inspect_gguf(Path(o.model)), report.gguf_rows
    else:
        opened = open_pack(o.model)
        about, rows_of = packs.inspect(opened) | offline.prepared(opened), report.pack_rows
    if o.json:
        emit_json(about)
    else:
        emit(report.table(rows_of(about)))
    return 0


def verify(o: config.VerifyOptions) -> int:
    from thermocline.pack import pack as packs
    from thermocline.pack import sidecar

    opened = open_pack(o.model)
    with Progress(quiet=o.quiet) as progress:
        blocks = packs.verify(opened, partial(progress.at, "verifying"))
    problems = blocks + (beside := list(sidecar.problems(opened.path)))
    if o.json:
        emit_json({"path": str(opened.path), "ok": not problems, "problems": problems})
    else:
        emit(
            "".join(f"{line}\n" for line in problems)
            or f"{opened.path}: ok, {report.size(opened.weights_bytes)}\n"
        )
    if blocks:
        raise BadFile(f"{opened.path}: {len(blocks)} damaged block{'s' * (len(blocks) > 1)}; pack it again")
    if beside:
        raise BadFile(f"{opened.path}: what was made for it is damaged; remove it, or make it again")
    return 0


# ---- bench


def bench(o: config.BenchOptions) -> int:
    from thermocline.offline import bench as benchmark

    if o.trace is not None or o.replay is not None:
        return trace.replay(o) if o.trace is None else trace.record(o)

    interrupted = False

    def rows() -> Iterator[dict[str, Any]]:
        """Until Ctrl-C: what was measured by then is printed like the rest."""
        nonlocal interrupted
        try:
            yield from benchmark.rows(loaded, o.repetitions)
        except KeyboardInterrupt:
            interrupted = True

    with Progress(quiet=o.quiet) as progress, contextlib.closing(open_bench(o, progress)) as loaded:
        for text in report.BENCH_FORMATS[o.output_format](rows()):
            emit(text)
    return INTERRUPTED if interrupted else 0


def open_bench(o: config.BenchOptions, progress: Progress) -> Bench:
    """What cannot be measured is refused before the weights are read."""
    from thermocline.machine import hardware
    from thermocline.offline import bench as benchmark
    from thermocline.pack.pack import Pack

    told = (lambda line: None) if o.quiet else note
    pack = Pack.open(trace.packed(o, progress))
    tests = benchmark.tests_of(
        prompts=o.n_prompt,
        gens=o.n_gen,
        pairs=o.pg,
        depths=o.n_depth,
        threads=[t or hardware.default_threads() for t in o.threads],
    )
    benchmark.check_context(pack.spec, tests)
    feed = benchmark.feed_of(pack, tests, o.text, o.seed)
    return benchmark.Bench(
        pack,
        tests,
        feed,
        sparsity=o.sparsity,
        progress=progress.at,
        ram=o.ram,
        disable=o.disable,
        told=told,
        gpu=o.gpu,
        vram=o.vram,
    )


# ---- doctor


def _why_unused(board: hardware.GpuInfo) -> str:
    """Empty: it is used."""
    from thermocline.session import gpu

    try:
        return gpu.unusable(board) or ""
    except DeviceFailure as e:
        return str(e)


def doctor(o: config.DoctorOptions) -> int:
    import platform

    from thermocline.files.whole import replacing
    from thermocline.machine import hardware, this_machine
    from thermocline.machine.tiers import render, tiers_json
    from thermocline.session import gpu

    directory = Path(o.disk) if o.disk else config.cache_dir(None)
    if o.disk and not directory.is_dir():
        raise IOFailure(f"{directory}: no such directory")
    found = hardware.measure(directory, o.threads)
    if found.gpu.found:
        found = replace(found, gpu=replace(found.gpu, why=_why_unused(found.gpu)))
    advice = hardware.advice(found, os.environ.get("THERMOCLINE_ISA"))
    software = {
        "thermocline": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cache_dir": str(config.cache_dir(None)),
    }
    if o.output is not None or o.json:
        tiers = this_machine.tiers_here(o.threads, disk=found.disk)
        if not found.gpu.why and (board := gpu.find("auto")) is not None:
            tiers = this_machine.with_gpu(tiers, board.device, board.kernels, board.free_bytes)
            board.device.close()
        if o.output is not None:
            with replacing(Path(o.output)) as new:
                new.write_text(render(tiers), encoding="utf-8")
        if o.json:
            emit_json({**software, **asdict(found), "advice": advice, "tiers": tiers_json(tiers)})
            return 0
    lines = [("advice", line) for line in advice] or [("advice", "none: nothing holds this machine back")]
    emit(
        report.table(
            [*((k.replace("_", " "), v) for k, v in software.items()), *report.hardware_rows(found), *lines]
        )
    )
    return 0


# ---- pull, ls, rm


def pull(o: config.PullOptions) -> int:
    from thermocline.hub import download, names

    name = names.parse(o.model)
    if name is None:
        raise UsageError(f"{o.model}: a path, not a hub name such as org/name[@revision][:file or quant]")
    with Progress(quiet=o.quiet) as progress:
        path = download.pull(name, progress.at)
    emit(f"{path}\n")
    return 0


def ls(o: config.LsOptions) -> int:
    from thermocline.hub import cache as shelf

    items = shelf.items(config.cache_dir(o.cache_dir))
    if o.json:
        emit_json({"models": [{**asdict(i), "path": str(i.path)} for i in items]})
    else:
        emit(report.shelf_table(items))
    return 0


def rm(o: config.RmOptions) -> int:
    from thermocline.hub import cache as shelf

    cache = config.cache_dir(o.cache_dir)
    item = shelf.find(o.name, shelf.items(cache))
    what = f"{item.path} ({item.kind}, {item.format}, {report.size(item.bytes)})"
    if not o.yes:
        if sys.stdin is None or not sys.stdin.isatty():
            raise UsageError(f"this would remove {what}; -y confirms it")
        print(f"remove {what}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            note("nothing was removed")
            return 0
    shelf.remove(item, cache)
    note(f"removed {what}")
    return 0


# ---- main: the one place where errors become a line and an exit code


def _silence_stdout() -> None:
    """Nobody reads it any more: keep the interpreter's last flush from failing too."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # not a real file: nothing to flush to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed(message: str, code: int) -> int:
    if config.debugging(os.environ):
        traceback.print_exc()
    note(message)
    return code


def _os_error(e: OSError) -> str:
    where = f"{e.filename}: " if e.filename is not None else ""
    return f"{where}{e.strerror or e}"


def main(argv: Sequence[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            code = command(sys.argv[1:] if argv is None else argv)
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
