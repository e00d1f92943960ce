"""Tables of embeddings on disk: the bits of memory, counted to the byte, of packs and of GGUFs in place."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_twins
import kept_twins
import pytest
import twins

from thermocline import SamplingParams
from thermocline.convert.importer import pack
from thermocline.engine.engine import Engine
from thermocline.engine.request import Request
from thermocline.errors import BadFile, IOFailure, OutOfBudget, ThermoclineError
from thermocline.machine.tiers import read_tiers
from thermocline.model import sizes
from thermocline.opening.gguf_model import GGUFModel, open_gguf
from thermocline.pack.blocks import memory_bytes
from thermocline.pack.pack import Pack
from thermocline.pack.stored_model import StoredModel
from thermocline.plan import place
from thermocline.plan.budget import all_in_ram
from thermocline.plan.hotness import Curve
from thermocline.plan.memory import GIB
from thermocline.plan.problem import Ask
from thermocline.plan.subject import of_model
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session, needs_of

pytest.importorskip("gguf")
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
VOCAB = 2003
PROMPTS = [[5, 5, 6, VOCAB - 1], [i * i * 7 % VOCAB for i in range(40)]]
PER_LAYER, EMBED = "per_layer.embed.weight", "embed.weight"
OWN: dict[str, Any] = {"context": 64, "max_batch": 2, "threads": 2, "kv_tokens": 64}
# name -> twin, architecture of a GGUF, its tables' type (a pack: None), tables on disk, of little memory only
CASES: dict[str, tuple[str, str, str | None, tuple[str, ...]]] = {
    "pack, per layer": ("gemma4_small", "", None, (PER_LAYER,)),
    "f16, per layer": ("gemma4_small", "gemma4", "F16", (PER_LAYER,)),
    "q4_0, per layer": ("gemma4_small", "gemma4", "Q4_0", (PER_LAYER,)),
    "q8_0, per layer": ("gemma4_small", "gemma4", "Q8_0", (PER_LAYER,)),
    "pack, embedding": ("qwen3_moe", "", None, (EMBED,)),
    "f16, embedding": ("qwen3_moe", "qwen3moe", "F16", (EMBED,)),
    "q8_0, embedding": ("qwen3_moe", "qwen3moe", "Q8_0", (EMBED,)),
}
FILES = [name for name in CASES if not name.startswith("pack")]


def large(twin: str, directory: Path) -> Path:
    """Write a twin with a vocabulary whose tables are worth leaving on disk."""
    kept = kept_twins.RECORDED[twin]

    def resized(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: resized(value) for key, value in x.items()}
        if isinstance(x, list):
            return list(map(resized, x))
        return VOCAB if x == twins.VOCAB else x

    return kept_twins._write(directory, resized(kept["files"]), resized(kept["shards"]), 0)


def made(name: str, directory: Path) -> StoredModel:
    twin, arch, type, _ = CASES[name]
    hf = large(twin, directory / "hf")
    if type is None:
        pack(hf, directory / "pack")
        return Pack.open(directory / "pack")
    path = gguf_twins.write(
        hf, directory / "m.gguf", arch=arch, types=lambda n: type if "token_embd" in n else "F16"
    )
    model = open_gguf(path)
    assert isinstance(model, GGUFModel), "it runs in place"
    return model


def session(model: StoredModel, **own: Any) -> Session:
    return Session.open(model, EngineOptions(**OWN | own))


def in_memory(model: StoredModel) -> Session:
    """Open with all of it in memory."""
    options = EngineOptions(**OWN)
    return Session(model, options, all_in_ram(model, None, needs_of(options)))


def few(model: StoredModel) -> float:
    """Return GiB with which the model fits only with its tables on disk."""
    with session(model) as most:
        return (most.memory_bytes - 1) / GIB


def little(name: str, model: StoredModel) -> dict[str, float]:
    return {"ram": few(model)} if EMBED in CASES[name][3] else {}


def asked(engine: Engine) -> list[Request]:
    found = [engine.submit(ids, GREEDY) for ids in PROMPTS]
    while engine.step():
        pass
    return found


def answers(engine: Engine) -> list[tuple[list[int], str | None]]:
    done = asked(engine)
    assert all(r.error is None for r in done)
    return [(r.ids[r.n_prompt :], r.figures().logits_hash) for r in done]


@pytest.mark.parametrize("name", CASES)
def test_rows_from_disk_give_the_bits_of_memory_and_save_theirs(name: str, tmp_path: Path) -> None:
    model, tables = made(name, tmp_path), CASES[name][3]
    with in_memory(model) as every:
        assert every.placement.tables == ()
        truth, most = answers(every.load()), every.memory_bytes
    with session(model, **little(name, model)) as less:
        assert less.placement.tables == tables
        assert answers(less.load()) == truth
        t = model.tensors[tables[0]]
        saved, held = most - less.memory_bytes, sizes.lookup_bytes(t.stride)
        assert saved == memory_bytes(model) - memory_bytes(model, None, tables)
        around = sizes.aligned(t.bytes) - held - saved
        assert 0 <= around < 2 * 65536, "whole blocks are read around it"
        assert less.placement.bytes["disk"] == {"embedding": t.bytes - t.stride}
        assert less.loaded.bytes == memory_bytes(model, None, tables)


@pytest.mark.parametrize("name", CASES)
def test_a_budget_that_is_a_byte_too_small_is_refused(name: str, tmp_path: Path) -> None:
    model = made(name, tmp_path)
    with session(model, **little(name, model)) as least:
        need = least.memory_bytes
    with session(model, ram=need / GIB) as fits:
        assert fits.memory_bytes == need
    with pytest.raises(OutOfBudget, match="--ram"):
        session(model, ram=(need - 1) / GIB)


@pytest.mark.parametrize("name", CASES)
def test_what_is_planned_is_what_runs(name: str, tmp_path: Path) -> None:
    model = made(name, tmp_path)
    here = replace(read_tiers("rtx4090-i9-13900k"), gpu=None, disk=None)
    here = replace(here, cpu=replace(here.cpu, threads=2))
    ram = little(name, model)
    with session(model, **ram) as run:
        placement = run.placement
    budget = placement.ram_bytes if ram else None
    made_plan = place.plan(of_model(model, "exact", Curve()), here, Ask(64, max_batch=2, ram_bytes=budget))
    assert made_plan.placement.tables == placement.tables == CASES[name][3]
    assert made_plan.placement.bytes == placement.bytes
    assert any("a row is read from disk" in note for note in made_plan.notes)


@pytest.mark.parametrize("name", ["pack, per layer", "f16, per layer", "pack, embedding"])
def test_inspect_says_what_stays_on_disk(name: str, tmp_path: Path, thermocline: Any) -> None:
    path = made(name, tmp_path).path
    tables = [table for table in CASES[name][3] if table == PER_LAYER]
    assert json.loads(thermocline("inspect", path, "--json").out)["tables"] == tables
    assert ("of which a token reads a row" in thermocline("inspect", path).out) == bool(tables)


# ---- faults


@contextmanager
def rewritten(path: Path) -> Iterator[None]:
    """Write a file anew, with the time of writing of its own; then give it back the old one."""
    before = os.stat(path)
    os.utime(path, ns=(0, before.st_mtime_ns + 10**9))
    yield
    os.utime(path, ns=(0, before.st_mtime_ns))


@contextmanager
def cut(path: Path) -> Iterator[None]:
    before, content = os.stat(path), path.read_bytes()
    os.truncate(path, 4096)
    yield
    path.write_bytes(content)
    os.utime(path, ns=(0, before.st_mtime_ns))


@pytest.mark.parametrize("how", [rewritten, cut])
@pytest.mark.parametrize("name", FILES[1:4:2])
def test_a_gguf_that_changes_fails_requests_and_the_session_goes_on(
    name: str, how: Any, tmp_path: Path
) -> None:
    model = made(name, tmp_path)
    with session(model, **little(name, model)) as s:
        engine = s.load()
        truth = answers(engine)
        with how(model.path):
            for r in asked(engine):
                assert isinstance(r.error, BadFile)
                assert str(r.error).startswith(f"{model.path}: was changed or replaced since it was opened")
        assert answers(engine) == truth


def test_a_gguf_that_is_replaced_is_read_as_it_was(tmp_path: Path) -> None:
    model = made(FILES[1], tmp_path)
    with session(model) as s:
        engine = s.load()
        truth = answers(engine)
        (tmp_path / "other").write_bytes(b"something else")
        (tmp_path / "other").rename(model.path)
        assert answers(engine) == truth


def test_a_gguf_that_changed_before_it_is_read_is_refused(tmp_path: Path) -> None:
    model = made(FILES[0], tmp_path)
    with rewritten(model.path), pytest.raises(BadFile, match="was changed or replaced"):
        model.rows_of(PER_LAYER)
    model.path.unlink()
    with pytest.raises(IOFailure, match=r"m\.gguf: no such file"):
        model.rows_of(PER_LAYER)


@pytest.mark.parametrize("name", ["q8_0, per layer", "q8_0, embedding"])
def test_a_row_that_the_disk_cannot_read_costs_its_request(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also reads that bring less than was asked for, which are gone on with."""
    model = made(name, tmp_path)
    with session(model, **little(name, model)) as s:
        engine, real = s.load(), os.preadv
        truth = answers(engine)

        def short(fd: int, buffers: Any, offset: int) -> int:
            return real(fd, [buffers[0][:7]], offset)

        def broken(fd: int, buffers: Any, offset: int) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "preadv", short)
        assert answers(engine) == truth
        monkeypatch.setattr(os, "preadv", broken)
        for r in asked(engine):
            assert isinstance(r.error, IOFailure)
            assert "Input/output error" in str(r.error) and "token_embd" in str(r.error)
        monkeypatch.setattr(os, "preadv", real)
        assert answers(engine) == truth


