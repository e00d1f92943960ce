"""The models in a directory, by name: GGUF files (a split one counts once), packs, Hugging Face directories.

A name is the path below the directory, without `.gguf`. It is only ever compared: no path is made of it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from thermocline.errors import IOFailure
from thermocline.hub.names import SPLIT, is_companion

DEPTH = 3  # of directories: ORG/REPOSITORY/FILE.gguf
MOST = 1000  # models; others are ignored
_SUFFIX = ".gguf"


@dataclass(frozen=True)
class ModelFiles:
    """A model in the directory. `state`: what its files were, to notice when they are replaced."""

    name: str
    path: Path
    nbytes: int
    state: tuple[tuple[int, int, int], ...]


def models_in(directory: Path) -> dict[str, ModelFiles]:
    """Return the models by name. Raise IOFailure if the directory cannot be read."""
    try:
        os.scandir(directory).close()
    except OSError as e:
        raise IOFailure(f"{directory}: cannot list models: {e.strerror}") from None
    found: dict[str, ModelFiles] = {}
    for name, path, files in _walk(directory, "", DEPTH):
        if name in found:  # x.gguf beside a pack x/, or beside x-00001-of-00002.gguf
            name = f"{name.rpartition('/')[0]}/{path.name}".lstrip("/")
        if len(found) == MOST:
            break
        if name.isprintable() and (about := _files(name, path, files)) is not None:
            found[name] = about
    return found


def _walk(directory: Path, prefix: str, depth: int) -> Iterator[tuple[str, Path, Sequence[Path]]]:
    """Yield (name, path, the files with its weights): directories first, in the order of their names."""
    try:
        there = sorted((e for e in os.scandir(directory) if e.name[0] != "."), key=lambda e: e.name)
        inside = [e for e in there if e.is_dir()]
    except OSError:  # not for this user, or removed meanwhile
        return
    for entry in inside:
        path = Path(entry.path)
        if files := _model_directory(path):
            yield prefix + entry.name, path, files
        if depth > 1 and not os.path.isfile(path / "pack.json"):
            yield from _walk(path, f"{prefix}{entry.name}/", depth - 1)
    parts: defaultdict[str, list[Path]] = defaultdict(list)
    for entry in there:
        if entry.name.endswith(_SUFFIX) and entry.is_file() and not is_companion(entry.name):
            parts[SPLIT.sub("/", entry.name)].append(Path(entry.path))  # no other file's name has a slash
    for whole, files in parts.items():
        yield prefix + whole.removesuffix("/").removesuffix(_SUFFIX), files[0], files


def _model_directory(path: Path) -> list[Path]:
    """Return the files with the weights of a pack or a Hugging Face directory; none if it is neither."""
    if os.path.isfile(path / "pack.json"):
        return [path / "weights.bin"]
    return sorted(path.glob("*.safetensors")) if os.path.isfile(path / "config.json") else []


def _files(name: str, path: Path, files: Sequence[Path]) -> ModelFiles | None:
    """Return what is there, or None if it was removed meanwhile."""
    try:
        found = [os.stat(f) for f in files]
    except OSError:
        return None
    state = tuple((s.st_ino, s.st_size, s.st_mtime_ns) for s in found)
    return ModelFiles(name, path, sum(s.st_size for s in found), state)
