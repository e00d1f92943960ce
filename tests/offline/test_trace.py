"""`bench --trace`: what is recorded is what tokens need; the file is whole, or not there."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_synth
import tiny

from thermocline.errors import BadFile, IOFailure
from thermocline.offline import bench, need_trace
from thermocline.offline.activity import ProfileWorker, down_norms
from thermocline.offline.need_trace import read_trace, write_trace
from thermocline.ops.cpu import CpuOps
from thermocline.ops.interface import FFNStats
from thermocline.pack import sidecar
from thermocline.pack.pack import Pack
from thermocline.session import weights

Run = Callable[..., Any]
TOKENS, DEPTH = 12, 5


@pytest.fixture
def recorded(tiny_pack: Path, tmp_path: Path, thermocline: Run) -> Path:
    path = tmp_path / "a.trace"
    ran = thermocline("bench", "-m", tiny_pack, "--trace", path, "-n", TOKENS, "-d", DEPTH, "-t", 1, "-q")
    assert ran.code == 0, ran.err
    return path


def test_a_trace_has_the_neurons_that_a_prompt_of_the_same_tokens_activates(
    tiny_pack: Path, recorded: Path
) -> None:
    """The profiler's prefill sees the same text all at once, by another path through the kernels."""
    pack = Pack.open(tiny_pack)
    found = read_trace(recorded, pack)
    assert (found.tokens, found.depth, found.sparsity) == (TOKENS, DEPTH, "exact")
    ids = np.array(bench.random_tokens(pack.spec, 1, DEPTH + TOKENS), np.int32)
    loaded = weights.load(pack, threads=1)
    norms = down_norms(pack)
    worker = ProfileWorker.on_cpu(pack.spec, loaded.weights, ids[:1], 64, 1, norms)
    counted = worker.count(ids[1:], np.arange(len(ids) - 1), threading.Event())
    for i in range(pack.spec.n_layers):
        samples = [s for s in counted.samples if s.layer == i]
        rows = np.split(
            np.concatenate([s.index for s in samples]), np.cumsum(np.concatenate([s.sizes for s in samples]))
        )[:-1]
        for mine, theirs in zip(found.layer(i), rows[-TOKENS:], strict=True):
            assert np.array_equal(np.flatnonzero(mine), theirs)
    assert 0 < found.layer(0).mean() < 1


@pytest.mark.parametrize("shape", ["bamboo-7b", "turbosparse-mixtral"])
def test_of_drelu_a_neuron_is_needed_where_its_gate_is_open(
    shape: str, tmp_path: Path, thermocline: Run
) -> None:
    """Its up row is read then, and with it its whole bundle, even where the product is zero. Of a mixture
    that is so in the chosen experts alone.
    """
    pack, path = test_synth.make(tmp_path, shape, "f32"), tmp_path / "a.trace"
    seen: list[int] = []

    class Spy(need_trace.TraceRecorder):
        def ffn_add(
            self, x: Any, h: Any, bound: Any, sparsity: str, stats: FFNStats, record: Any = None, **more: Any
        ) -> None:
            own = FFNStats()
            CpuOps.ffn_add(self, x.copy(), h.copy(), bound, sparsity, own)
            super().ffn_add(x, h, bound, sparsity, stats, record, **more)
            if self._rows is not None:
                seen.append(own.rows - own.active)  # up rows and down rows, less down rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(need_trace, "TraceRecorder", Spy)
        ran = thermocline("bench", "-m", pack.path, "--trace", path, "-n", 4, "-t", 1, "-q")
    assert ran.code == 0, ran.err
    assert pack.spec.up_activation == "relu"
    found = read_trace(path, pack)
    counts = np.stack([found.layer(i).sum(1) for i in range(pack.spec.n_layers)], axis=1)
    assert counts.ravel().tolist() == seen[-counts.size :]


