"""Commands within `--ram` on models larger than it: the figures of memory, bit for bit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kept_twins
import numpy as np
import pytest
import tiny
from closed_sessions import Closed, watch_sessions
from safetensors.numpy import save_file
from test_experts_on_disk import with_slots

from thermocline.convert.importer import pack
from thermocline.errors import OutOfBudget, UsageError
from thermocline.machine import hardware
from thermocline.offline.activity import UNIT
from thermocline.offline.corpus import random_corpus
from thermocline.offline.packing import over_texts
from thermocline.offline.profiler import ProfileJob, profile
from thermocline.pack.activity_profile import PROFILE, SAMPLES
from thermocline.pack.pack import Pack
from thermocline.plan.disk import dense_split, disk_split, expert_split
from thermocline.plan.memory import GIB, runtime_bytes
from thermocline.session import store

Run = Callable[..., Any]
F32 = np.ndarray[Any, np.dtype[np.float32]]
DIM, EXPERTS = 128, 32
WIDTH = {"neurons": 3584, "experts": 128, "rows": 1024}
LAYERS = {"neurons": 2, "experts": 2, "rows": 8}
KINDS = ("neurons", "experts", "rows")  # that are left on disk
SAID = ("-q", "--json")
TEXT = "The thermocline is a thin layer of water where warm meets cold, and light goes no further. " * 4


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a real model's reads would be as large as all of these ones' FFNs."""
    monkeypatch.setattr(disk_split, "BUFFER_BYTES", 4096)
    for module in (disk_split, store):
        monkeypatch.setattr(module, "DEPTH", 32)
    monkeypatch.setattr(dense_split, "RECORD_BYTES", 16 << 10)
    monkeypatch.setattr(dense_split, "WINDOW", 5)
    monkeypatch.setattr(dense_split, "ARRANGING", 2)
    monkeypatch.setattr(expert_split, "DEPTH", 8)


