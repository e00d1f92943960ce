"""Open what a user named: a pack as it is, a GGUF in place, and others by way of the cache of packs."""

from __future__ import annotations

import os
from pathlib import Path

from thermocline.convert.from_gguf import is_gguf
from thermocline.convert.pack_cache import resolve
from thermocline.errors import BadFile
from thermocline.opening.gguf_model import open_gguf
from thermocline.pack.pack import Pack
from thermocline.pack.stored_model import Progress, StoredModel


def open_model(
    model: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str],
    weight_format: str | None,
    progress: Progress | None = None,
    *,
    text: bool = False,
    activation: str | None = None,
) -> StoredModel:
    """Open a model. The parameters are those of `resolve`, which packs what does not run in place.

    A GGUF runs in place unless a format is asked for, its neurons can be skipped, or its blocks have no
    format here. Raises as `resolve` does.
    """
    path, why = Path(model), None
    if weight_format is None and is_gguf(path):
        found = open_gguf(path, activation)
        if not isinstance(found, str):
            if text and not found.has_tokenizer:
                raise BadFile(
                    f"{path}: has no tokenizer, so text cannot become tokens; `thermocline bench` measures "
                    "such a model without text"
                )
            return found
        why = found
    packed = resolve(path, cache_dir, weight_format, progress, text=text, activation=activation, why=why)
    return Pack.open(packed)
