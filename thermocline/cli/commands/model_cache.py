"""`thermocline pull`, `ls` and `rm`: the models in the caches."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from thermocline.cli.console import ProgressBar, emit, emit_json
from thermocline.cli.environment import cache_dir
from thermocline.cli.shared_options import cache_directory, json_output
from thermocline.cli.table import columns, size
from thermocline.errors import UsageError
from thermocline.options import BY_POSITION, REQUIRED, nonempty, opt, switch

if TYPE_CHECKING:
    from thermocline.hub.cache import Item

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PullOptions:
    """Fetch a model from the hub, or its newest version; print where it is."""

    model: str = opt(
        "", nonempty, "NAME", "Model", "Hub name, org/name[@revision][:file or quant].", flags="-m",
        given=BY_POSITION | REQUIRED
    )  # fmt: skip
    quiet: bool = opt(False, switch, None, "Output", "No progress bars.", flags="-q")


@dataclass(frozen=True)
class LsOptions:
    """List the packs and hub models in the caches."""

    cache_dir: str | None = cache_directory()
    json: bool = json_output()


@dataclass(frozen=True)
class RmOptions:
    """Remove a pack or a hub model, with all its versions, from the caches."""

    name: str = opt(
        "", nonempty, "NAME", "Model", "Model name as `thermocline ls` prints it, or an unambiguous prefix.",
        given=BY_POSITION | REQUIRED
    )  # fmt: skip
    cache_dir: str | None = cache_directory()
    yes: bool = opt(False, switch, None, "Model", "Do not ask.", flags="-y")


def pull(o: PullOptions) -> int:
    from thermocline.hub import download, names

    name = names.parse(o.model)
    if name is None:
        raise UsageError(f"{o.model}: a path, not a hub name such as org/name[@revision][:file or quant]")
    with ProgressBar(quiet=o.quiet) as progress:
        path = download.pull(name, progress.at)
    emit(f"{path}\n")
    return 0


def ls(o: LsOptions) -> int:
    from thermocline.hub import cache

    items = cache.items(cache_dir(o.cache_dir))
    if o.json:
        emit_json({"models": [{**asdict(i), "path": str(i.path)} for i in items]})
    else:
        emit(cache_table(items))
    return 0


def cache_table(items: Sequence[Item]) -> str:
    rows = [("NAME", "FORMAT", "SIZE", "USED", "PATH")]
    for i in items:
        used = time.strftime("%Y-%m-%d", time.localtime(i.last_used)) if i.last_used else "-"
        rows.append((i.name, i.format, size(i.bytes), used, str(i.path)))
    return columns(rows)


def rm(o: RmOptions) -> int:
    from thermocline.hub import cache

    directory = cache_dir(o.cache_dir)
    item = cache.find(o.name, cache.items(directory))
    what = f"{item.path} ({item.kind}, {item.format}, {size(item.bytes)})"
    if not o.yes:
        if sys.stdin is None or not sys.stdin.isatty():
            raise UsageError(f"this would remove {what}; -y confirms it")
        print(f"remove {what}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            log.info("nothing was removed")
            return 0
    cache.remove(item, directory)
    log.info(f"removed {what}")
    return 0