def wide(kind: str, path: Path) -> Path:
    """A tiny model with wide FFNs of which neurons, experts or rows can be on disk."""
    changes: dict[str, Any] = {
        "hidden_size": DIM,
        "num_key_value_heads": tiny.HEADS,
        "num_hidden_layers": LAYERS[kind],
    }
    changes |= {"intermediate_size": WIDTH[kind], "hidden_act": "relu" if kind == "neurons" else "silu"}
    if kind == "experts":
        changes |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
        changes |= {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}
    tiny.hf_directory(path, **changes)
    rng = np.random.default_rng(5)

    def matrix(rows: int, columns: int) -> F32:
        return np.asarray(rng.standard_normal((rows, columns)) / 16, np.float32)

    norms = ["model.norm"]
    tensors = {"model.embed_tokens.weight": matrix(tiny.BYTES + 2, DIM)}
    for i in range(LAYERS[kind]):
        at, ffns = f"model.layers.{i}", [("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]
        if kind == "experts":
            of = "block_sparse_moe"
            ffns = [tuple(f"{of}.experts.{e}.{w}" for w in ("w1", "w3", "w2")) for e in range(EXPERTS)]  # type: ignore[misc]
            tensors[f"{at}.{of}.gate.weight"] = matrix(EXPERTS, DIM)
        tensors |= {f"{at}.self_attn.{n}_proj.weight": matrix(DIM, DIM) for n in "qkvo"}
        for gate, up, down in ffns:
            tensors |= {f"{at}.{name}.weight": matrix(WIDTH[kind], DIM) for name in (gate, up)}
            tensors[f"{at}.{down}.weight"] = matrix(DIM, WIDTH[kind])
        norms += [f"{at}.input_layernorm", f"{at}.post_attention_layernorm"]
    tensors |= {f"{name}.weight": np.ones(DIM, np.float32) for name in norms}
    save_file(tensors, str(path / "model.safetensors"))
    return path


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pack of each kind in f32; and in q8_0, to compare it with."""
    base = tmp_path_factory.mktemp("wide")
    made: dict[str, Path] = {}
    for kind in KINDS:
        hf = wide(kind, base / f"{kind}-hf")
        for name, form in ((kind, "f32"), (f"{kind}-q8_0", "q8_0")):
            pack(hf, made.setdefault(name, base / name), form)
    return made


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (path := tmp_path / "text.txt").write_text(TEXT)
    return path


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Closed]:
    return watch_sessions(monkeypatch)


def enough(thermocline: Run, *argv: str | Path) -> str:
    """Return the least `--ram`, as the refusal of less names it."""
    ran = thermocline(*argv, "--ram", "0.001")
    assert ran.code == 5, ran.err
    return re.search(r"on disk the model still needs .*use --ram ([\d.]+)", ran.err)[1]  # type: ignore[index]


def figures(thermocline: Run, *argv: str | Path) -> dict[str, Any]:
    ran = thermocline(*argv, *SAID)
    assert ran.code == 0, ran.err
    return lasting(ran)


def lasting(ran: Any) -> dict[str, Any]:
    """Return what a command says, but times."""
    found: dict[str, Any] = json.loads(ran.out)
    return {k: v for k, v in found.items() if k not in ("seconds", "tokens_per_s")}


# ---- eval


@pytest.mark.parametrize("kind", KINDS)
def test_eval_gives_the_figures_of_memory(
    kind: str, packs: dict[str, Path], text: Path, thermocline: Run, sessions: list[tuple[bool, int, int]]
) -> None:
    asked = ("eval", packs[kind], "--text", text, "--ctx", "64", "-t", "2")
    wanted = figures(thermocline, *asked)
    assert sessions == [], "all was in memory"
    ram = enough(thermocline, *asked)
    assert figures(thermocline, *asked, "--ram", ram) == wanted
    ((from_disk, nbytes, missed),) = sessions
    assert from_disk and nbytes <= float(ram) * GIB and missed > 0


def test_eval_of_modes_and_cache_types_shares_one_model_s_weights(
    packs: dict[str, Path], text: Path, thermocline: Run, sessions: list[tuple[bool, int, int]]
) -> None:
    """A reader's own keys and values, in each of two types, are within the limit too."""
    asked = ("eval", packs["neurons"], "--text", text, "--ctx", "64", "-t", "2", "--against", "off")
    types = ("-ctk", "q8_0", "-ctv", "q8_0")
    for more in ((), types):
        wanted = figures(thermocline, *asked, *more)
        ram = enough(thermocline, *asked, *more)
        assert figures(thermocline, *asked, *more, "--ram", ram) == wanted
        assert (wanted["against"]["kld"]["value"] > 0) == bool(more)
    assert [from_disk for from_disk, _, _ in sessions] == [True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_two_models_share_a_budget(
    kind: str, packs: dict[str, Path], text: Path, thermocline: Run, sessions: list[tuple[bool, int, int]]
) -> None:
    names, rest = (f"{kind}-q8_0", kind), ("--text", text, "--ctx", "64", "-t", "2")
    asked = ("eval", packs[names[0]], *rest, "--against", packs[names[1]])
    wanted = figures(thermocline, *asked)
    assert 0 < wanted["against"]["kld"]["value"] < 0.1 and sessions == []
    runtime = min(runtime_bytes(Pack.open(packs[name]).spec) for name in names)
    alone = sum(float(enough(thermocline, "eval", packs[name], *rest)) for name in names)
    tried = (f"{x * alone - runtime / GIB:.4f}" for x in np.arange(1.01, 1.1, 0.01))  # shares are no needs
    ran, ram = next((r, x) for x in tried if (r := thermocline(*asked, "--ram", x, *SAID)).code == 0)
    assert lasting(ran) == wanted
    assert len(sessions) == 2 and all(from_disk and missed for from_disk, _, missed in sessions)
    assert sum(nbytes for _, nbytes, _ in sessions) - runtime <= float(ram) * GIB


def test_a_refusal_says_which_model_has_too_little(
    packs: dict[str, Path], text: Path, thermocline: Run
) -> None:
    ran = thermocline(
        "eval", packs["rows-q8_0"], "--text", text, "--ctx", "64", "--against", packs["rows"], "--ram", "0.01"
    )
    assert ran.code == 5 and ran.err.count("\n") == 1
    assert "of the memory is for it, the rest for the other model" in ran.err


# ---- packing


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_measured_where_memory_is_too_small(
    kind: str, packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, sessions: list[tuple[bool, int, int]]
) -> None:
    opened = Pack.open(packs[kind])
    texts = over_texts.windows_for(opened, TEXT * 2, 512)
    wanted = over_texts.measure_inputs(opened, texts, 2, lambda *_: None)
    assert sessions == []
    ram = _least(opened, texts)
    monkeypatch.setattr(hardware, "available_bytes", lambda: ram)
    monkeypatch.setattr(hardware, "own_bytes", lambda: 0)
    found = over_texts.measure_inputs(opened, texts, 2, lambda *_: None)
    assert [from_disk for from_disk, _, _ in sessions] == [True]
    assert found.keys() == wanted.keys()
    for name, moments in found.items():
        for a, b in zip(moments, wanted[name], strict=True):
            assert a.squares.tobytes() == b.squares.tobytes(), name


def _least(opened: Pack, texts: Any) -> int:
    with pytest.MonkeyPatch.context() as little:
        little.setattr(hardware, "available_bytes", lambda: 1 << 20)
        little.setattr(hardware, "own_bytes", lambda: 0)
        with pytest.raises(OutOfBudget, match="to run the model while packing: with its") as refused:
            over_texts.measure_inputs(opened, texts, 2, lambda *_: None)
    said = str(refused.value)
    mib = re.search(r"still needs ([\d.]+) MiB", said)
    assert mib is not None, said
    return int(float(mib[1]) * 2**20)


# ---- profile


@pytest.fixture(scope="module")
def experts_of_neurons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ReLU mixture whose layers are not alike: whole experts of it are left on disk."""
    base = tmp_path_factory.mktemp("nemotron")
    pack(kept_twins.TWINS["nemotron_h_moe"](base / "hf"), base / "pack", "q8_0")
    return base / "pack"


def profiled(r: ProfileJob) -> dict[str, bytes]:
    """Profile a pack; -> the files that the new one has."""
    profile(r, lambda *_: None)
    return {path.name: path.read_bytes() for path in sorted(r.output.iterdir())}


def job(path: Path, output: Path, **changes: Any) -> ProfileJob:
    opened, context = Pack.open(path), changes.pop("context", 320)
    corpus = random_corpus(opened, 900, context, UNIT)
    return replace(ProfileJob(opened, corpus, output, context, samples=60, threads=2, workers=1), **changes)


def least_for_profile(r: ProfileJob) -> float:
    """Return the GiB that a refusal names."""
    with pytest.raises(OutOfBudget) as refused:
        profile(replace(r, ram=0.001), lambda *_: None)
    return float(re.search(r"on disk the model still needs .*use --ram ([\d.]+)", str(refused.value))[1])  # type: ignore[index]


def test_a_profile_with_neurons_on_disk_is_that_of_memory(
    packs: dict[str, Path], tmp_path: Path, sessions: list[tuple[bool, int, int]]
) -> None:
    """Counts, samples and the new order of neurons, byte by byte; a prompt of several steps each."""
    wanted = profiled(job(packs["neurons"], tmp_path / "memory"))
    assert sessions == [] and {PROFILE, SAMPLES, "weights.bin"} <= wanted.keys()
    r = job(packs["neurons"], tmp_path / "disk")
    ram = least_for_profile(r)
    assert profiled(replace(r, ram=ram)) == wanted
    ((from_disk, nbytes, missed),) = sessions
    assert from_disk and nbytes <= ram * GIB and missed > 2 * WIDTH["neurons"] * LAYERS["neurons"]


def test_a_profile_with_experts_of_neurons_on_disk_is_that_of_memory(
    experts_of_neurons: Path,
    tmp_path: Path,
    sessions: list[tuple[bool, int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two slots in each layer, as if a budget had room for them: this one is smaller than what reads it."""
    wanted = profiled(job(experts_of_neurons, tmp_path / "memory", context=64))
    two = with_slots(Pack.open(experts_of_neurons), 2)
    monkeypatch.setattr("thermocline.session.session.without_gpu", lambda *_: two)
    assert profiled(job(experts_of_neurons, tmp_path / "disk", context=64)) == wanted
    ((from_disk, _, missed),) = sessions
    assert from_disk and missed > 0


def test_a_profile_goes_on_in_other_memory(
    packs: dict[str, Path], tmp_path: Path, sessions: list[tuple[bool, int, int]]
) -> None:
    """Begun with all in memory, ended with neurons on disk: the same bytes."""
    wanted = profiled(job(packs["neurons"], tmp_path / "whole"))
    r = job(packs["neurons"], tmp_path / "parts")

    def stop(what: str, done: int, total: int, unit: str) -> None:
        if what == "counting" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile(r, stop)
    ram = least_for_profile(r)
    done = profile(replace(r, ram=ram), lambda *_: None)
    assert 0 < done.resumed_tokens < r.corpus.tokens and [x[0] for x in sessions] == [True]
    assert {path.name: path.read_bytes() for path in sorted(r.output.iterdir())} == wanted


def test_workers_have_to_share_weights_in_memory(packs: dict[str, Path], tmp_path: Path) -> None:
    r = job(packs["neurons"], tmp_path / "out")
    ram = least_for_profile(replace(r, workers=2))
    with pytest.raises(UsageError, match="--workers 2: a part of the model is read from disk") as refused:
        profile(replace(r, workers=2, ram=ram), lambda *_: None)
    assert "\n" not in str(refused.value)


def test_profile_takes_ram_on_the_command_line(
    packs: dict[str, Path], tmp_path: Path, thermocline: Run, sessions: list[tuple[bool, int, int]]
) -> None:
    (tmp_path / "text").write_text(TEXT)
    asked = ("profile", packs["neurons"], "--corpus", tmp_path / "text", "--ctx", "64", "-t", "2")
    wanted = figures(thermocline, *asked, "-o", tmp_path / "memory")
    ram = enough(thermocline, *asked, "-o", tmp_path / "disk")
    found = figures(thermocline, *asked, "-o", tmp_path / "disk", "--ram", ram)
    assert found | {"path": ""} == wanted | {"path": ""} and [x[0] for x in sessions] == [True]


def test_profile_is_no_advice_while_profiling(
    packs: dict[str, Path], tmp_path: Path, thermocline: Run, sessions: list[tuple[bool, int, int]]
) -> None:
    """A pack without a profile said while it was counted that `thermocline profile` makes this faster."""
    (tmp_path / "text").write_text(TEXT[:300])
    counted = ("profile", packs["neurons"], "--corpus", tmp_path / "text", "--ctx", "64", "-t", "2")
    scored = ("eval", packs["neurons"], "--text", tmp_path / "text", "--ctx", "64", "-t", "2")
    said = []
    for asked in ((*counted, "-o", tmp_path / "out"), scored):
        ran = thermocline(*asked, "--ram", enough(thermocline, *asked))
        assert ran.code == 0 and "is larger than its memory" in ran.err
        said.append("order of hotness: `thermocline profile" in ran.err)
    assert said == [False, True] and [x[0] for x in sessions] == [True, True]