def test_ctrl_c_keeps_the_tokens_that_were_recorded(
    tiny_pack: Path, tmp_path: Path, thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0

    class Interrupted(need_trace.TraceRecorder):
        def ffn_add(self, *args: Any, **more: Any) -> None:
            nonlocal steps
            steps += self._rows is not None
            if steps == 2 * tiny.LAYERS:  # in the last layer of the second token
                raise KeyboardInterrupt
            super().ffn_add(*args, **more)

    monkeypatch.setattr(need_trace, "TraceRecorder", Interrupted)
    path = tmp_path / "a.trace"
    ran = thermocline("bench", "-m", tiny_pack, "--trace", path, "-n", TOKENS, "-q")
    assert ran.code == 130
    assert read_trace(path, Pack.open(tiny_pack)).tokens == 1


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--trace", "{tmp}/none/a"], 4, "no such directory"),
        (["--trace", "{tmp}"], 4, "is a directory"),
        (["--trace", os.devnull], 4, "is a device"),
        (["--trace", "{tmp}/a", "--replay", "{tmp}/b"], 2, "record first"),
        (["--trace", "{tmp}/a", "-n", "0"], 2, "no token"),
        (["--trace", "{tmp}/a", "-d", "40000"], 2, "the model's limit"),
        (["--trace", "{tmp}/a", "--gpu", "stand-in"], 2, "--gpu: --trace records what the CPU computes"),
        (["--trace", "{tmp}/a", "--vram", "1"], 2, "--vram: --trace"),
        (["--replay", "{tmp}/none"], 4, "record it with"),
        (["--replay", "{tmp}/none", "--ram", "1"], 2, "--ram: --replay runs no model"),
    ],
)
def test_what_cannot_be_done_is_said_before_the_weights_are_read(
    argv: list[str],
    code: int,
    words: str,
    tiny_pack: Path,
    tmp_path: Path,
    thermocline: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "load", lambda *_, **__: pytest.fail("the weights were read"))
    ran = thermocline("bench", "-m", tiny_pack, *(a.format(tmp=tmp_path) for a in argv))
    assert ran.code == code and words in ran.err and ran.err.count("\n") == 1


def test_a_dense_model_has_nothing_to_record(tmp_path: Path, thermocline: Run) -> None:
    hf = tiny.hf_directory(tmp_path / "hf", hidden_act="silu")
    assert thermocline("pack", hf, "-o", tmp_path / "pack", "--format", "f32", "-q").code == 0
    ran = thermocline("bench", "-m", tmp_path / "pack", "--trace", tmp_path / "a")
    assert ran.code == 6 and "every neuron" in ran.err


def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tiny_pack: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = Pack.open(tiny_pack)
    before, made = recorded.read_bytes(), read_trace(recorded, pack)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(IOFailure, match="No space left"):
        write_trace(recorded, pack, made)
    assert recorded.read_bytes() == before
    assert [p.name for p in recorded.parent.iterdir()] == [recorded.name]


def test_a_trace_of_another_pack_or_a_damaged_one_is_refused(tiny_pack: Path, recorded: Path) -> None:
    pack = Pack.open(tiny_pack)
    facts = {"tokens": TOKENS, "source": "", "sparsity": "exact", "depth": 0}

    def rewritten(stamp: str, shape: tuple[int, int], **changes: Any) -> None:
        layout: Any = {f"layers.{i}.active": ("u1", shape) for i in range(pack.spec.n_layers)}
        arrays = [np.zeros(shape, np.uint8)] * pack.spec.n_layers
        sidecar.write(recorded, need_trace.KIND, stamp, facts | changes, layout, arrays)

    own, shape = sidecar.stamp(tiny_pack), (TOKENS, tiny.FFN // 8)
    rewritten(own, shape)
    assert not read_trace(recorded, pack).layer(1).any()
    for stamp, given, changes, words in (
        ("0" * 64, shape, {}, "another pack"),
        (own, (TOKENS, tiny.FFN // 8 - 1), {}, "layers.0.active"),
        (own, shape, {"tokens": TOKENS + 1}, "layers.0.active"),
        (own, shape, {"tokens": True}, "not numbers"),
        (own, shape, {"source": 1}, "source"),
    ):
        rewritten(stamp, given, **changes)
        with pytest.raises(BadFile, match=words):
            read_trace(recorded, pack)
    recorded.write_bytes(recorded.read_bytes()[:-1])
    with pytest.raises(BadFile):
        read_trace(recorded, pack)
