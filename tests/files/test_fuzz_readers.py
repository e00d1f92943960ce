"""100,000 damaged files: each is understood or raises a ThermoclineError, within the reader's memory bound.

Mutants are made and parsed in memory from fixed seeds, so a failure names the seed that repeats it.
"""

from __future__ import annotations

import json
import random
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kept_twins
import numpy as np
import pytest
import test_models
import twins
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from thermocline.errors import ThermoclineError
from thermocline.files import safetensors as st
from thermocline.files.bounded import parse_json
from thermocline.model import families
from thermocline.model import tensors as layout
from thermocline.model.spec import ModelSpec
from thermocline.pack import manifest, writer

MUTANTS = [800, pytest.param(25_000, marks=pytest.mark.slow)]  # of each kind of file
SAMPLED = 500  # of which this many also have their memory measured
MIB = 1 << 20

Reader = Callable[[bytes], Any]
Change = Callable[[bytes, random.Random], bytes]

INTERESTING = [
    b"0",
    b"-1",
    b"1e9",
    b"1.5",
    b"null",
    b"true",
    b'""',
    b"[]",
    b"{}",
    b"NaN",
    b"\\u0000",
    b"\xff",
    b"/",
    b"..",
]
INTERESTING += [str(n).encode() for n in (2**31, 2**32 - 1, 2**48, 2**53, 2**63 - 1, 2**63, 2**64, 10**400)]
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:e-?\d+)?")
_TOKEN = re.compile(rb'"[^"]*"|-?\d+(?:\.\d+)?|[{}\[\]:,]|true|false|null')


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Half: one JSON node replaced, removed or copied. Half: one to four edits of bytes, numbers, tokens."""
    if rng.random() < 0.5:
        return _graft(data, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not data:
            return data
        data = rng.choice(EDITS)(data, rng)
    return data


def _flip(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(INTERESTING) + data[at:]


def _cut(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] if rng.random() < 0.3 else data[:at] + data[at + rng.randrange(1, 40) :]


def _copy(data: bytes, rng: random.Random) -> bytes:
    a, b = rng.randrange(len(data)), rng.randrange(len(data))
    return data[:b] + data[a : a + rng.randrange(1, 200)] + data[b:]


def _replace(pattern: re.Pattern[bytes]) -> Change:
    def edit(data: bytes, rng: random.Random) -> bytes:
        """Another value for the first match after a random place."""
        m = pattern.search(data, rng.randrange(len(data))) or pattern.search(data)
        return data if m is None else data[: m.start()] + rng.choice(INTERESTING) + data[m.end() :]

    return edit


def _nudge(data: bytes, rng: random.Random) -> bytes:
    m = _NUMBER.search(data, rng.randrange(len(data)))
    if m is None or b"." in m[0] or b"e" in m[0] or len(m[0]) > 30:
        return data
    value = int(m[0]) + rng.choice((-4096, -64, -1, 1, 4, 64, 4096, 1 << 40))
    return data[: m.start()] + str(value).encode() + data[m.end() :]


VALUES_TO_GRAFT: list[Any] = [
    None,
    True,
    False,
    "",
    "x",
    "..",
    "F16",
    "q4_0",
    "relu",
    0.0,
    -1.5,
    1e-9,
    1e300,
    [],
    {},
]
VALUES_TO_GRAFT += [
    0,
    1,
    2,
    3,
    4,
    8,
    16,
    24,
    32,
    64,
    4096,
    -1,
    -4096,
    2**31,
    2**32,
    2**48,
    2**63,
    2**64,
    10**30,
]
VALUES_TO_GRAFT += [[0], [0, 4], [-1], [2**32, 2**32], [2**63], [[1]], [None], {"a": 1}, ["LlamaForCausalLM"]]


def _graft(data: bytes, rng: random.Random) -> bytes:
    """Still JSON, with one node wrong. Not JSON stays as it is."""
    try:
        root = json.loads(data)
    except ValueError:
        return data
    nodes = [n for n in _containers(root) if n]
    if not nodes:
        return data
    node = rng.choice(nodes)
    key: Any = rng.choice(sorted(node)) if isinstance(node, dict) else rng.randrange(len(node))
    act = rng.random()
    if act < 0.15:
        del node[key]
    elif act < 0.3 and isinstance(node, dict):
        node[rng.choice(("x", key + "x", rng.choice(sorted(node))))] = node[key]
    elif type(node[key]) is int and act < 0.6:
        node[key] += rng.choice((-4096, -64, -4, -1, 1, 4, 64, 4096))
    else:
        node[key] = rng.choice(VALUES_TO_GRAFT)
    return json.dumps(root).encode()


def _containers(value: Any) -> list[Any]:
    if not isinstance(value, dict | list):
        return []
    inner = value.values() if isinstance(value, dict) else value
    return [value, *(c for v in inner for c in _containers(v))]


EDITS = (_flip, _insert, _cut, _copy, _replace(_NUMBER), _replace(_TOKEN), _nudge, _nudge)


def fuzz(seed: int, mutants: int, originals: list[bytes], read: Reader, change: Change) -> int:
    """Read mutants; returns how many were still understood."""
    understood = 0
    for i in range(mutants):
        rng = random.Random(seed * 1_000_003 + i)
        mutant = change(rng.choice(originals), rng)
        try:
            read(mutant)
            understood += 1
        except ThermoclineError as e:
            message = str(e)
            assert "\n" not in message and message.isprintable() and len(message) < 1000, (
                f"mutant {i}: {message!r}"
            )
        except Exception as e:
            pytest.fail(f"mutant {i} of seed {seed}: {type(e).__name__}: {e}; the file: {mutant[:2000]!r}")
    return understood


def peak_of(read: Callable[[bytes], object], data: bytes) -> int:
    """The most memory that reading `data` took, whether it was refused or not."""
    tracemalloc.start()
    try:
        read(data)
    except ThermoclineError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def check_memory(seed: int, originals: list[bytes], read: Reader, change: Change) -> None:
    for i in range(SAMPLED):
        rng = random.Random(seed * 1_000_003 + i)
        mutant = change(rng.choice(originals), rng)
        peak = peak_of(read, mutant)
        assert peak <= 4 * len(mutant) + 16 * MIB, f"mutant {i} of seed {seed} took {peak} bytes"


# --- the four readers ---------------------------------------------------------------------------------------


def read_safetensors(data: bytes) -> None:
    """A file's bytes; what it says of its tensors must be inside it."""
    n = st.header_size(data[:64], len(data), "file")
    for e in st.parse_header(data[8 : 8 + n], len(data), "file").values():
        assert 8 + n <= e.start <= e.end <= len(data)
        assert int(np.prod(e.shape, dtype=object)) * st.DTYPE_BITS[e.dtype] == 8 * (e.end - e.start)


