"""Choices and paths that a session takes, with the words for them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from thermocline.model import formats


def default_cache_dir(environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """Where this system keeps caches: XDG_CACHE_HOME wins everywhere."""
    if base := environ.get("XDG_CACHE_HOME"):
        return Path(base) / "thermocline"
    if platform == "win32":
        return (
            Path(environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "thermocline" / "cache"
        )
    if platform == "darwin":
        return Path.home() / "Library" / "Caches" / "thermocline"
    return Path.home() / ".cache" / "thermocline"


FORMATS = tuple(formats.FORMATS)
SPARSITIES = ("exact", "predict", "off")
GENERATION_CONFIGS = ("auto", "off")
ACTIVATIONS = ("drelu", "relu")
SWITCHES = ("bundle", "cache", "pipeline")  # of the disk tier
