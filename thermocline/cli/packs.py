"""The model, or the pack, that a name on the command line means."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thermocline.cli.console import ProgressBar
from thermocline.cli.environment import cache_dir
from thermocline.errors import UsageError

if TYPE_CHECKING:
    from thermocline.pack.pack import Pack
    from thermocline.pack.stored_model import StoredModel


MATTERS = 0.02  # of the weights: what is less is not worth a word


def pack_directory(model: str | None) -> Path:
    """Return a pack's directory. Anything else is refused, with how to make a pack of it."""
    from thermocline.convert.pack_cache import resolve
    from thermocline.llm import BUNDLED

    path = BUNDLED if model is None else Path(model)
    if (path / "pack.json").exists():
        return path
    if (path / "config.json").exists() or path.suffix == ".gguf":
        raise UsageError(f"{path}: not a pack; make one with `thermocline pack {path} -o DIR`")
    return resolve(path, "", "f32")  # raises: says what it is instead


def open_pack(model: str | None, activation: str | None = None) -> Pack:
    from thermocline.convert.pack_cache import resolve
    from thermocline.pack.pack import Pack

    return Pack.open(resolve(pack_directory(model), "", None, activation=activation))


def find_model(
    model: str | None,
    progress: ProgressBar,
    *,
    activation: str | None,
    format: str | None = None,
    cache: str | None = None,
) -> StoredModel:
    """Open a model in any form. Where need be, it is fetched, and packed if it does not run in place."""
    from thermocline.hub.download import locate
    from thermocline.llm import BUNDLED
    from thermocline.opening.open_model import open_model

    given = BUNDLED if model is None else locate(model, progress.at)
    packing = partial(progress.at, "packing")
    return open_model(given, cache_dir(cache), format, packing, activation=activation)


def formats_said(about: Mapping[str, Any]) -> str:
    """Return the format of a pack's weights, of `inspect`'s answer; where there are several, so."""
    main, formats = about["weight_format"], about["formats"]
    others = sum(f["parameters"] for name, f in formats.items() if name != main)
    return f"{main} and others" if others > MATTERS * about["parameters"] else str(main)


def find_pack(
    model: str | None,
    progress: ProgressBar,
    *,
    activation: str | None,
    format: str | None = None,
    cache: str | None = None,
) -> Path:
    """Return the pack of a model in any form. Where there is none yet, it is fetched and packed."""
    from thermocline.convert.pack_cache import resolve
    from thermocline.hub.download import locate
    from thermocline.llm import BUNDLED

    given = BUNDLED if model is None else locate(model, progress.at)
    packing = partial(progress.at, "packing")
    return resolve(given, cache_dir(cache), format, packing, activation=activation)