def safetensors_file(tensors: int) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for i in range(tensors):
        header[f"t{i}"] = {
            "dtype": ("F32", "BF16")[i % 2],
            "shape": [2, 2 + 2 * (i % 2)],
            "data_offsets": [16 * i, 16 * i + 16],
        }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16 * tensors)


def change_header(data: bytes, rng: random.Random) -> bytes:
    """Half of the mutants have the right header length, so that they get past it."""
    if rng.random() < 0.5:
        return mutate(data, rng)
    n = int.from_bytes(data[:8], "little")
    header = mutate(data[8 : 8 + n] or b"{}", rng)
    return len(header).to_bytes(8, "little") + header + data[8 + n :]


def read_config(data: bytes) -> None:
    spec, mapping = families.parse_config(parse_json(data, "config.json"), None, "config.json")
    assert spec.n_heads * spec.head_dim <= 1 << 20 and spec.n_heads % spec.n_kv_heads == 0
    assert all(i < spec.vocab_size for i in spec.eos_ids)
    assert len(mapping.tensors) <= 6 + 24 * spec.n_layers


def read_manifest(data: bytes) -> None:
    """Whatever is understood must lie inside the file it describes, however false."""
    m = manifest.parse_manifest(data, "pack.json")
    end = 0
    for t in sorted(m.tensors.values(), key=lambda t: t.offset):
        assert t.offset >= end and t.stride > 0 and t.bytes % t.stride == 0
        end = t.offset + t.bytes
    assert end <= m.weights_bytes


