"""List and remove models in the two caches: `thermocline ls` and `rm`.

An item is a directory directly inside one of the caches; nothing else is ever removed.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from thermocline.errors import IOFailure, ThermoclineError, UsageError
from thermocline.hub import names as hub


@dataclass(frozen=True)
class Item:
    name: str  # `rm` takes it, or an unambiguous prefix
    kind: str  # pack or hub
    format: str
    bytes: int
    last_used: float  # seconds since 1970; some systems update it once a day
    path: Path


def items(cache_dir: Path) -> list[Item]:
    found = [*_packs(cache_dir), *_repositories(hub.cache_root())]
    return sorted(found, key=lambda i: (i.kind, i.name))


def _directories(root: Path) -> list[Path]:
    try:
        return [p for p in root.iterdir() if p.is_dir() and not p.is_symlink()]
    except FileNotFoundError:
        return []
    except OSError as e:
        raise IOFailure(f"{root}: cannot list: {e.strerror}") from None


def _packs(cache_dir: Path) -> list[Item]:
    from thermocline.pack.pack import Pack

    out = []
    for path in _directories(cache_dir):
        if not (path / "pack.json").is_file():
            continue
        try:
            format = Pack.open(path).weight_format
        except ThermoclineError:
            format = "damaged"
        nbytes, used = _weigh(path)
        out.append(Item(path.name, "pack", format, nbytes, used, path))
    return out


def _repositories(root: Path) -> list[Item]:
    out = []
    for path in _directories(root):
        if path.name.startswith("models--") and path.name.count("--") >= 2:
            nbytes, used = _weigh(path)
            name = path.name.removeprefix("models--").replace("--", "/", 1)
            out.append(Item(name, "hub", _format(path / "snapshots"), nbytes, used, path))
    return out


def _format(snapshots: Path) -> str:
    names = [p.name for p in snapshots.glob("*/**/*")]
    kinds = {"safetensors": (".safetensors",), "gguf": (".gguf",), "pickle": hub.PICKLES}
    return "+".join(k for k, ends in kinds.items() if any(n.endswith(ends) for n in names)) or "none"


def _weigh(root: Path) -> tuple[int, float]:
    """Return the bytes on disk and the last use of the files below `root`. Links are not followed."""
    nbytes, used = 0, 0.0
    for at, _, names in os.walk(root):
        for name in names:
            try:
                about = os.lstat(os.path.join(at, name))
            except FileNotFoundError:  # removed meanwhile
                continue
            nbytes += about.st_blocks * 512 if hasattr(about, "st_blocks") else about.st_size
            used = max(used, about.st_mtime if os.path.islink(os.path.join(at, name)) else _used(about))
    return nbytes, used


def _used(about: os.stat_result) -> float:
    return max(about.st_atime, about.st_mtime)


def find(text: str, among: list[Item]) -> Item:
    exact = [i for i in among if text in (i.name, str(i.path))]
    fit = exact or [i for i in among if i.name.startswith(text)]
    repo, at, _ = text.partition("@")
    if not fit and at and any(i.name == repo for i in among):
        raise UsageError(f"{text!r}: `thermocline rm {repo}` removes that model with all its versions")
    if not text or not fit:
        raise UsageError(f"{text!r} is not in the caches; `thermocline ls` lists the models there")
    if len(fit) > 1:
        names = ", ".join(str(i.path) if exact else i.name for i in fit)
        raise UsageError(f"{text!r} may mean {names}; give one of them")
    return fit[0]


def remove(item: Item, cache_dir: Path) -> None:
    root = cache_dir if item.kind == "pack" else hub.cache_root()
    if item.path.parent != root or item.path.is_symlink():
        raise UsageError(f"{item.path}: is not directly in the cache {root}; remove it by hand")
    try:
        shutil.rmtree(item.path)
    except OSError as e:
        raise IOFailure(f"{e.filename or item.path}: cannot be removed: {e.strerror}") from None
    if item.kind == "hub":
        shutil.rmtree(root / ".locks" / item.path.name, ignore_errors=True)
