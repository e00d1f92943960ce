"""The variables and directories that commands take from their environment."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from thermocline.options import PREFIX, Parse, one_of, options_of, parse_value, switch, variable
from thermocline.session.options import default_cache_dir

# Variables that are no option's twin: ISA lowers the instruction set, DEBUG=1 shows tracebacks,
# OVERLAP=1 lets launches on a GPU overlap.
ARM = platform.machine().lower() in ("aarch64", "arm64")
OTHER_VARIABLES: dict[str, Parse] = {
    "ISA": one_of("scalar", *(("neon",) if ARM else ("avx2", "avxvnni", "avx512", "amx"))),
    "DEBUG": switch,
    "OVERLAP": switch,
}


def check_environment(environ: Mapping[str, str], commands: Iterable[type[Any]]) -> list[str]:
    """Return the THERMOCLINE_ variables that no command's options read: most likely typing mistakes."""
    known = {variable(f.name) for options in commands for f, _ in options_of(options)}
    for name, parse in OTHER_VARIABLES.items():
        known.add(variable(name))
        if variable(name) in environ:
            parse_value(parse, variable(name), environ[variable(name)])
    return sorted(name for name in environ if name.startswith(PREFIX) and name not in known)


def cache_dir(given: str | None) -> Path:
    return Path(given) if given else default_cache_dir(os.environ)


def default_state_dir(environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """Return the directory in which a program of this system keeps its state; XDG_STATE_HOME wins."""
    if base := environ.get("XDG_STATE_HOME"):
        return Path(base) / "thermocline"
    if platform == "win32":
        return (
            Path(environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "thermocline" / "state"
        )
    if platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "thermocline"
    return Path.home() / ".local" / "state" / "thermocline"


def debugging(environ: Mapping[str, str]) -> bool:
    return environ.get(variable("debug"), "").lower() in ("1", "on", "true", "yes", "enabled")
