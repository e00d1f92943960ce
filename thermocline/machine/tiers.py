"""The hardware file: sizes and speeds of a machine's tiers. `doctor -o` writes it, and `plan` reads it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from thermocline.errors import BadFile, UsageError
from thermocline.files.bounded import Json, parse_json, quoted, read_small

KIND, VERSION = "thermocline-hardware", 1
MAX_BYTES = 1 << 20
BUNDLED = Path(__file__).parents[1] / "bundled" / "hardware"
MAX_NUMBER = 1e15
# A kernel cannot read faster than memory, but two measurements of the same speed may differ by this factor.
NOISE = 1.5
ARRANGED_GBS = 2.9  # of a thread, where it was not measured: two cores of Zen 4, from 256 KiB at a time


@dataclass(frozen=True)
class Kernel:
    """The speed of this engine's multiplications with one weight format."""

    gbs: float  # bytes of weights, one token at a time
    gflops: float  # many tokens at once; 2 operations a weight and token


@dataclass(frozen=True)
class CpuTier:
    """The CPU, its memory and its kernels."""

    ram_bytes: int
    read_gbs: float  # memory read speed with `threads`: the upper bound of every kernel
    threads: int
    cache_bytes: int  # last-level
    kernels: dict[str, Kernel] = field(metadata={"of": Kernel})  # by weight format


@dataclass(frozen=True)
class GpuTier:
    """A GPU, its memory and its link to RAM."""

    vram_bytes: int
    read_gbs: float
    share: float  # the share of read_gbs that kernels reach
    gflops: float
    launch_us: float  # to launch one kernel
    sync_us: float  # for the CPU and the GPU to wait for each other once, there and back
    link_gbs: float  # between RAM and VRAM


@dataclass(frozen=True)
class DiskTier:
    """The disk that holds the pack."""

    read_gbs: float  # large reads
    reads_per_s: float  # of 4 KiB, many in flight
    pieces_gbs: float | None = None  # of 256 KiB at random, many in flight; older files have none
    arrange_gbs: float | None = None  # of each thread that checks and arranges rows beside it; the same

    @property
    def pieced_gbs(self) -> float:
        """Return the speed of reading experts and rows, in pieces."""
        return self.read_gbs if self.pieces_gbs is None else self.pieces_gbs

    @property
    def arranged_gbs(self) -> float:
        """Return the speed of each thread that checks and arranges what has been read."""
        return ARRANGED_GBS if self.arrange_gbs is None else self.arrange_gbs


@dataclass(frozen=True)
class Tiers:
    """The tiers of one machine, with the speeds they have if nothing else runs."""

    name: str
    source: str  # where the figures come from
    cpu: CpuTier
    gpu: GpuTier | None
    disk: DiskTier | None

    def kernel(self, weight_format: str) -> Kernel:
        """Return the speeds of a weight format: where the file has none, the least of the formats it has."""
        known = self.cpu.kernels
        if weight_format in known:
            return known[weight_format]
        return Kernel(min(k.gbs for k in known.values()), min(k.gflops for k in known.values()))

    def assumed(self, formats: Iterable[str]) -> str | None:
        """Return a sentence on the formats of which the file has no speeds; None if it has all of them."""
        without = [f for f in formats if f not in self.cpu.kernels]
        if not without:
            return None
        return (
            f"the hardware file has no speeds of {', '.join(without)}: taken as its slowest format's "
            "(`thermocline doctor -o FILE` measures all on this machine)"
        )


def names() -> list[str]:
    """Return the machines that `--hardware` knows by name."""
    return sorted(path.stem for path in BUNDLED.glob("*.json"))


def read_tiers(given: str) -> Tiers:
    """Read a hardware file, or one of `names()`. Raises BadFile (naming the key), IOFailure or UsageError."""
    path = Path(given)
    if given in names():
        path = BUNDLED / f"{given}.json"
    elif not path.exists():
        raise UsageError(f"{given}: neither a hardware file nor a known machine; known: {', '.join(names())}")
    value = parse_json(read_small(path, MAX_BYTES), str(path))
    return parse_tiers(value.get("tiers", value), str(path))  # `doctor --json` has them under one key


