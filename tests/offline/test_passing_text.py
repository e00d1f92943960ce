"""Predictors fitted while a text passes: its samples are those of a profile, in rounds, in any memory."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_within_ram as wide
from conftest import Ran
from test_within_ram import packs, sessions, small_buffers  # noqa: F401 fixtures

from thermocline.cli import main
from thermocline.errors import IOFailure, OutOfBudget, UsageError
from thermocline.offline.activity import UNIT, ProfileWorker, down_norms
from thermocline.offline.checkpoint import ProfileCheckpoint
from thermocline.offline.corpus import random_corpus
from thermocline.offline.training import fits, samples, shortlist, train
from thermocline.offline.training.samples import PassingText
from thermocline.offline.training.shortlist import FittedLayer
from thermocline.pack.activity_profile import open_profile
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import FILE
from thermocline.plan.memory import GIB
from thermocline.session import weights

Thermocline = Callable[..., Ran]
Closed = list[tuple[bool, int, int]]
CONTEXT = 96
QUICK = (
    "--kind",
    "sign",
    "--max-kld",
    "9",
    "--max-ppl",
    "1e6",
    "--ctx",
    "64",
    "--limit",
    "1",
    "-t",
    "2",
    "-q",
)


@pytest.fixture(scope="module")
def profiled(packs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A pack in order of hotness, without samples."""
    where = tmp_path_factory.mktemp("profiled")
    (where / "text").write_text(wide.TEXT)
    argv = [
        "profile",
        packs["neurons"],
        "-o",
        where / "pack",
        "--corpus",
        where / "text",
        "--samples",
        "0",
        "-q",
    ]
    assert main.main([str(a) for a in argv]) == 0
    return where / "pack"


