"""The cache of packs made from other formats, found again by the content of the files they were made from."""

from __future__ import annotations

import glob
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from thermocline.convert.from_gguf import gguf_has_tokenizer, gguf_hash, gguf_shards, is_gguf
from thermocline.convert.hf_directory import (
    content_key,
    directory_has_tokenizer,
    label,
    require_model_directory,
    sorted_shards,
)
from thermocline.convert.importer import pack
from thermocline.errors import BadFile, IOFailure
from thermocline.files.gguf import GGUF
from thermocline.files.safetensors import Checkpoint
from thermocline.files.source_key import identity, states
from thermocline.model import formats, quant
from thermocline.model.families import check_activation
from thermocline.pack.pack import Pack, Progress
from thermocline.text.tokenizer import FILE as TOKENIZER

log = logging.getLogger(__name__)


def source_hash(src: str | os.PathLike[str]) -> str:
    """Return a key for the content of a Hugging Face directory or GGUF: 32 hex digits, equal for copies.

    The key covers the small files and the data: all data below 256 MiB, else headers and samples
    (`add_content`). Raises BadFile, IOFailure, Unsupported.
    """
    return _keys(Path(src)).content


@dataclass(frozen=True)
class SourceKeys:
    """A model's files at one time. `files`: their identity, or None if the content is hashed in full."""

    content: str
    files: str | None
    states: str


def _keys(path: Path) -> SourceKeys:
    if is_gguf(path):
        with GGUF(path) as gguf:
            shards = gguf_shards(gguf)
            return SourceKeys(gguf_hash(gguf), identity(shards), states(shards))
    require_model_directory(path)
    with Checkpoint(path) as checkpoint:
        shards = sorted_shards(checkpoint.shards)
        return SourceKeys(content_key(path, checkpoint.shards), identity(shards), states(shards))


def _states(path: Path) -> str:
    if is_gguf(path):
        with GGUF(path) as gguf:
            return states(gguf_shards(gguf))
    with Checkpoint(path) as checkpoint:
        return states(sorted_shards(checkpoint.shards))


def resolve(
    model: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str],
    weight_format: str | None,
    progress: Progress | None = None,
    *,
    text: bool = False,
    activation: str | None = None,
    why: str | None = None,
) -> Path:
    """Return the directory of the pack for a model that a user named.

    A pack is used as it is. A Hugging Face directory or a GGUF is packed once into
    cache_dir/NAME-FORMAT-HASH and found there later. `text` refuses a model without a tokenizer before it is
    packed. `activation` is that of `pack`; a pack must have the same. The log gets a line with `why` it is
    packed, one about what packing changed, and a warning if a large model looks like that of another pack but
    its files are not the same.
    Raises BadFile, IOFailure, Unsupported, UsageError.
    """
    path = Path(model)
    if os.path.exists(path / "pack.json"):
        if activation is not None:
            check_activation(Pack.open(path).spec, activation, str(path))
        return path
    if weight_format is not None:
        quant.row_bytes(weight_format, 0)
    format = weight_format or ("own" if is_gguf(path) else formats.DEFAULT)
    format = format if activation is None else f"{format}-{activation}"
    keys = _keys(path)
    like = f"{re.sub(r'[^A-Za-z0-9._-]+', '_', label(path))}-{format}-{keys.content[:16]}"
    packed = Path(cache_dir) / (like if keys.files is None else f"{like}-{keys.files}")
    found = _opened(packed)
    if text and (found is None or TOKENIZER not in found.files) and not _has_tokenizer(path):
        missing = f"{path}: has no tokenizer" if is_gguf(path) else f"{path / TOKENIZER}: not found"
        raise BadFile(
            f"{missing}, so text cannot become tokens; `thermocline bench` measures such a model without text"
        )
    if found is None:
        if keys.files is not None:
            _warn_of_others(path, packed, like)
        if why is not None:
            log.info(f"{path}: is packed first, because {why}")
        cost = pack(path, packed, weight_format, overwrite=True, progress=progress, activation=activation)
        if _states(path) != keys.states:  # a pack under the name of files that it was not made of
            shutil.rmtree(packed, ignore_errors=True)
            raise BadFile(f"{path}: was changed or replaced while it was packed; run the command again")
        if cost is not None:
            log.info(f"{path}: {cost}")
    return packed


def _warn_of_others(path: Path, packed: Path, like: str) -> None:
    others = sorted(p.name for p in packed.parent.glob(f"{glob.escape(like)}-*") if p != packed)
    if others:
        log.warning(
            f"{path}: looks like what {others[0]} was made of, but was written or copied since, and may "
            f"differ: it is packed again; `thermocline rm {others[0]}` removes the other pack"
        )


def _opened(path: Path) -> Pack | None:
    """Return the pack at `path`, or None if there is none or it is damaged: it is then made again."""
    try:
        return Pack.open(path)
    except (BadFile, IOFailure):
        return None


def _has_tokenizer(path: Path) -> bool:
    return gguf_has_tokenizer(path) if is_gguf(path) else directory_has_tokenizer(path)
