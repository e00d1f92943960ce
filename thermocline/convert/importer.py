"""A model in someone else's format -> a pack: Hugging Face directories, and the cache of packs made of them.

Must not know kernels or the engine.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thermocline.convert import ternary
from thermocline.convert.from_gguf import gguf_hash, gguf_shards, is_gguf, pack_gguf
from thermocline.convert.gguf_rows import Cost
from thermocline.convert.rows import MappedSource, with_own_head
from thermocline.convert.source_key import READING, Shard, add_content, identity
from thermocline.convert.tokenizers import ADDED_TOKENS, SENTENCEPIECE, from_directory, has_tokenizer
from thermocline.errors import BadFile, IOFailure
from thermocline.files.bounded import foreign, open_regular, read_at, read_small
from thermocline.files.gguf import GGUF
from thermocline.files.safetensors import Checkpoint, SafeTensors, no_weights
from thermocline.hub import names
from thermocline.model import formats, quant
from thermocline.model.families import check_activation, read_config
from thermocline.model.spec import ModelSpec
from thermocline.model.tensor_map import Mapping
from thermocline.model.tensors import optional_among
from thermocline.pack.manifest import COPIED, KIND, VERSION
from thermocline.pack.pack import MAX_COPIED_BYTES, Pack, Progress
from thermocline.pack.writer import check_target, write_pack
from thermocline.text.tokenizer import FILE as TOKENIZER

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


def pack(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    weight_format: str | None = None,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    activation: str | None = None,
) -> Cost | None:
    """Pack a Hugging Face directory or a GGUF file; of that, what it cost.

    `weight_format` None: a GGUF's own, tensor by tensor; else `formats.DEFAULT`. `activation`: of
    `options.ACTIVATIONS`, what the source leaves open. Raises BadFile, IOFailure, Unsupported,
    UsageError; see `write_pack`.
    """
    src = Path(src)
    if weight_format is not None:
        quant.row_bytes(weight_format, 0)
    check_target(Path(os.path.realpath(dst)), overwrite)
    if is_gguf(src):
        return pack_gguf(
            src, Path(dst), weight_format, overwrite=overwrite, progress=progress, activation=activation
        )
    _require_model_directory(src)
    read = read_config(src, activation)
    _pack_directory(src, Path(dst), weight_format or formats.DEFAULT, read, overwrite, progress)
    return None


def _pack_directory(
    src: Path,
    dst: Path,
    weight_format: str,
    read: tuple[ModelSpec, Mapping],
    overwrite: bool,
    progress: Progress | None,
) -> None:
    with Checkpoint(src) as checkpoint:
        spec, mapping = with_own_head(*read, checkpoint.tensors, checkpoint.where)
        source = MappedSource(str(src), *ternary.seen(checkpoint, mapping), mapping)
        write_pack(
            dst,
            spec,
            weight_format,
            source,
            optional=optional_among(mapping.tensors, spec),
            files=_copied(src),
            origin=("huggingface", _label(src), _hash(src, checkpoint.shards)),
            overwrite=overwrite,
            progress=progress,
        )


def _copied(src: Path) -> dict[str, bytes]:
    """The files a pack keeps; a tokenizer.json is made where there is only SentencePiece's model."""
    files = {n: read_small(_own(src, n), MAX_COPIED_BYTES) for n in COPIED if os.path.exists(src / n)}
    if TOKENIZER not in files and os.path.exists(src / SENTENCEPIECE):
        files[TOKENIZER] = from_directory(src)
    return files


def _own(src: Path, name: str) -> Path:
    """A model's file. BadFile: a link leads out of its directory, and not into Hugging Face's cache."""
    real = Path(os.path.realpath(src / name))
    blob = real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")
    if not blob and not real.is_relative_to(os.path.realpath(src)):
        raise BadFile(f"{src / name}: is a link out of the model's directory; put the file itself there")
    return src / name


def _label(src: Path) -> str:
    return names.label(src) or Path(os.path.realpath(src)).name


def _require_model_directory(src: Path) -> None:
    if not os.path.isdir(src):
        raise _not_a_model(src)
    if not os.path.exists(src / "config.json"):
        has_weights = glob.glob("*.safetensors", root_dir=src)
        raise BadFile(f"{src}: config.json is missing") if has_weights else no_weights(src)