@pytest.fixture
def pack(profiled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(profiled, tmp_path / "pack"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (path := tmp_path / "text.txt").write_text(wide.TEXT)
    return path


def passing(path: Path, **changes: Any) -> PassingText:
    opened = Pack.open(path)
    profile = open_profile(opened)
    assert profile is not None
    corpus = random_corpus(opened, 400, CONTEXT, UNIT)
    made = PassingText(opened, profile, corpus, CONTEXT, 2, None, lambda *_: None)
    return replace(made, **changes)


def taken(source: PassingText, directory: Path, wanted: tuple[int, ...] = (0, 1)) -> dict[int, list[bytes]]:
    return {i: [x.tobytes() for x in rows] for i, rows in source.layers(wanted, directory)}


# ---- samples


@pytest.mark.parametrize("round_bytes", [1, 4 << 30])
def test_samples_of_a_passing_text_are_what_a_profile_counts(
    profiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, round_bytes: int
) -> None:
    """A layer in each round, or all in one; of every token, in the order of the text."""
    monkeypatch.setattr(samples, "ROUND_BYTES", round_bytes)
    source = passing(profiled)
    found = taken(source, tmp_path)
    loaded = weights.load(source.pack, threads=1)
    norms = down_norms(source.pack)
    worker = ProfileWorker.on_cpu(source.pack.spec, loaded.weights, source.corpus.prefix, CONTEXT, 1, norms)
    counted = [
        worker.count(p, np.arange(len(p), dtype=np.int64), threading.Event()) for p in source.corpus.passages
    ]
    for i in range(source.pack.spec.n_layers):
        mine = [s for c in counted for s in c.samples if s.layer == i]
        assert sum(len(s.input) for s in mine) == source.n == 400
        parts = ([s.input for s in mine], None, [s.index for s in mine], [s.mass for s in mine])
        for got, part in zip(found[i], parts, strict=True):
            assert part is None or got == np.concatenate(part).tobytes()
    assert not [*tmp_path.iterdir()], "a round leaves nothing"


def test_samples_do_not_depend_on_memory(profiled: Path, tmp_path: Path, sessions: Closed) -> None:  # noqa: F811
    source = passing(profiled)
    wanted = taken(source, tmp_path)
    assert sessions == []
    with pytest.raises(OutOfBudget) as refused:
        taken(replace(source, ram=0.001), tmp_path)
    ram = float(re.search(r"use --ram ([\d.]+)", str(refused.value))[1])  # type: ignore[index]
    assert taken(replace(source, ram=ram), tmp_path) == wanted
    assert sessions and all(from_disk and nbytes <= ram * GIB for from_disk, nbytes, _ in sessions)


def test_a_round_runs_no_further_than_its_layers(
    profiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "ROUND_BYTES", 1)
    depths: list[int] = []
    step = ProfileCheckpoint.add

    def spied(checkpoint: Any, passage: Any, passages: int) -> None:
        depths.append(int((passage.counts.sum(axis=(1, 2)) > 0).sum()))
        step(checkpoint, passage, passages)

    monkeypatch.setattr(ProfileCheckpoint, "add", spied)
    taken(passing(profiled), tmp_path)
    assert set(depths[: len(depths) // 2]) == {1} and set(depths[len(depths) // 2 :]) == {2}


def test_calibration_is_on_passages_that_nothing_is_fitted_to(profiled: Path) -> None:
    source = passing(profiled)
    held = source.held_out(0)
    ends = np.cumsum([len(p) for p in source.corpus.passages])
    each = np.split(held, ends[:-1])
    assert len(held) == 400 and all(x.all() or not x.any() for x in each)
    assert abs(sum(x.all() for x in each) - len(each) / 2) <= 0.5
    assert not np.array_equal(held, source.held_out(1))
    assert passing(profiled, corpus=random_corpus(source.pack, 64, CONTEXT, UNIT)).held_out(0).all()


def test_a_disk_too_small_for_a_round_is_refused(
    profiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(IOFailure, match=r"samples of 2 layers need about .* use fewer --tokens") as refused:
        taken(passing(profiled), tmp_path)
    assert "\n" not in str(refused.value)


# ---- training


def trained(thermocline: Thermocline, pack: Path, *argv: Any) -> dict[str, Any]:
    ran = thermocline("train", pack, *QUICK, *argv, "--json")
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    assert not pack.with_name("pack.train-unfinished").exists(), "it is over"
    return found


def test_predictors_are_trained_of_text_without_a_file_of_samples(
    thermocline: Thermocline, pack: Path, text: Path
) -> None:
    ran = thermocline("train", pack, *QUICK)
    assert ran.code == 2 and "--corpus FILES" in ran.err and ran.err.count("\n") == 1
    said = trained(thermocline, pack, "--corpus", text, "--text", text, "--tokens", "256")
    assert said["written"] and said["samples"] == 256 and (pack / FILE).exists()
    assert not (pack / "samples.safetensors").exists()
    assert {layer["kind"] for layer in said["layers"]} == {"sign"}


def test_predictors_do_not_depend_on_memory(
    thermocline: Thermocline,
    pack: Path,
    text: Path,
    sessions: Closed,  # noqa: F811
) -> None:
    """Rounds, fits and trials within a budget that holds few neurons: the same file, byte by byte."""
    asked = ("--corpus", text, "--text", text, "--tokens", "64")
    trained(thermocline, pack, *asked)
    before = (pack / FILE).read_bytes()
    (pack / FILE).unlink()
    assert sessions == []
    ram, ran = 0.001, None
    while ran is None or ran.code:  # each refusal names what is enough for its part
        sessions.clear()
        ran = thermocline("train", pack, *QUICK, *asked, "--ram", ram)
        named = re.search(r"use --ram ([\d.]+)", ran.err)
        assert ran.code == 0 or (ran.code == 5 and named is not None and float(named[1]) > ram), ran.err
        ram = ram if named is None else float(named[1])
    assert len(sessions) > 1, "rounds, and trials"
    assert all(from_disk for from_disk, _, _ in sessions), sessions
    assert all(nbytes <= ram * GIB for _, nbytes, _ in sessions)
    assert (pack / FILE).read_bytes() == before


def test_an_interrupted_training_goes_on_with_the_missing_layers(
    thermocline: Thermocline, pack: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("--corpus", text, "--text", text, "--tokens", "256")
    trained(thermocline, pack, *asked)
    wanted = (pack / FILE).read_bytes()
    (pack / FILE).unlink()
    offer, offered = shortlist.Shortlist.offer, []

    def interrupted(self: Any, p: Any, a: Any) -> float:
        offered.append(p.kind)
        if len(offered) == 2:
            raise KeyboardInterrupt
        return offer(self, p, a)

    monkeypatch.setattr(shortlist.Shortlist, "offer", interrupted)
    ran = thermocline("train", pack, *QUICK[:-1], *asked)
    assert ran.code == 130 and "goes on with the layers that are missing" in ran.err
    left = pack.with_name("pack.train-unfinished")
    assert (left / "layer-0.safetensors").exists() and not (left / "layer-1.safetensors").exists()
    monkeypatch.setattr(samples, "count", lambda *_: pytest.fail("the round was over"))
    trained(thermocline, pack, *asked)
    assert len(offered) == 3 and (pack / FILE).read_bytes() == wanted
    monkeypatch.undo()


def test_layers_of_another_training_are_not_taken(profiled: Path, tmp_path: Path) -> None:
    opened = Pack.open(Path(shutil.copytree(profiled, tmp_path / "pack")))
    spec = opened.spec
    source = passing(opened.path)
    ((_, rows),) = source.layers((0,), tmp_path)
    a = fits.layer_samples(opened, 0, rows)
    with closing(shortlist.FittedLayers(opened, {"seed": 0})) as fitted:
        fitted.add(0, FittedLayer.of(0, shortlist.Shortlist(spec, 64, forced=False), a, 1.0))
        assert fitted.missing == [1]
        with pytest.raises(UsageError, match="another process trains predictors"):
            shortlist.FittedLayers(opened, {"seed": 0})
    for made_for, missing in (({"seed": 0}, [1]), ({"seed": 1}, [0, 1])):
        with closing(shortlist.FittedLayers(opened, made_for)) as fitted:
            assert fitted.missing == missing
    path = fitted.directory / "layer-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with closing(shortlist.FittedLayers(opened, {"seed": 0})) as fitted:
        assert fitted.missing == [0, 1], "one is damaged"


def test_fits_that_do_not_fit_in_memory_are_refused_before_the_text_is_read(
    thermocline: Thermocline, pack: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "fit_bytes", lambda *_: 8 << 30)
    monkeypatch.setattr(samples, "count", lambda *_: pytest.fail("the text passed"))
    ran = thermocline("train", pack, *QUICK, "--corpus", text, "--ram", "0.2")
    assert ran.code == 5 and ran.err.count("\n") == 1
    assert "to fit a layer's predictors to 364 samples takes about 8.05 GiB" in ran.err
    assert "use --ram 8.05 or fewer --tokens of --corpus" in ran.err