def test_a_scale_that_is_no_number_names_its_row(tmp_path: Path) -> None:
    """A row in memory is checked when it is loaded; one on disk, when it is read."""
    model = made("q8_0, per layer", tmp_path)
    assert isinstance(model, GGUFModel)
    (run,) = (r for r in model.rows if r.of == PER_LAYER)
    content, row = bytearray(model.path.read_bytes()), VOCAB - 2
    at = run.at + row * run.stride
    content[at : at + 2] = b"\x00\x7e"  # NaN in f16
    model.path.write_bytes(content)
    other = open_gguf(model.path)
    assert isinstance(other, GGUFModel)
    with session(other) as s:
        engine = s.load()
        first, second = (engine.submit(ids, GREEDY) for ids in ([5, row], [5, 6]))
        while engine.step():
            pass
        assert isinstance(first.error, ThermoclineError)
        assert f"row {row}: a scale is not a finite number" in str(first.error)
        assert second.error is None


def test_a_damaged_block_of_a_pack_costs_its_request(tmp_path: Path) -> None:
    model = made("pack, per layer", tmp_path)
    assert isinstance(model, Pack)
    with session(model) as s:
        engine = s.load()
        truth, t = answers(engine), model.tensors[PER_LAYER]
        content = bytearray(model.weights_path.read_bytes())
        content[t.offset + (VOCAB - 1) * t.stride] ^= 1
        model.weights_path.write_bytes(content)
        engine.submit([7], GREEDY)
        r, _ = asked(engine)
        assert isinstance(r.error, BadFile) and "checksum mismatch" in str(r.error)
        content[t.offset + (VOCAB - 1) * t.stride] ^= 1
        model.weights_path.write_bytes(content)
        assert answers(engine) == truth
