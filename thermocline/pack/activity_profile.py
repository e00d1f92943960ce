"""A pack's profile: how often its neurons are active, and samples to train predictors on.

They are kept in two sidecars, `profile.safetensors` and `samples.safetensors` (docs/internals/pack.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import BadFile
from thermocline.files.bounded import Json, quoted
from thermocline.model.spec import ModelSpec
from thermocline.pack import sidecar
from thermocline.pack.pack import Pack

F16 = NDArray[np.float16]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

PROFILE, SAMPLES = "profile.safetensors", "samples.safetensors"
BUCKETS = (1, 2, 4, 8, 16, 32)  # tokens that are computed together
HOT_SHARE = 0.8  # papers report the share of neurons that makes this share of the activations
AGAIN = "thermocline profile PACK --corpus FILES"


# ---- the profile


@dataclass(frozen=True)
class Profile:
    """In how many windows of consecutive tokens each neuron was active, for several sizes of window."""

    buckets: tuple[int, ...]  # tokens of a window
    windows: tuple[int, ...]  # the number of windows counted, by bucket
    tokens: int
    corpus: str  # sha256 of the token ids and where they were cut
    # By layer: [buckets, n_experts, ffn_dim], in the pack's order of neurons; no neurons without an FFN.
    counts: tuple[I64, ...]

    def hotness(self, layer: int, batch: int = 1) -> F64:
        """Return the probability that a batch of consecutive tokens needs each neuron [n_experts * ffn_dim].

        Between buckets it is interpolated by log(batch). Beyond the last bucket, that bucket's value is used.
        """
        known = np.log2(self.buckets)
        p = self.counts[layer].reshape(len(self.buckets), -1) / np.array(self.windows)[:, None]
        at = min(max(0.0, float(np.log2(batch))), float(known[-1]))
        i = min(int(np.searchsorted(known, at, "right")) - 1, len(known) - 2)
        part = (at - known[i]) / (known[i + 1] - known[i])
        found: F64 = (1 - part) * p[i] + part * p[i + 1] if part else p[i]
        return found

    def reordered(self, places: Sequence[I64]) -> Profile:
        """Return the profile of a reordered pack, whose neuron i was at position `places[layer][i]`."""
        counts = (
            c.reshape(len(c), -1)[:, p].reshape(c.shape) for c, p in zip(self.counts, places, strict=True)
        )
        return Profile(self.buckets, self.windows, self.tokens, self.corpus, tuple(counts))


def write_profile(directory: Path, profile: Profile) -> None:
    facts = {
        "buckets": list(profile.buckets),
        "windows": list(profile.windows),
        "tokens": profile.tokens,
        "corpus": profile.corpus,
    }
    held = {f"layers.{i}.counts": c for i, c in enumerate(profile.counts) if c.size}
    shapes: Any = {name: ("i8", c.shape) for name, c in held.items()}
    sidecar.write(directory / PROFILE, "profile", sidecar.stamp(directory), facts, shapes, held.values())


def open_profile(pack: Pack) -> Profile | None:
    """Open a pack's profile, or return None if it has none. BadFile: damaged, or of another pack."""
    found = sidecar.Sidecar.open(pack.path / PROFILE, "profile", sidecar.stamp(pack.path), AGAIN)
    if found is None:
        return None
    try:
        return _read_profile(found, pack.spec)
    finally:
        found.close()


def _read_profile(found: sidecar.Sidecar, spec: ModelSpec) -> Profile:
    f = found.facts
    buckets, windows = (_sizes(found, key) for key in ("buckets", "windows"))
    tokens, corpus = f.get("tokens"), f.get("corpus")
    if len(windows) != len(buckets) or buckets[0] != 1 or list(buckets) != sorted(set(buckets)):
        raise BadFile(f"{found.path}: buckets {quoted(buckets)} and windows {quoted(windows)} do not agree")
    if type(tokens) is not int or not isinstance(corpus, str):
        raise BadFile(f"{found.path}: tokens or corpus is missing; run `{AGAIN}` again")
    shape = (len(buckets), spec.n_experts, spec.ffn_dim)
    held = {i: found.read(f"layers.{i}.counts", "<i8", shape) for i in spec.ffn_layers}
    nothing = np.zeros((len(buckets), spec.n_experts, 0), np.int64)
    counts = tuple(held.get(i, nothing) for i in range(spec.n_layers))
    for i, c in enumerate(counts):
        if (c < 0).any() or (c > np.array(windows)[:, None, None]).any():
            raise BadFile(f"{found.path}: layers.{i}.counts exceeds the number of windows, or is negative")
    return Profile(buckets, windows, tokens, corpus, counts)


def _sizes(found: sidecar.Sidecar, key: str) -> tuple[int, ...]:
    value = found.facts.get(key)
    if not isinstance(value, list) or len(value) < 2 or any(type(v) is not int or v < 1 for v in value):
        raise BadFile(f"{found.path}: {key} is {quoted(value)}, not a list of positive numbers")
    return tuple(value)


# ---- samples


