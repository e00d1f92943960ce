"""Files of a Hugging Face model directory: which a pack keeps, which hold the model, and their key."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from thermocline.convert.tokenizers import ADDED_TOKENS, SENTENCEPIECE, from_directory
from thermocline.errors import BadFile, IOFailure
from thermocline.files.bounded import foreign, open_regular, read_at, read_small
from thermocline.files.safetensors import SafeTensors, no_weights
from thermocline.files.source_key import READING, Shard, add_content
from thermocline.hub import names
from thermocline.model.embedding.pooling import MODULES, PROMPTS
from thermocline.pack.manifest import COPIED, KIND, VERSION
from thermocline.pack.pack import MAX_COPIED_BYTES
from thermocline.text.tokenizer import FILE as TOKENIZER


def copied_files(src: Path) -> dict[str, bytes]:
    """Return the files that a pack keeps; tokenizer.json is made from a SentencePiece model if need be."""
    files = {n: read_small(_own(src, n), MAX_COPIED_BYTES) for n in COPIED if os.path.exists(src / n)}
    if TOKENIZER not in files and os.path.exists(src / SENTENCEPIECE):
        files[TOKENIZER] = from_directory(src)
    return files


def directory_has_tokenizer(src: Path) -> bool:
    """Return whether a directory has a tokenizer.json, or a SentencePiece model to make one from."""
    return any(os.path.exists(src / name) for name in (TOKENIZER, SENTENCEPIECE))


def _own(src: Path, name: str) -> Path:
    """Return a model's file. BadFile if a link leaves its directory, unless into Hugging Face's cache."""
    real = Path(os.path.realpath(src / name))
    blob = real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")
    if not blob and not real.is_relative_to(os.path.realpath(src)):
        raise BadFile(f"{src / name}: is a link out of the model's directory; put the file itself there")
    return src / name


def label(src: Path) -> str:
    """Return the name of a model by its path: its Hugging Face name if the path has one."""
    return names.label(src) or Path(os.path.realpath(src)).name


def require_model_directory(src: Path) -> None:
    """Raise BadFile, IOFailure or Unsupported if `src` is not a directory with a model."""
    if not os.path.isdir(src):
        raise _not_a_model(src)
    if not os.path.exists(src / "config.json"):
        has_weights = glob.glob("*.safetensors", root_dir=src)
        raise BadFile(f"{src}: config.json is missing") if has_weights else no_weights(src)


def _not_a_model(path: Path) -> Exception:
    """Return the error for a path that is not a directory."""
    if not os.path.lexists(path):
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
            return IOFailure(
                f"{path}: no such directory; if this is a Hugging Face name, download it first: "
                f"thermocline pull {path}"
            )
        return IOFailure(f"{path}: no such directory")
    try:
        fd, size = open_regular(path)
    except (BadFile, IOFailure) as e:
        return e
    try:
        head = read_at(fd, 0, min(64, size), path).tobytes()
    finally:
        os.close(fd)
    what = foreign(head)
    if what is not None:
        return BadFile(f"{path}: this is {what}")
    return BadFile(f"{path}: is a file; give the directory it is in (with config.json or pack.json)")


def content_key(src: Path, shards: Iterable[SafeTensors]) -> str:
    """Return a key for the content of a directory with these weights: 32 hex digits."""
    h = hashlib.blake2b(f"{KIND} {VERSION} {READING}".encode(), digest_size=16)
    modules = sorted(p.relative_to(src).as_posix() for p in src.glob("*_*/config.json"))
    beside = (name for name in (MODULES, PROMPTS, *modules) if os.path.exists(src / MODULES))
    for name in ("config.json", *COPIED, SENTENCEPIECE, ADDED_TOKENS, *beside):
        if os.path.exists(src / name):
            data = read_small(src / name, MAX_COPIED_BYTES)
            h.update(f"{len(name)} {len(data)} {name}".encode())
            h.update(data)
    add_content(h, sorted_shards(shards))
    return h.hexdigest()


def sorted_shards(shards: Iterable[SafeTensors]) -> list[Shard]:
    """Return the files of weights as shards for their key, by name."""
    files = sorted(shards, key=lambda s: s.path.name)
    return [Shard(f, [(e.start, e.end) for e in f.tensors.values()]) for f in files]