def parse_tiers(value: Any, name: str) -> Tiers:
    """Parse a hardware file's JSON. `name` is the file, for messages. Raises BadFile, naming the key."""
    if type(value) is not dict or value.get("kind") != KIND:
        raise BadFile(f"{name}: kind is not {KIND!r}: not a file that `thermocline doctor -o FILE` wrote")
    value = dict(value)
    if value.pop("version", None) != VERSION:
        raise BadFile(f"{name}: version is not {VERSION}; write it again with `thermocline doctor -o FILE`")
    del value["kind"]
    tiers: Tiers = _object(Tiers, value, name, "")
    for format, kernel in tiers.cpu.kernels.items():
        if kernel.gbs > NOISE * tiers.cpu.read_gbs:
            raise BadFile(
                f"{name}: cpu.kernels.{format}.gbs is {kernel.gbs:g}, and memory is read at "
                f"{tiers.cpu.read_gbs:g} GB/s (cpu.read_gbs): no kernel is faster than memory"
            )
    if tiers.gpu is not None and tiers.gpu.share > 1:
        raise BadFile(f"{name}: gpu.share is {tiers.gpu.share:g}; it is a share of gpu.read_gbs, at most 1")
    return tiers


def _object(cls: type[Any], value: Any, name: str, at: str) -> Any:
    """Make a dataclass from JSON that has its keys and no others; those with defaults may be missing."""
    if type(value) is not dict:
        raise BadFile(f"{name}: {at or 'the file'} is {quoted(value)}, not an object")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in (*fields, *value):
        where = f"{at}.{key}" if at else key
        if key not in value and fields[key].default is dataclasses.MISSING:
            raise BadFile(f"{name}: {where} is missing")
        if key not in fields:
            raise BadFile(f"{name}: unknown key {quoted(where)}")
    hints = get_type_hints(cls)
    return cls(
        **{
            key: _value(hints[key], f, value[key], name, f"{at}.{key}" if at else key)
            for key, f in fields.items()
            if key in value
        }
    )


def _value(hint: Any, f: dataclasses.Field[Any], value: Any, name: str, at: str) -> Any:
    if "of" in f.metadata:
        if type(value) is not dict or not value:
            raise BadFile(f"{name}: {at} is {quoted(value)}, not an object with a key for each weight format")
        return {key: _object(f.metadata["of"], v, name, f"{at}.{key}") for key, v in value.items()}
    if hint is str:
        if type(value) is not str:
            raise BadFile(f"{name}: {at} is {quoted(value)}, not text")
        return value
    if hint in (int, float):
        return _number(hint, value, name, at)
    if value is None and type(None) in hint.__args__:
        return None
    cls = next((t for t in getattr(hint, "__args__", ()) if t is not type(None)), hint)
    if cls is float:
        return _number(cls, value, name, at)
    return _object(cls, value, name, at)


def _number(kind: type[Any], value: Any, name: str, at: str) -> Any:
    least = "at least 0" if at.endswith("_us") else "above 0"
    number = type(value) in (int, float) if kind is float else type(value) is int
    low = number and (value >= 0 if at.endswith("_us") else value > 0)
    if not low or not math.isfinite(value) or value > MAX_NUMBER:
        what = "a number" if kind is float else "a whole number"
        raise BadFile(f"{name}: {at} is {quoted(value)}; it must be {what} {least}")
    return kind(value)


def tiers_json(tiers: Tiers) -> Json:
    about: Json = {"kind": KIND, "version": VERSION, **dataclasses.asdict(tiers)}
    if about["disk"] is not None:  # what was not measured has no key, as in older files
        about["disk"] = {key: value for key, value in about["disk"].items() if value is not None}
    return about


def render(tiers: Tiers) -> str:
    """Return the text of a hardware file, indented for a person to read and edit."""
    return json.dumps(tiers_json(tiers), indent=1) + "\n"
