"""`pack --format q4_k_m`: what is written, what the model's inputs are, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny

from thermocline.cli.main import main
from thermocline.convert.importer import pack as import_pack
from thermocline.engine.decoder import bind, forward
from thermocline.engine.kv_cache import KVCache, blocks_for
from thermocline.errors import BadFile, UsageError
from thermocline.model.mixes import formats_of
from thermocline.offline.packing import over_texts
from thermocline.offline.packing import quantise_pack as steps
from thermocline.offline.packing.collect import collect
from thermocline.offline.packing.rows import PackRows
from thermocline.ops.interface import Batch, FFNStats
from thermocline.pack.pack import Pack, verify
from thermocline.quantise.importance import of_moments
from thermocline.session import weights

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 512}


def silent(what: str, done: int, of: int, unit: str) -> None:
    """Show nothing."""


def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, activation: str) -> Pack:
    """A pack of f32 weights, 256 wide."""
    monkeypatch.setattr(tiny, "DIM", 256)
    monkeypatch.setattr(tiny, "FFN", 512)
    source = tiny.hf_directory(tmp_path / f"hf-{activation}", hidden_act=activation, **SHAPE)
    import_pack(source, tmp_path / f"f32-{activation}", "f32")
    return Pack.open(tmp_path / f"f32-{activation}")


TEXT = "It was the best of times, it was the worst of times. " * 60


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_a_pack_has_the_mixs_formats_and_calibration_lowers_its_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, activation: str
) -> None:
    source = model(tmp_path, monkeypatch, activation)
    texts = over_texts.windows_for(source, TEXT, 512)
    moments = over_texts.measure_inputs(source, texts, 1, silent)
    klds = []
    for name, known in (("plain", {}), ("calibrated", moments)):
        job = steps.QuantiseJob(source, tmp_path / name, "q3_k_m", 1, moments=known)
        made = steps.quantise(job, silent)
        written = Pack.open(job.output)
        assert not verify(written) and 0.05 < made.rms_error < 0.2 and made.bits < 5
        stored = {n: t.format for n, t in written.tensors.items()}
        wanted = formats_of("q3_k_m", source.spec, importance=bool(known))
        assert all(f == wanted[n] for n, f in stored.items() if n in wanted)
        klds.append(over_texts.divergence(written, source, texts, 1, silent).kld.value)
    assert 0 < klds[1] < 0.8 * klds[0]


def test_moments_are_those_of_the_models_own_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting changes nothing: the same stream passes the layers, and the head's input is its norm."""
    source = model(tmp_path, monkeypatch, "silu")
    ids = np.arange(40, dtype=np.int32)[None]
    loaded = weights.load(source, threads=1)
    found = collect(source.spec, loaded.weights, ids, threads=1, window=64)
    kv, table = KVCache(source.spec, blocks_for(40)), np.arange(blocks_for(40), dtype=np.int32)[None]
    seen = []

    class Watch(type(loaded.ops)):  # type: ignore[misc]
        def head(self, x, rows, project):  # type: ignore[no-untyped-def]
            seen.append(x.copy())
            return super().head(x, rows, project)

    ops = Watch(1)
    at = np.arange(40, dtype=np.int32)
    batch = Batch(ids[0], at, np.zeros(40, np.int32), table, at, table)
    forward(bind(source.spec, loaded.weights, ops), kv, batch, ops, sparsity="exact", stats=FFNStats())
    head = found["head"][0]
    assert np.allclose(head.importance, np.square(seen[0]).mean(axis=0), rtol=1e-3)
    assert np.allclose(head.products[1], seen[0][:, 64:128].T @ seen[0][:, 64:128], rtol=1e-2, atol=1e-2)
    assert {n.partition(".")[2] for n in found if n.startswith("layers.")} == {
        f"{i}.{part}" for i in range(source.spec.n_layers) for part in ("qkv", "attn_out", "ffn", "down")
    }
    assert of_moments(found)["layers.1.down"].shape == (1, 512)


def test_rows_that_have_the_format_already_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model(tmp_path, monkeypatch, "relu")
    for n, src in (("a", source), ("b", None)):
        job = steps.QuantiseJob(src or Pack.open(tmp_path / "a"), tmp_path / n, "q4_0", 1)
        steps.quantise(job, silent)
    assert (tmp_path / "a/weights.bin").read_bytes() == (tmp_path / "b/weights.bin").read_bytes()


def test_weights_that_are_nan_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = model(tmp_path, monkeypatch, "silu")
    read = PackRows.__call__

    def damaged(self: PackRows, name: str, first: int, last: int) -> object:
        x = read(self, name, first, last)
        return x * np.float32(np.nan) if name == "layers.1.gate.weight" else x

    monkeypatch.setattr(PackRows, "__call__", damaged)
    with pytest.raises(BadFile, match=r"layers.1.gate.weight: row 0 has weights that are NaN"):
        steps.quantise(steps.QuantiseJob(source, tmp_path / "out", "q4_0", 1), silent)


def test_the_command_prints_what_it_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = model(tmp_path, monkeypatch, "relu")
    (tmp_path / "text").write_text(TEXT)
    out, text, own = str(tmp_path / "out"), str(tmp_path / "text"), str(tmp_path / "own")
    argv = ["pack", str(source.path), "-o", out, "--format", "q4_k_m", "--json", "-t", "1"]
    calibrate = ["--calibrate", text, "--calibrate-tokens", "512", "--importance-out", own]
    assert main([*argv, *calibrate]) == 0
    made = json.loads(capsys.readouterr().out)["quantised"]
    assert made["measured_on"].startswith(text) and 0 < made["kld"] < 1 and made["bits"] < 6
    assert main([*argv, "--force", "--importance", own, "--measure", text]) == 0
    again = json.loads(capsys.readouterr().out)["quantised"]
    assert again["kld"] > 0 and again["rms_errors"]["down"] > 0


@pytest.mark.parametrize(
    ("argv", "wrong"),
    [
        (["--calibrate", "x"], "with --format only"),
        (["--format", "q4_0", "--importance-out", "x"], "give a text"),
        (["--format", "q4_9"], "q4_k_m"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    tiny_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], wrong: str
) -> None:
    assert main(["pack", str(tiny_pack), "-o", str(tmp_path / "out"), *argv]) == UsageError.exit_code
    assert wrong in capsys.readouterr().err


def test_a_hugging_face_source_leaves_no_copy(tmp_path: Path) -> None:
    source = tiny.hf_directory(tmp_path / "hf", hidden_act="silu")
    assert main(["pack", str(source), "-o", str(tmp_path / "out"), "--format", "q4_0", "-q", "-t", "1"]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "out"]
