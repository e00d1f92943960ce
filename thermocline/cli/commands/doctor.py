"""`thermocline doctor`: measure this machine, and say what holds it back."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from thermocline import __version__
from thermocline.cli.console import emit, emit_json
from thermocline.cli.environment import cache_dir
from thermocline.cli.shared_options import json_output, thread_count
from thermocline.cli.table import gbs, size, table
from thermocline.errors import DeviceFailure, IOFailure
from thermocline.options import nonempty, opt

if TYPE_CHECKING:
    from thermocline.machine import hardware


@dataclass(frozen=True)
class DoctorOptions:
    """Measure this machine, and say what holds it back."""

    disk: str | None = opt(
        None, nonempty, "DIR", "Model", "Directory whose disk is measured.", shown="the cache directory"
    )
    threads: int = thread_count("Threads to measure memory with.")
    output: str | None = opt(
        None, nonempty, "FILE", "Output", "Write what `plan --hardware FILE` reads.", flags="-o", shown="none"
    )
    json: bool = json_output()


def doctor(o: DoctorOptions) -> int:
    from thermocline.files.whole import replacing
    from thermocline.machine import hardware, this_machine
    from thermocline.machine.tiers import render, tiers_json
    from thermocline.session import gpu
    from thermocline.session.self_check import verdicts

    directory = Path(o.disk) if o.disk else cache_dir(None)
    if o.disk and not directory.is_dir():
        raise IOFailure(f"{directory}: no such directory")
    found = hardware.measure(directory, o.threads)
    if found.gpu.found:
        found = replace(found, gpu=_used(found.gpu))
    checked = verdicts.known(found.gpu.names, found.gpu.driver) if found.gpu.found else []
    advice = hardware.advice(found, os.environ.get("THERMOCLINE_ISA"))
    software = {
        "thermocline": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cache_dir": str(cache_dir(None)),
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
            checks = {"gpu_self_checks": [asdict(v) for v in checked]}
            emit_json({**software, **asdict(found), **checks, "advice": advice, "tiers": tiers_json(tiers)})
            return 0
    lines = [("advice", line) for line in advice] or [("advice", "none: nothing holds this machine back")]
    if found.gpu.found:
        told = [v.line for v in checked] or ["none yet: the first run of a model with --gpu makes one"]
        lines = [*(("gpu self-check", line) for line in told), *lines]
    emit(table([*((k.replace("_", " "), v) for k, v in software.items()), *hardware_rows(found), *lines]))
    return 0


def _used(board: hardware.GpuInfo) -> hardware.GpuInfo:
    """Return the GPUs with why they are not used, or what is slower on the first."""
    from thermocline.session import gpu

    try:
        if why := gpu.unusable(board):
            return replace(board, why=why)
        return replace(board, note=gpu.slower() or "")
    except DeviceFailure as e:
        return replace(board, why=str(e))


def hardware_rows(h: hardware.Hardware) -> list[tuple[str, str]]:
    c, m, d, g = h.cores, h.memory, h.disk, h.gpu
    quota = "" if c.quota is None else f", quota {c.quota:g}"
    rows = [
        ("cpu", c.name or "unknown"),
        ("cores", f"{c.usable_physical} usable of {c.physical or 'unknown'} ({c.logical} logical{quota})"),
        ("threads", f"{m.threads}"),
    ]
    if h.isa is not None:
        rows.append(("kernels", f"{h.isa.chosen} (possible: {', '.join(h.isa.levels)})"))
        rows.append(("cpu features", " ".join(name for name, has in h.isa.features.items() if has)))
    rows.append(("memory", f"{size(m.available_bytes)} free of {size(m.total_bytes)}"))
    rows.append(("last-level cache", size(m.cache_bytes)))
    several = f", {gbs(m.read_gbs)} with {m.threads}" if m.threads > 1 else ""
    rows.append(("memory read", f"{gbs(m.read_gbs_1_thread)} with 1 thread{several}"))
    rows.append(("disk", f"{d.path} ({size(d.free_bytes)} free)"))
    if d.sequential_gbs is not None:
        rows.append(("disk read", f"{gbs(d.sequential_gbs)}, {d.random_iops:,.0f} random 4 KiB reads/s"))
    if d.why:
        rows.append(("disk note", d.why))
    boards = [f"{name}, {size(nbytes)}" for name, nbytes in zip(g.names, g.memory_bytes, strict=True)]
    unused = f" (not used: {g.why})" if g.why else ""
    rows.append(("gpu", f"{'; '.join(boards)}{unused}" if g.found else f"none: {g.why}"))
    if g.note:
        rows.append(("gpu note", g.note))
    return rows
