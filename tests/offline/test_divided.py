"""Divided work gives the bytes of undivided work: profiles, evaluations, traces, whatever the split."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_profile
import test_synth
from conftest import Ran
from divided import InTurn

from thermocline.cli import fan_out, main
from thermocline.cli.commands import evaluate, profile_pack, train
from thermocline.cli.commands.routing import profile_routes, trace
from thermocline.cluster import shards
from thermocline.errors import BadFile
from thermocline.offline import profiler
from thermocline.offline.counting import open_same
from thermocline.pack.pack import Pack

text = test_profile.text
Run = Callable[..., Ran]
SEEN_BY_CLOCK = ("seconds", "tokens_per_s", "threads", "path")


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let --processes N be N workers in this process."""

    @contextlib.contextmanager
    def workers(o: fan_out.FannedOut) -> Iterator[InTurn | None]:
        yield None if o.processes is None else InTurn(o.processes)

    for command in (evaluate, profile_pack, profile_routes, trace, train):
        monkeypatch.setattr(command, "workers_of", workers)


def files_of(pack: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(pack.iterdir())}


@pytest.mark.parametrize("most", [1, 3])
def test_a_profile_is_the_same_bytes_however_it_is_divided(
    tiny_pack: Path, text: Path, tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = Pack.open(tiny_pack)
    request = test_profile.request_for(pack, text, threads=1)
    for name, across, cut in (("one", None, None), ("all", InTurn(most), None), ("each", InTurn(most), 1)):
        if cut is not None:
            monkeypatch.setattr(shards, "sizes", lambda n, *_: [slice(i, i + 1) for i in range(n)])
        profiler.profile(replace(request, output=tmp_path / name, across=across), test_profile.quietly)
    one = files_of(tmp_path / "one")
    assert len(one) > 4 and one == files_of(tmp_path / "all") == files_of(tmp_path / "each")


def test_a_divided_profile_that_was_interrupted_goes_on_undivided(
    tiny_pack: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the other way round: the checkpoint does not know who counted."""
    monkeypatch.setattr(shards, "sizes", lambda n, *_: [slice(i, i + 2) for i in range(0, n, 2)])
    pack = Pack.open(tiny_pack)
    request = test_profile.request_for(pack, text, threads=1)
    profiler.profile(replace(request, output=tmp_path / "whole"), test_profile.quietly)
    for first, second in ((InTurn(2), None), (None, InTurn(2))):
        r = replace(request, output=tmp_path / "parts", overwrite=True)

        def interrupt(what: str, done: int, total: int, unit: str) -> None:
            if what == "counting" and done > total // 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            profiler.profile(replace(r, across=first), interrupt)
        done = profiler.profile(replace(r, across=second), test_profile.quietly)
        assert 0 < done.resumed_tokens < r.corpus.tokens
        assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("divided")
    config = test_synth.config_file(base, "qwen3-30b-a3b", num_experts=32)
    assert main.main(["synth", str(config), "--format", "q8_0", "-o", str(base / "pack"), "-q"]) == 0
    return base / "pack"


def test_a_mixture_s_profile_and_trace_are_the_same_bytes(
    mixture: Path, thermocline: Run, in_turn: None
) -> None:
    found = []
    for more in ([], ["--processes", "3"]):
        counted = thermocline("profile", mixture, "--tokens", 512, "--ctx", 64, "-t", 1, "-q", *more)
        assert counted.code == 0, counted.err
        played = thermocline("trace", mixture, "--json", "-q", "-n", 64, *more)
        assert played.code == 0, played.err
        found.append(((mixture / "routes.safetensors").read_bytes(), played.out))
    assert found[0] == found[1] and len(json.loads(found[0][1])["caches"]) > 7


@pytest.mark.parametrize("divided", [["--processes", "2"], ["--ray"]])
@pytest.mark.parametrize("command", ["profile", "profile of a mixture", "train", "trace"])
def test_a_gpu_beside_divided_work_is_refused_in_a_line(
    command: str, divided: list[str], tiny_pack: Path, mixture: Path, thermocline: Run
) -> None:
    """Before a text is read or Ray is started."""
    model = mixture if command in ("profile of a mixture", "trace") else tiny_pack
    told = thermocline(command.split()[0], model, "--gpu", "stand-in", *divided)
    assert told.code == 2 and not told.out
    assert told.err.strip().splitlines() == [
        "thermocline: --gpu stand-in: processes and machines compute on their CPUs; leave it out"
    ]


@pytest.mark.parametrize("more", [[], ["--against", "off"]])
def test_an_evaluation_is_the_same_number(
    more: list[str], thermocline: Run, in_turn: None, shared_text: Path
) -> None:
    found: list[dict[str, Any]] = []
    for divided in ([], ["--processes", "2"], ["--processes", "3"]):
        told = thermocline("eval", "-f", shared_text, "-c", 32, "--json", "-q", "-t", 1, *more, *divided)
        assert told.code == 0, told.err
        about = json.loads(told.out)
        found.append({k: v for k, v in about.items() if k not in SEEN_BY_CLOCK})
    assert found[0] == found[1] == found[2]
    assert found[0]["windows"] > 4 and found[0]["active_fraction"] > 0


@pytest.fixture
def shared_text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Once upon a time there was a king who had three sons. " * 20)
    return path


def test_a_worker_with_another_model_at_the_path_is_refused(tiny_pack: Path, mixture: Path) -> None:
    stamp = Pack.open(tiny_pack).stamp
    assert open_same(tiny_pack, stamp).stamp == stamp
    with pytest.raises(BadFile, match="another model here"):
        open_same(mixture, stamp)


def test_predictors_are_the_same_bytes(
    tiny_pack: Path, thermocline: Run, in_turn: None, tmp_path: Path
) -> None:
    """Each layer is fitted on its own, wherever that is."""
    asked = ("--tokens", 800, "--ctx", 64, "--samples", 200, "-t", 1, "-q")
    text = tmp_path / "text"
    text.write_text(test_profile.TEXT * 12)
    assert thermocline("profile", tiny_pack, "-o", tmp_path / "one", "--corpus", text, *asked).code == 0
    for name, more in (("two", []), ("three", ["--processes", "2"])):
        shutil.copytree(tmp_path / "one", tmp_path / name)
        fit = ("--kind", "svd", "--max-kld", 9, "--max-ppl", 1e9, "--ctx", 32, "--limit", 1, "-t", 1, "-q")
        told = thermocline("train", tmp_path / name, *fit, *more)
        assert told.code == 0, told.err
    two, three = (files_of(tmp_path / name) for name in ("two", "three"))
    assert two == three and "predictors.safetensors" in two
