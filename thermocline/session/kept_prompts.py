"""A session's prompt cache: its memory, its directory, and the key under which its files are found there."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import thermocline
from thermocline import _native
from thermocline.engine.decoder import for_context, rope_tables
from thermocline.engine.kv_cache import BLOCK
from thermocline.engine.prompt_cache.cache import PromptCacheSettings
from thermocline.engine.prompt_cache.copies import PromptCopies
from thermocline.engine.prompt_cache.files import VERSION, PromptFiles
from thermocline.engine.prompt_cache.memory import KeptText
from thermocline.ops.interface import CPU

if TYPE_CHECKING:
    from thermocline.files.bounded import Json
    from thermocline.model.modes import CacheTypes
    from thermocline.ops.device_places import DevicePlaces
    from thermocline.pack.stored_model import StoredModel
    from thermocline.session.options import EngineOptions

_ANGLES = 4096  # positions whose angles are compared
ON_CPU: Json = {"layers": CPU}


def prompts(
    model: StoredModel,
    context: int,
    options: EngineOptions,
    by: Json = ON_CPU,
    places: DevicePlaces | None = None,
) -> PromptCacheSettings:
    """Return what is kept of finished requests. `by`: who computes what; `places`: of what lies on a GPU.

    Raises UsageError and IOFailure.
    """
    limits, files = options.kept, None
    if limits.directory is not None:
        own, family = (key(model, context, options.cache, who) for who in (by, None))
        files = PromptFiles.open(Path(limits.directory), own, limits.disk_bytes, family)
    kept = KeptText.within(model.spec, limits, options.cache)
    if places is None:
        return PromptCacheSettings(kept, files)
    copies = PromptCopies(kept.nbytes(model.spec)) if limits.ram_bytes else None
    return PromptCacheSettings(files=files, copies=copies, places=places)


def key(model: StoredModel, context: int, types: CacheTypes, by: Json | None = ON_CPU) -> bytes:
    """Return 32 bytes that differ where anything differs that changes a bit of keys, values or states.

    They are of the model, its types of keys and values, the code that computes them, and who computes what
    (`by`; None: whoever does).

    The spec has the rope settings. A GGUF's content is hashed in part only, so its files' times are here too.
    Sines and cosines are numpy's, whose bits depend on its version and on the CPU: some are compared.
    """
    spec = for_context(model.spec, context)
    files = model.parts if model.stamp[0] == "gguf" else ()
    facts = {
        "format": VERSION,
        "model": model.stamp,
        "files": [state[1:] for _, state in files],  # but the device, whose number may change at a start
        "spec": repr(spec),
        "types": [types.k, types.v],
        "by": by,
        "block": BLOCK,
        "isa": _native.isa(),
        "cpu": sorted(name for name, there in _native.cpu_features().items() if there),
        "core": _digest(Path(_native.__file__).read_bytes()),
        "version": thermocline.__version__,
        "numpy": np.__version__,
        "angles": _digest(
            b"".join(x.tobytes() for x in rope_tables(spec, np.arange(_ANGLES, dtype=np.int32)))
        ),
        "byteorder": sys.byteorder,
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=32).digest()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