def change_manifest(data: bytes, rng: random.Random) -> bytes:
    """Half of the mutants are written anew with a right checksum, as a forger would."""
    mutant = mutate(data, rng)
    if rng.random() < 0.5:
        return mutant
    try:
        value = json.loads(mutant)
        value.pop("crc32c", None)
        return manifest._render(value)
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return mutant


def read_index(data: bytes) -> None:
    for file in st.parse_index(data, "index.json").values():
        assert "/" not in file and file.endswith(".safetensors") and file == Path(file).name


SPEC = ModelSpec(
    architecture="test", dim=32, ffn_dim=48, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, vocab_size=40,
    max_context=16, norm="rms", norm_eps=1e-5, activation="relu", eos_ids=(2,),
)  # fmt: skip


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[bytes]]:
    root = tmp_path_factory.mktemp("originals")
    writer.write_pack(
        root / "pack", SPEC, "q8_0", lambda n, a, b: np.zeros((b - a, 32) if "norm" not in n else b - a)
    )
    configs = [kept_twins.config(name) for name in kept_twins.TWINS if name not in twins.ASKED]
    index = {
        "metadata": {"total_size": 64},
        "weight_map": {f"t{i}": f"m-{i % 3}.safetensors" for i in range(9)},
    }
    return {
        "safetensors": [safetensors_file(3), safetensors_file(0), safetensors_file(12)],
        "config": configs,
        "manifest": [(root / "pack/pack.json").read_bytes()],
        "index": [json.dumps(index, indent=1).encode()],
    }


KINDS: dict[str, tuple[Reader, Change]] = {
    "safetensors": (read_safetensors, change_header),
    "config": (read_config, mutate),
    "manifest": (read_manifest, change_manifest),
    "index": (read_index, mutate),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mutants", MUTANTS)
def test_a_damaged_file_is_understood_or_refused_never_worse(
    mutants: int, kind: str, originals: dict[str, list[bytes]]
) -> None:
    read, change = KINDS[kind]
    for data in originals[kind]:
        read(data)
    understood = fuzz(sum(kind.encode()), mutants, originals[kind], read, change)
    assert 0 < understood < mutants  # the mutants are neither all harmless nor all nonsense


@pytest.mark.parametrize("kind", KINDS)
def test_reading_a_damaged_file_stays_within_its_memory(kind: str, originals: dict[str, list[bytes]]) -> None:
    read, change = KINDS[kind]
    check_memory(sum(kind.encode()), originals[kind], read, change)


# --- and what an edit of bytes would not find ---------------------------------------------------------------

SCALARS = some.none() | some.booleans() | some.floats() | some.text(max_size=5)
NUMBERS = some.integers() | some.sampled_from([0, 1, 2, 7, 64, 2**31, 2**32, 2**63, 2**64, -1, 10**30])
VALUES: some.SearchStrategy[Any] = (
    SCALARS | NUMBERS | some.lists(SCALARS | NUMBERS, max_size=3) | some.just({}) | some.just([[]])
)
QUICKLY = settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
LLAMA = test_models.LLAMA | {
    "hidden_act": "relu",
    "rope_theta": 1e4,
    "rope_scaling": None,
    "head_dim": 16,
    "attention_bias": False,
}


@QUICKLY
@given(some.dictionaries(some.sampled_from(sorted(LLAMA)), VALUES, min_size=1, max_size=4))
def test_any_values_in_a_config_are_understood_or_refused(changes: dict[str, Any]) -> None:
    try:
        spec, _ = families.parse_config(LLAMA | changes, None, "config.json")
    except ThermoclineError:
        return
    layout.expected_tensors(spec, "f32")


@QUICKLY
@given(some.dictionaries(some.sampled_from(["eos_token_id", "bos_token_id", "x"]), VALUES))
def test_any_values_in_a_generation_config_are_understood_or_refused(generation: dict[str, Any]) -> None:
    try:
        families.parse_config(LLAMA, generation, "config.json")
    except ThermoclineError:
        return