Rows = tuple[F16, I64, I32, F16]  # input [n, dim], indptr [n + 1], index [nnz], mass [nnz]


@dataclass(frozen=True)
class Samples:
    """Sampled tokens: the input of each FFN and the neurons it activated. They are read a layer at a time."""

    n: int
    spec: ModelSpec
    found: sidecar.Sidecar

    def layer(self, i: int) -> Rows:
        """Return (input [n, dim], indptr [n + 1], index [nnz], mass [nnz]) of layer i, as a CSR matrix.

        The active neurons of sample r are index[indptr[r]:indptr[r + 1]], ascending. `mass` has |h| times the
        norm of the down row for each of them. Raises BadFile or IOFailure.
        """
        a, f = f"layers.{i}", self.found
        indptr = f.read(f"{a}.indptr", "<i8", (self.n + 1,))
        nnz = int(indptr[-1])
        index, mass = f.read(f"{a}.index", "<i4", (nnz,)), f.read(f"{a}.mass", "<f2", (nnz,))
        rises = np.diff(index) > 0
        rises[indptr[1:-1][(indptr[1:-1] > 0) & (indptr[1:-1] < nnz)] - 1] = True  # from row to row
        neurons = self.spec.n_experts * self.spec.ffn_dim
        inside = nnz == 0 or (index.min() >= 0 and index.max() < neurons)
        if indptr[0] != 0 or (np.diff(indptr) < 0).any() or not (inside and rises.all()):
            raise BadFile(f"{f.path}: {a}.index is not rows of ascending neurons; run `{AGAIN}` again")
        return f.read(f"{a}.input", "<f2", (self.n, self.spec.dim)), indptr, index, mass

    def close(self) -> None:
        self.found.close()

    def __enter__(self) -> Samples:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_samples(
    directory: Path, spec: ModelSpec, n: int, active: Sequence[int], layers: Iterator[Rows]
) -> None:
    """Write the samples of `n` tokens, of each layer with an FFN.

    `active` is the length of each one's `index`, known beforehand.
    """
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for i, nnz in zip(spec.ffn_layers, active, strict=True):
        a = f"layers.{i}"
        shapes |= {f"{a}.input": ("f2", (n, spec.dim)), f"{a}.indptr": ("i8", (n + 1,))}
        shapes |= {f"{a}.index": ("i4", (nnz,)), f"{a}.mass": ("f2", (nnz,))}
    arrays = (array for rows in layers for array in rows)
    sidecar.write(directory / SAMPLES, "samples", sidecar.stamp(directory), {"samples": n}, shapes, arrays)


def open_samples(pack: Pack) -> Samples | None:
    """Open a pack's samples, or return None if it has none. BadFile: damaged, or of another pack."""
    found = sidecar.Sidecar.open(pack.path / SAMPLES, "samples", sidecar.stamp(pack.path), AGAIN)
    if found is None:
        return None
    n = found.facts.get("samples")
    if type(n) is not int or n < 1:
        found.close()
        raise BadFile(f"{found.path}: samples is {quoted(n)}, not a positive number")
    return Samples(n, pack.spec, found)


# ---- statistics of a profile


def concentration(counts: I64) -> tuple[F64, F64]:
    """Return the cumulative curve: (share of neurons, hottest first; share of activations they make)."""
    ordered = np.sort(counts.reshape(-1))[::-1].astype(np.float64)
    share = np.concatenate([[0.0], np.cumsum(ordered)]) / max(1.0, float(ordered.sum()))
    return np.linspace(0.0, 1.0, len(share)), share


def hot_share(counts: I64) -> float:
    """Return the share of neurons that makes `HOT_SHARE` of the activations."""
    neurons, activations = concentration(counts)
    return float(neurons[np.searchsorted(activations, HOT_SHARE - 1e-12)]) if counts.any() else 0.0


def summary(p: Profile) -> Json:
    """Summarise a profile for a person or a program: how many neurons are active, and how concentrated."""
    held = {i: c for i, c in enumerate(p.counts) if c.size}
    one = {i: c[0] for i, c in held.items()}
    active = {i: float(c.mean()) / p.windows[0] for i, c in one.items()}
    needed = {
        str(b): float(np.mean([c[i].mean() for c in held.values()])) / p.windows[i]
        for i, b in enumerate(p.buckets)
    }
    return {
        "tokens": p.tokens,
        "corpus": p.corpus,
        "active_fraction": float(np.mean([*active.values()])),
        "active_per_layer": [active.get(i) for i in range(len(p.counts))],
        "needed_by_batch": needed,  # by number of tokens: the share of neurons that some token needs
        "hot_share": hot_share(np.stack([*one.values()])),
        "hot_share_per_layer": [hot_share(one[i]) if i in one else None for i in range(len(p.counts))],
        "never_active": int(sum((c == 0).sum() for c in one.values())),
        "neurons": sum(c.size for c in one.values()),
        "hottest_layer": max(active, key=active.__getitem__),
        "coldest_layer": min(active, key=active.__getitem__),
    }
