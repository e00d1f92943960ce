"""Pack models of other formats: Hugging Face directories and GGUF files."""

from __future__ import annotations

import os
from pathlib import Path

from thermocline.convert.checkpoint.directory import pack_directory
from thermocline.convert.from_gguf import is_gguf, pack_gguf
from thermocline.convert.gguf_rows import Cost
from thermocline.convert.hf_directory import require_model_directory
from thermocline.errors import UsageError
from thermocline.files.safetensors import Checkpoint
from thermocline.model import quant
from thermocline.model.families import read_config
from thermocline.pack.pack import Progress
from thermocline.pack.writer import check_target


def pack(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    weight_format: str | None = None,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    activation: str | None = None,
    predictors: str | os.PathLike[str] | None = None,
) -> Cost | None:
    """Pack a Hugging Face directory or a GGUF file. For a GGUF, return what the conversion changed.

    `weight_format` None keeps each tensor's own format for a GGUF; of a directory it keeps blocks of MXFP4,
    and is `formats.DEFAULT` for all else.
    `activation` ("relu" or "drelu") settles what a source may leave open. `predictors` is a directory of
    PowerInfer's `model_N.pt` files for a Hugging Face directory. Raises BadFile, IOFailure,
    Unsupported, UsageError; see `write_pack`.
    """
    src = Path(src)
    if weight_format is not None:
        quant.row_bytes(weight_format, 0)
    check_target(Path(os.path.realpath(dst)), overwrite)
    if is_gguf(src):
        if predictors is not None:
            raise UsageError(f"{src}: predictors in files are for a Hugging Face directory, not for a GGUF")
        return pack_gguf(
            src, Path(dst), weight_format, overwrite=overwrite, progress=progress, activation=activation
        )
    if os.path.isfile(src / "pack.json"):  # false, too, where a name is too long
        raise UsageError(
            f"{src}: is a pack already; `thermocline pack {src} -o NAME.gguf` makes a GGUF of it, and "
            "--format q4_0 or a smaller one a smaller pack"
        )
    require_model_directory(src)
    read = read_config(src, activation)
    pack_directory(src, Path(dst), weight_format, read, predictors, overwrite=overwrite, progress=progress)
    return None


def exact_format(src: Path) -> str | None:
    """Return the format in which a model's weights lose nothing; None: a GGUF's own."""
    if is_gguf(src):
        return None
    require_model_directory(src)
    with Checkpoint(src) as checkpoint:
        dtypes = {entry.dtype for entry in checkpoint.tensors.values()}
    return {"F16": "f16", "BF16": "bf16"}.get(min(dtypes), "f32") if len(dtypes) == 1 else "f32"
