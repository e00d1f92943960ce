"""Damaged GGUF files: refused in a line, or understood as the `gguf` package understands them.

    python -P tests/fuzz_gguf.py 500000

Mutants are made and parsed in memory from a fixed seed, so a failure names the number that repeats it. The
suite runs a few thousand of them.
"""

from __future__ import annotations

import random
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from gguf_files import File, originals

from thermocline.errors import ThermoclineError
from thermocline.files.gguf_header import TYPES, Header, parse_header

MAX_SECONDS, MAX_GROWTH = 1.0, 64 << 20  # for one mutant, for all
EDGES = [0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 32, 33, 64, 255, 256, 65535, 65536]
EDGES += [n + d for n in (2**31, 2**32, 2**42, 2**48, 2**63, 2**64) for d in (-1, 0, 1)]


@dataclass
class Tally:
    understood: int = 0
    agreed: int = 0
    slowest_s: float = 0.0


def mutate(file: File, rng: random.Random) -> bytes:
    """Half: one to three of its numbers replaced or moved. Half: bytes flipped, cut, put in, copied."""
    data = bytearray(file.data)
    if rng.random() < 0.5:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            at, size = rng.choice(file.numbers)
            old = int.from_bytes(data[at : at + size], "little")
            new = (
                rng.choice(EDGES) if rng.random() < 0.5 else old + rng.choice((-32, -8, -1, 1, 2, 8, 32, 256))
            )
            data[at : at + size] = (new % (1 << 8 * size)).to_bytes(size, "little")
        return bytes(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(data)) if data else 0
        match rng.randrange(5):
            case 0 | 1 if data:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                del data[at : at + rng.choice((1, 4, 8, 32, len(data)))]
            case 3:
                data[at:at] = rng.choice((b"\0", b"\xff", bytes(8), b"\xff" * 8, b"GGUF"))
            case _:
                data[at:at] = data[at : at + rng.randrange(1, 64)]
    return bytes(data)


def by_the_package(data: bytes) -> Any:
    """gguf.GGUFReader over bytes, or None where it refuses them, by whatever exception."""
    import gguf

    if data[:4] == b"PWRI":
        data = b"GGUF" + data[4:]
    with mock.patch.object(np, "memmap", lambda it, mode: np.frombuffer(it, np.uint8)):
        try:
            return gguf.GGUFReader(data)  # type: ignore[arg-type]
        except Exception:
            return None


def check_agreement(ours: Header, theirs: Any) -> None:
    """Names, shapes, types and places of all tensors, and the metadata."""
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for t in theirs.tensors:
        mine = ours.tensors[t.name]
        assert mine.shape == tuple(int(n) for n in t.shape[::-1]), t.name
        assert mine.type == t.tensor_type.name.lower() and TYPES[int(t.tensor_type)][0] == mine.type, t.name
        assert (mine.start, mine.end - mine.start) == (t.data_offset, t.n_bytes), t.name
    fields = {k: f for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for key, f in fields.items():
        want, got = f.contents(), ours.metadata[key]
        if isinstance(got, list | np.ndarray) and len(got) == 0:
            assert not want, key  # the package says None
        else:
            assert np.array_equal(
                np.asarray(got), np.asarray(want), equal_nan=not isinstance(got, str | list)
            ), key


def fuzz(count: int, seed: int = 0) -> Tally:
    files, tally = originals(), Tally()
    for i in range(count):
        rng = random.Random(seed * 1_000_003 + i)
        mutant = mutate(rng.choice(files), rng)
        begin = time.process_time()
        try:
            ours = parse_header(mutant, len(mutant), "file")
        except ThermoclineError as e:
            message = str(e)
            assert "\n" not in message and message.isprintable() and len(message) < 1000, (
                f"mutant {i}: {message!r}"
            )
            continue
        except Exception as e:
            raise AssertionError(f"mutant {i} of seed {seed}: {type(e).__name__}: {e}; {mutant!r}") from e
        finally:
            tally.slowest_s = max(tally.slowest_s, time.process_time() - begin)
        tally.understood += 1
        theirs = by_the_package(mutant)
        if theirs is not None:
            try:
                check_agreement(ours, theirs)
            except AssertionError as e:
                raise AssertionError(f"mutant {i} of seed {seed} is read differently: {e}; {mutant!r}") from e
            tally.agreed += 1
    assert tally.slowest_s < MAX_SECONDS
    return tally


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


if __name__ == "__main__":
    fuzz(2000)
    before = peak_bytes()
    tally = fuzz(int(sys.argv[1]) if len(sys.argv) > 1 else 500_000, seed=int((sys.argv[2:] or ["1"])[0]))
    grown = peak_bytes() - before
    print(f"{tally}, {grown >> 20} MiB more memory at the peak")
    assert grown < MAX_GROWTH
