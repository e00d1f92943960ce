"""Pack a Hugging Face directory: its checkpoint, the files beside it, and predictors."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from thermocline.convert.checkpoint.predictors import PredictorFiles, in_checkpoint
from thermocline.convert.checkpoint.source import CheckpointSource
from thermocline.convert.hf_directory import content_key, copied_files, label
from thermocline.convert.rows import with_own_head
from thermocline.errors import UsageError
from thermocline.files.safetensors import Checkpoint
from thermocline.model import formats
from thermocline.model.families import Read
from thermocline.model.tensors import optional_among
from thermocline.pack.pack import Progress
from thermocline.pack.writer import PackExtras, write_pack


def pack_directory(
    src: Path,
    dst: Path,
    weight_format: str | None,
    read: Read,
    predictors: str | os.PathLike[str] | None = None,
    *,
    overwrite: bool,
    progress: Progress | None,
) -> None:
    """Pack the model that `read` describes. `predictors`: a directory of their files."""
    with ExitStack() as files:
        beside = None
        if predictors is not None:
            beside = files.enter_context(PredictorFiles(Path(predictors), read[0]))
        checkpoint = files.enter_context(Checkpoint(src))
        spec, tensor_map = with_own_head(*read, checkpoint.tensors, checkpoint.where)
        predictor = in_checkpoint(checkpoint, spec, tensor_map)
        if beside is not None:
            if predictor is not None:
                raise UsageError(f"{src}: has predictors of its own; leave out --predictors")
            predictor = beside.add_to(tensor_map, spec)
        source = CheckpointSource(checkpoint, tensor_map, beside)
        write_pack(
            dst,
            spec,
            weight_format or formats.DEFAULT,
            source,
            PackExtras(
                formats={} if weight_format else source.formats(),
                predictor=predictor,
                optional=optional_among(tensor_map.tensors, spec),
                files=copied_files(src),
                origin=("huggingface", label(src), content_key(src, checkpoint.shards)),
            ),
            overwrite=overwrite,
            progress=progress,
        )