def _not_a_model(path: Path) -> Exception:
    """The error for something that is not a directory."""
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


# --- the cache ----------------------------------------------------------------------------------------------


def source_hash(src: str | os.PathLike[str]) -> str:
    """A key for the content of a Hugging Face directory or GGUF: 32 hex digits, the same for each copy.

    Covers the small files and the data: all of it below 256 MiB, else headers and samples (`add_content`).
    """
    return _keys(Path(src))[0]


def _keys(path: Path) -> tuple[str, str | None]:
    """(the key of its content, that of the files themselves where the content is only sampled)."""
    if is_gguf(path):
        with GGUF(path) as gguf:
            return gguf_hash(gguf), identity(gguf_shards(gguf))
    _require_model_directory(path)
    with Checkpoint(path) as checkpoint:
        return _hash(path, checkpoint.shards), identity(_sorted_shards(checkpoint.shards))


def _hash(src: Path, shards: Iterable[SafeTensors]) -> str:
    h = hashlib.blake2b(f"{KIND} {VERSION} {READING}".encode(), digest_size=16)
    for name in ("config.json", *COPIED, SENTENCEPIECE, ADDED_TOKENS):
        if os.path.exists(src / name):
            data = read_small(src / name, MAX_COPIED_BYTES)
            h.update(f"{len(name)} {len(data)} {name}".encode())
            h.update(data)
    add_content(h, _sorted_shards(shards))
    return h.hexdigest()


def _sorted_shards(shards: Iterable[SafeTensors]) -> list[Shard]:
    files = sorted(shards, key=lambda s: s.path.name)
    return [Shard(f, [(e.start, e.end) for e in f.tensors.values()]) for f in files]


def resolve(
    model: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str],
    weight_format: str | None,
    progress: Progress | None = None,
    *,
    text: bool = False,
    told: Callable[[str], None] | None = None,
    activation: str | None = None,
) -> Path:
    """The pack directory for what a user named: a pack is itself; a Hugging Face directory or GGUF is packed
    once, into cache_dir/NAME-FORMAT-HASH, and found there again. Else an error says what it is.

    `text`: refuse, before packing, a model without a tokenizer. `activation`: as in `pack`; of a pack it is
    held against what that says. `told` is called with what packing cost, and
    where a large model's content looks like that of another pack but its files are not the ones packed.
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
    content, files = _keys(path)
    like = f"{re.sub(r'[^A-Za-z0-9._-]+', '_', _label(path))}-{format}-{content[:16]}"
    packed = Path(cache_dir) / (like if files is None else f"{like}-{files}")
    found = _opened(packed)
    if text and (found is None or TOKENIZER not in found.files) and not _has_tokenizer(path):
        lacking = f"{path}: has no tokenizer" if is_gguf(path) else f"{path / TOKENIZER}: not found"
        raise BadFile(
            f"{lacking}, so text cannot become tokens; `thermocline bench` measures such a model without text"
        )
    if found is None:
        if told is not None and files is not None:
            _say_if_in_doubt(path, packed, like, told)
        cost = pack(path, packed, weight_format, overwrite=True, progress=progress, activation=activation)
        if cost is not None and told is not None:
            told(f"{path}: {cost}")
    return packed


def _say_if_in_doubt(path: Path, packed: Path, like: str, told: Callable[[str], None]) -> None:
    others = sorted(p.name for p in packed.parent.glob(f"{glob.escape(like)}-*") if p != packed)
    if others:
        told(
            f"{path}: looks like what {others[0]} was made of, but was written or copied since, and may "
            f"differ: it is packed again; `thermocline rm {others[0]}` removes the other pack"
        )


def _opened(path: Path) -> Pack | None:
    """None where there is no pack, or a damaged one: it is made (again)."""
    try:
        return Pack.open(path)
    except (BadFile, IOFailure):
        return None


def _has_tokenizer(path: Path) -> bool:
    if is_gguf(path):
        with GGUF(path) as gguf:
            return has_tokenizer(gguf.metadata)
    return any(os.path.exists(path / name) for name in (TOKENIZER, SENTENCEPIECE))
