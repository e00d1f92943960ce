"""`bench/gpu/gpu.py` without a GPU: its comparisons find faults; its measurements run on the stand-in."""

from __future__ import annotations

import errno
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thermocline.errors import DeviceFailure, OutOfBudget
from thermocline.machine import hardware, this_machine, tiers
from thermocline.ops.device import StandIn
from thermocline.ops.device_rows import DeviceRows
from thermocline.ops.kernels import torch_kernels
from thermocline.pack.pack import Pack
from thermocline.session import gpu as tier
from thermocline.session import gpu_weights

pytestmark = pytest.mark.oracle

BENCH = Path(__file__).parents[2] / "bench"
ROOMS = [str(BENCH / room) for room in ("gpu", "llamacpp", "engine")]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "hidden_act": "silu",
    "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 512, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    sys.path[:0] = ROOMS
    names = (
        "build_llamacpp", "gpu", "gpu_check", "gpu_llama", "gpu_models", "gpu_report", "gpu_results",
        "gpu_run", "gpu_sides",
    )  # fmt: skip
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    del sys.path[: len(ROOMS)]


@pytest.fixture
def stand_in() -> tier.OpenGpu:
    found = tier.find("stand-in")
    assert found is not None
    return found


# ---- correctness


def test_every_placement_and_number_of_tokens_is_right(
    bench: Any, stand_in: tier.OpenGpu, tmp_path: Path
) -> None:
    found = bench.gpu_check.check(stand_in, tmp_path, "tiny", ["q4_0"], lambda *_: None)
    said = bench.gpu_check.summary(found)
    assert said["wrong"] == [] and said["same_tokens"] and 0 < said["worst_nmse"] <= bench.gpu_check.INT8_NMSE
    assert {(r.kind, r.sparsity) for r in found} == {
        (k, s) for k in ("gated", "ungated", "mixture") for s in ("exact", "predict")
    } | {("dense", "off"), ("experts", "off")}
    assert {r.tokens for r in found} == {1, 4, 16, 40}
    assert {r.placement for r in found if r.kind == "gated"} == {
        "all", "attention", "FFNs", "layers in turn", "divided"
    }  # fmt: skip


def test_a_mixture_is_right_wherever_its_experts_are(
    bench: Any, stand_in: tier.OpenGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And found wrong where tokens go elsewhere."""
    z = bench.gpu_check.SIZES["tiny"]
    whole = bench.gpu_check.written(bench.gpu_check.kinds(z)["experts"], "f16", tmp_path / "whole")
    found = list(bench.gpu_check.of_pack(stand_in, whole, z, "experts"))
    assert all(r.right for r in found) and "divided" in {r.placement for r in found}
    pack = bench.gpu_check.written(bench.gpu_check.kinds(z)["mixture"], "f16", tmp_path)
    assert (pack.spec.n_experts, pack.spec.sparse) == (4, True)
    found = list(bench.gpu_check.of_pack(stand_in, pack, z, "mixture"))
    assert {r.placement for r in found} == {"all", "attention", "FFNs", "layers in turn", "divided"}
    assert [r for r in found if not r.right] == [] and {r.tokens for r in found} == {1, 4, 16, 40}
    true = torch_kernels.route
    monkeypatch.setattr(torch_kernels, "route", lambda w, logits, *rest: true(w, -logits, *rest))
    found = list(bench.gpu_check.of_pack(stand_in, pack, z, "mixture"))
    assert [r for r in found if r.right] == []  # a GPU with any part of a layer is asked


@pytest.mark.parametrize("broken", ["down", "attention", "predict"])
def test_a_kernel_that_is_wrong_is_found(
    bench: Any, stand_in: tier.OpenGpu, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = getattr(torch_kernels, broken)

    def wrong(y: Any, *args: Any) -> None:
        true(y, *args)
        y.mul_(0 if broken == "predict" else 0.5)

    monkeypatch.setattr(torch_kernels, broken, wrong)
    z = replace(bench.gpu_check.SIZES["interpreted"], prompt=3)
    pack = bench.gpu_check.written(bench.gpu_check.kinds(z)["gated"], "f16", tmp_path)
    found = list(bench.gpu_check.of_pack(stand_in, pack, z, "gated"))
    asked = [r for r in found if r.placement == "all" and (broken != "predict" or r.sparsity == "predict")]
    assert asked and not any(r.right for r in asked)


def test_ungated_and_wide_bundles_go_to_the_device(
    bench: Any, stand_in: tier.OpenGpu, tmp_path: Path
) -> None:
    """Their records are shorter than a row as long as the layer: taken for the columns, it was refused."""
    config = bench.gpu_check.kinds(bench.gpu_check.SIZES["tiny"])["ungated"]
    pack = bench.gpu_check.written(config, "f32", tmp_path)
    places = gpu_weights.everywhere(pack.spec)
    from thermocline.ops.cpu import CpuOps

    made = gpu_weights.load(pack, places, (stand_in.device,), CpuOps(1))
    down = made.layers[0].experts[0].part.down
    assert isinstance(down, DeviceRows)
    assert (down.rows, down.columns, down.skip) == (512, 256, 0)


# ---- models


def test_a_model_repeats_the_layers_that_are_on_disk(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(CONFIG))
    shape = bench.gpu_models.Shape(str(tmp_path / "c.json"), "q8_0", 0.1)
    model = bench.gpu_models.made(shape, "predict", tmp_path)
    on_disk = Pack.open(tmp_path / "sparse" / "pack")
    assert (on_disk.spec.n_layers, model.pack.spec.n_layers, model.subject.spec.n_layers) == (2, 4, 4)
    offsets = [model.pack.tensors[f"layers.{i}.bundle"].offset for i in range(4)]
    assert offsets == [on_disk.tensors[f"layers.{w}.bundle"].offset for w in bench.gpu_models.order(4)]
    assert model.predictors is not None and model.predictors.count == 4
    assert 1 < model.subject.hotness.excess < 8
    layers = sum(t.bytes for n, t in model.pack.tensors.items() if n.startswith("layers."))
    assert layers < model.weights_bytes < layers + on_disk.weights_bytes


def test_a_dense_twin_has_as_many_weights(bench: Any) -> None:
    for name, active in (("opt-30b", 0.03), ("falcon-40b", 0.05), ("llama-2-70b", 0.18)):
        spec = bench.gpu_models.Shape(name, "f16", active).spec()
        config = bench.gpu_models.dense_twin(spec)
        ffn = (3 if spec.gated else 2) * spec.ffn_dim
        assert 0 <= 3 * config["intermediate_size"] - ffn < 96
        assert config["num_hidden_layers"] == spec.n_layers


# ---- llama.cpp's layers


def test_llama_gets_the_most_layers_that_fit(bench: Any) -> None:
    """Each takes 1 GiB, and 2 more for itself, which the first guess does not know."""
    taken = 0

    class Fake:
        def __init__(self, layers: int) -> None:
            nonlocal taken
            self.layers = layers
            taken += (layers + 2) << 30

        def __exit__(self) -> None:
            nonlocal taken
            taken -= (self.layers + 2) << 30

    for budget, expected in ((10, 8), (11, 9), (100, 21), (1, 0), (None, 21)):
        nbytes = None if budget is None else budget << 30
        found = bench.gpu_llama.fitted(Fake, 20, 21 << 30, nbytes, lambda: taken)
        assert (found.layers, found.vram_bytes) == (expected, (expected + 2) << 30)
        found.driver.__exit__()


def test_without_nvcc_llama_is_left_out_with_the_reason(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    why = bench.gpu_llama.prepared(Path("nowhere"), None, 1.0)
    assert why == "nvcc is not on the PATH: llama.cpp is not built with CUDA here"


def test_a_llama_that_was_built_elsewhere_needs_a_linker_alone(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    (tmp_path / "cuda" / "bin" / "libllama.so").write_bytes(b"")
    monkeypatch.setenv("PATH", "")
    assert bench.gpu_llama.prepared(tmp_path, tmp_path, 60.0).startswith("c++ is not on the PATH")
    linker = tmp_path / "c++"
    linker.write_text("#!/bin/sh\nexit 0\n")
    linker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bench.gpu_llama.prepared(tmp_path, tmp_path, 60.0) == tmp_path / "llama-driver-cuda"


def test_cheap_shapes_are_measured_first(bench: Any) -> None:
    work = bench.gpu.work_of(bench.gpu.arguments([]))
    assert [(s.label, v) for s, v in work[:2]] == [("llama-2-7b f16", "all"), ("llama-2-7b q4_0", "all")]
    assert len(work) == len(set(work)) == 24


# ---- one token


@pytest.mark.parametrize("side", [9, 7])
def test_a_profilers_trace_becomes_a_timeline_with_the_cpus_tasks(side: int, bench: Any) -> None:
    """Also where all of a graph is said to be in one stream: kernels then lie between the two copies."""

    def event(name: str, ts: float, dur: float, stream: int, cat: str = "kernel") -> dict[str, Any]:
        args = {"stream": stream}
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}

    trace = [
        event("norm", 0, 2, 7),
        event("Memcpy DtoH", 3, 1, side, "gpu_memcpy"),
        event("gate_up", 4, 5, 7),
        event("Memcpy HtoD", 14, 1, side, "gpu_memcpy"),
        event("Memcpy HtoD", 16, 1, side, "gpu_memcpy"),
        event("cudaGraphLaunch", 0, 1, 0, "cuda_runtime"),
    ]
    found = [(s.name, s.stream, s.begin_us, s.end_us) for s in bench.gpu_run.spans_of_trace(trace)]
    assert found == [
        ("norm", "stream 7", 0, 2), ("Memcpy DtoH", f"stream {side}", 3, 4), ("gate_up", "stream 7", 4, 9),
        ("CPU", "CPU", 4, 14), ("Memcpy HtoD", f"stream {side}", 14, 15),
        ("Memcpy HtoD", f"stream {side}", 16, 17),
    ]  # fmt: skip


# ---- what is said


def test_targets_are_met_missed_or_not_measured(bench: Any) -> None:
    def item(speed: float, **more: Any) -> dict[str, Any]:
        return {"tok_s": speed, "prompt_tok_s": 1.0} | more

    items = {
        "falcon-40b f16, 24, thermocline": item(9.0, plan_over_measured=1.3),
        "falcon-40b f16, 24, llama.cpp": item(1.0),
        "opt-30b f16, 24, thermocline": item(7.0, plan_over_measured=0.95),
        "opt-30b f16, all, thermocline": item(10.0),
        "opt-30b f16, 24, llama.cpp": item(1.0, scaled=True, layers=3, of_layers=48),
        "llama-2-7b f16, all, thermocline": item(10.0, roof_share=0.9),
    }
    said = {t.what: t for t in bench.gpu_report.targets(items)}
    met = {what: t.met for what, t in said.items() if t.met is not None}
    assert met == {
        "falcon-40b f16, 24 GiB, over llama.cpp": True,
        "opt-30b f16, 24 GiB, over llama.cpp": False,
        "llama-2-7b f16, all in VRAM, of the roof": True,
        "opt-30b f16, loss of 24 GiB against all in VRAM": False,
        "plan over measured, worst (falcon-40b f16, 24, thermocline)": False,
    }
    lines = "\n".join(bench.gpu_report.table(items))
    assert "scaled from 3 of 48 layers" in lines and "90% of the roof" in lines and "NOT met" in lines


# ---- all of it


@pytest.fixture(scope="module")
def measured() -> dict[tuple[int, str], Any]:
    return {}


@pytest.fixture
def measured_once(measured: dict[tuple[int, str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU as fast as an idle one, since a busy machine's figures make another plan; a GPU measured once."""
    true = tier.tiers_of

    def tiers_of(g: tier.OpenGpu, formats: Sequence[str], threads: int) -> Any:
        if (key := (g.free_bytes, formats[0])) not in measured:
            measured[key] = true(g, formats, threads)
        return measured[key]

    def tiers_here(threads: int = 0, *, formats: Iterable[str] = (), **_: Any) -> tiers.Tiers:
        kernels = {f: tiers.Kernel(15.0, 60.0) for f in formats}
        return tiers.Tiers(
            "this machine", "a test", tiers.CpuTier(8 << 30, 20.0, 1, 32 << 20, kernels), None, None
        )

    monkeypatch.setattr(tier, "tiers_of", tiers_of)
    monkeypatch.setattr(this_machine, "tiers_here", tiers_here)


@pytest.fixture
def rival(tmp_path: Path, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ourselves on the CPU in llama.cpp's place, over a pack of the shape's size."""
    (tmp_path / "few").mkdir()
    pack = bench.gpu_check.written(CONFIG, "q8_0", tmp_path / "few").path
    script, driver = tmp_path / "llama", BENCH / "llamacpp/thermocline_driver.py"
    script.write_text(
        f'#!/bin/sh\ntest -s "$1" || exit 9\nexec {sys.executable} {driver} {pack} "$2" 1,0,9,9\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(bench.gpu_llama, "prepared", lambda *_: script)


def test_everything_is_measured_once_and_the_rest_the_next_time(
    bench: Any, rival: None, measured_once: None, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.json").write_text(json.dumps(CONFIG))
    results = tmp_path / "r.json"
    argv = ["--gpu", "stand-in", "--shape", str(tmp_path / "t.json"), "--format", "q8_0", "--active", "0.1"]
    argv += ["--check", "f32", "--size", "interpreted", "--gen", "4", "--prompt", "8", "--runs", "2"]
    argv += ["--threads", "1", "--dir", str(tmp_path), "--results", str(results), "--spare", "0"]
    assert bench.gpu.main([*argv, "--vram", "all", "--budget-s", "0"]) == 0
    assert "run again" in capsys.readouterr().err
    assert set(json.loads(results.read_text())["items"]) == {"check f32", "card"}
    monkeypatch.setattr(bench.gpu_check, "check", lambda *_: pytest.fail("checked twice"))
    assert bench.gpu.main([*argv, "--vram", "all"]) == 0
    items = json.loads(results.read_text())["items"]
    ours, theirs = items["t q8_0, all, thermocline"], items["t q8_0, all, llama.cpp"]
    assert ours["all_in_vram"] and ours["sync"] is None and ours["arrangement"] == "alternating"
    assert len(ours["decode_ns"]) == len(theirs["prompt_ns"]) == 2
    assert (theirs["same_weights"], theirs["scaled"], theirs["gpu_layers"]) == (False, False, 5)
    assert ours["tok_s"] == pytest.approx(4e9 / (sum(ours["decode_ns"]) / 2))
    moved = ours["bytes_per_token"] * ours["tok_s"] / 1e9
    assert ours["roof_share"] == pytest.approx(moved / items["card"]["read_gbs"])
    drawn = json.loads((tmp_path / ours["timeline"]).read_text())
    assert {s["stream"] for s in drawn} == {"main"} and drawn[0]["begin_us"] == 0
    part = (ours["vram_bytes"] - 1_000_000) / 2**30
    assert bench.gpu.main([*argv, "--vram", f"{part:.6f}", "--json"]) == 0
    items = json.loads(results.read_text())["items"]
    (hybrid,) = (x for k, x in items.items() if k.endswith("thermocline") and ", all," not in k)
    assert not hybrid["all_in_vram"] and hybrid["roof_share"] is None and 0 < hybrid["gpu_share"] < 1
    sync = hybrid["sync"]
    waiting = sync["token_us"] - max(sync["gpu_alone_us"], sync["cpu_alone_us"])
    assert sync["handovers"] > 0 and sync["sync_us_per_layer"] == pytest.approx(waiting / sync["handovers"])
    streams = {(s["name"], s["stream"]) for s in json.loads((tmp_path / hybrid["timeline"]).read_text())}
    assert ("CPU", "beside") in streams or ("CPU", "main") in streams
    assert items["t q8_0, all, thermocline"] == ours


def test_without_a_gpu_correctness_is_checked_and_nothing_is_measured(
    bench: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "unusable", lambda *_: "no NVIDIA driver found")
    argv = ["--check", "f16", "--size", "interpreted", "--results", str(tmp_path / "r.json")]
    assert bench.gpu.main(argv) == 0
    said = capsys.readouterr().err
    assert "no GPU: no NVIDIA driver found" in said and "all right" in said and "no GPU is measured" in said
    assert set(json.loads((tmp_path / "r.json").read_text())["items"]) == {"check f16"}
    assert bench.gpu.main([*argv, "--gpu", "7"]) == 6
    (tmp_path / "r.json").write_text("{}")
    assert bench.gpu.main(argv) == 2
    assert "not written by bench/gpu/gpu.py" in capsys.readouterr().err


# ---- what goes wrong


@dataclass(frozen=True)
class Bench:
    """Calls of bench/gpu/gpu.py that measure one small shape on the stand-in, its check passed before."""

    modules: Any
    tmp: Path
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *more: str, vram: str = "all") -> tuple[int, dict[str, Any], str]:
        argv = [
            "--gpu",
            "stand-in",
            "--shape",
            str(self.tmp / "t.json"),
            "--format",
            "q8_0",
            "--check",
            "f32",
        ]
        argv += [
            "--gen",
            "2",
            "--prompt",
            "4",
            "--runs",
            "2",
            "--threads",
            "1",
            "--spare",
            "0",
            "--vram",
            vram,
        ]
        argv += ["--dir", str(self.tmp), "--build-dir", str(self.tmp / "b"), "--results", str(self.results)]
        code = self.modules.gpu.main([*argv, *more])
        text = self.results.read_text()
        assert str(self.tmp) not in text and str(Path.home()) not in text, "a machine's paths"
        return code, json.loads(text)["items"], self.capsys.readouterr().err

    @property
    def results(self) -> Path:
        return self.tmp / "r.json"


OURS, THEIRS = "t q8_0, all, thermocline", "t q8_0, all, llama.cpp"


@pytest.fixture
def call(
    bench: Any, measured_once: None, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> Bench:
    (tmp_path / "t.json").write_text(json.dumps(CONFIG))
    right = bench.gpu_check.Result("gated", "f32", "all", "exact", 1, 1e-9, 1e-4, True)
    monkeypatch.setattr(bench.gpu_check, "check", lambda *_: [right])
    monkeypatch.setenv("PATH", "")  # no nvcc
    return Bench(bench, tmp_path, capsys)


def driver_of(path: Path, answers: str) -> Path:
    """In llama.cpp's place, a Python of these lines."""
    path.write_text(f"#!{sys.executable}\nimport sys, time\n{answers}\n")
    path.chmod(0o755)
    return path


ANSWER = "print('{\"ns\": 1000}', flush=True)"


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_is_full_is_a_record_and_tried_again(
    call: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", no_space)  # of a pack
        patch.setattr(call.modules.gpu_sides, "made", lambda *_: no_space())
        code, items, _ = call()
    assert (
        code == 0 and items[OURS]["refused"] == "[Errno 28] No space left on device" and items[OURS]["again"]
    )
    code, items, _ = call()
    assert code == 0 and items[OURS]["tok_s"] > 0


def test_a_full_disk_under_llamas_file_leaves_our_record(
    call: Bench, rival: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call.modules.gpu_sides, "write_gguf", no_space)
    for again in (True, False):  # twice, and no more
        code, items, _ = call()
        assert code == 0 and "No space left" in items[THEIRS]["refused"] and items[THEIRS]["again"] is again
    code, after, _ = call()
    assert after == items


def test_too_little_vram_is_a_record_for_good(call: Bench) -> None:
    """And the next memory is measured."""
    code, items, err = call(vram="0.4")
    assert code == 0 and items["t q8_0, 0.4, thermocline"]["refused"] == "the plan is to leave the GPU alone"
    assert items["t q8_0, 0.4, thermocline"]["again"] is False
    assert "llama.cpp is left out: nvcc is not on the PATH" in err
    code, items, _ = call("--vram", "0.4", "all")
    assert items[OURS]["tok_s"] > 0 and items[OURS]["without_llama"].startswith("nvcc is not on the PATH")


def test_too_little_ram_is_tried_again_by_each_call(call: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a record for good, on a machine whose RAM grows as it is used."""

    def scarce(*_: Any) -> None:
        raise OutOfBudget("3 GiB of RAM are too few")

    with monkeypatch.context() as patch:
        patch.setattr(call.modules.gpu_sides.Machine, "session_of", scarce)
        for tries in (1, 2, 3):
            code, items, _ = call()
            assert code == 0 and items[OURS]["refused"] == "3 GiB of RAM are too few"
            assert items[OURS]["again"] and items[OURS]["tries"] == tries
    code, items, _ = call()
    assert code == 0 and items[OURS]["tok_s"] > 0


def test_ram_that_grows_is_counted_as_it_will_be(
    call: Bench, rival: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's file does not fit what the system says that there is, 256 MiB in use of a little more."""
    monkeypatch.setattr(hardware, "_system_memory", lambda root: ((256 << 20) + (1 << 17), 1 << 17))
    _, items, _ = call()
    assert "no room for a layer" in items[THEIRS]["refused"] and items[THEIRS]["again"]
    code, items, _ = call("--ram", "4")
    assert code == 0 and items[THEIRS]["tok_s"] > 0
    assert hardware._system_memory(Path("/")) == (4 << 30, (4 << 30) - (256 << 20))


def test_a_repository_that_is_read_only_is_said_before_anything_is_measured(
    call: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_text", read_only)
    monkeypatch.setattr(call.modules.gpu_check, "check", lambda *_: pytest.fail("checked in vain"))
    argv = ["--gpu", "stand-in", "--results", str(call.results)]
    assert call.modules.gpu.main(argv) == 4
    assert "cannot be written (Read-only file system); give another --results" in call.capsys.readouterr().err


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_llama_that_ends_leaves_our_record(
    after: int, call: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it loads, makes its context, is measured."""
    driver = driver_of(call.tmp / "llama", f"for _ in range({after}):\n {ANSWER}\n sys.stdin.readline()")
    monkeypatch.setattr(call.modules.gpu_llama, "prepared", lambda *_: driver)
    code, items, _ = call()
    assert code == 0 and items[OURS]["tok_s"] > 0 and len(items[OURS]["decode_ns"]) == 2
    assert items[THEIRS]["refused"] == "llama.cpp: llama.cpp ended with code 0" and items[THEIRS]["again"]
    ours = items[OURS]
    code, items, _ = call()
    assert items[OURS] == ours and not items[THEIRS]["again"]


@pytest.mark.parametrize("says", ["", ANSWER])
def test_a_llama_that_does_not_answer_is_ended(
    says: str, call: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it starts, when it is asked."""
    driver = driver_of(call.tmp / "llama", f"{says}\ntime.sleep(600)")
    monkeypatch.setattr(call.modules.gpu_llama, "prepared", lambda *_: driver)
    monkeypatch.setattr(call.modules.gpu_sides, "SLACK_S", 0.0)
    monkeypatch.setattr(call.modules.gpu_sides.Clock, "left", 0.5)
    code, items, _ = call()
    assert code == 0
    assert items[OURS]["tok_s"] > 0 and items[THEIRS]["refused"] == "llama.cpp: llama.cpp ended with code -9"


def test_a_measurement_that_time_ends_has_the_runs_that_there_were(
    call: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at least; and what is looked into afterwards is left out."""
    sides, left = call.modules.gpu_sides, iter([True, True])
    monkeypatch.setattr(sides.Machine, "more", lambda _: next(left, False))
    _, items, _ = call("--runs", "50")
    assert len(items[OURS]["decode_ns"]) == 3 and "timeline" not in items[OURS]


def test_a_call_that_is_cut_off_in_a_measurement_is_gone_on_with_twice(
    call: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `timeout` does; a call that is killed leaves the file the same."""
    run = call.modules.gpu_run

    def cut(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run.Loaded, "decode", cut)
        for _ in range(2):
            code, items, err = call()
            assert code == 130 and set(items) == {"check f32", "card"} and "it goes on" in err
            assert not list(call.tmp.glob("thermocline-gpu-*"))
    code, items, _ = call()
    assert code == 0 and items[OURS]["refused"].startswith("cut off 2 times in its midst")


def test_a_card_that_fails_once_is_a_record_and_one_that_is_gone_ends_the_call(
    call: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = call.modules.gpu_run

    def fails(*_: Any) -> None:
        raise DeviceFailure("stand-in: CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(run.Loaded, "prefill", fails)
        code, items, _ = call()
        assert code == 0 and "illegal memory access" in items[OURS]["refused"] and items[OURS]["again"]
    with monkeypatch.context() as patch:
        patch.setattr(run.Loaded, "prefill", fails)
        patch.setattr(call.modules.gpu_sides.Machine, "check_card", fails)
        code, items, err = call()
        assert code == 8 and err.splitlines()[-1].startswith("bench/gpu/gpu.py: ")
        assert not items[OURS]["again"]


def test_a_profiler_that_may_not_look_leaves_the_figures(
    call: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES\nmore")

    monkeypatch.setattr(call.modules.gpu, "timeline", fails)
    _, items, _ = call()
    assert (
        items[OURS]["tok_s"] > 0 and items[OURS]["not_looked_into"] == "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"
    )


def test_what_a_killed_call_left_in_ram_goes(call: Bench) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    mine, stranger = (call.tmp / f"thermocline-gpu-{x}" for x in (f"{ended.pid}-abc", "x"))
    for directory in (mine, stranger):
        directory.mkdir()
        (directory / "weights.bin").write_bytes(b"0")
    call("--budget-s", "0")
    assert not mine.exists() and stranger.exists()


def test_a_results_file_that_cannot_be_written_is_said(call: Bench) -> None:
    call("--budget-s", "0")
    for text in ("{", "[]", '{"kind": "other"}'):
        call.results.write_text(text)
        assert call.modules.gpu.main(["--gpu", "stand-in", "--results", str(call.results)]) == 2
    argv = ["--gpu", "stand-in", "--results", str(call.results / "below")]
    assert call.modules.gpu.main(argv) == 4


def test_what_is_registered_for_one_model_is_released_before_the_next(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver refuses memory at an address that it still knows, and the next one's may be there."""
    known: list[int] = []
    found = tier.find("stand-in")
    assert found is not None
    monkeypatch.setattr(StandIn, "register", lambda _, address, nbytes: known.append(address))
    release = StandIn.release
    monkeypatch.setattr(StandIn, "release", lambda self: (known.clear(), release(self)))
    z = replace(bench.gpu_check.SIZES["interpreted"], prompt=3)
    pack = bench.gpu_check.written(bench.gpu_check.kinds(z)["gated"], "f16", tmp_path)
    seen = 0
    for _ in bench.gpu_check.of_pack(found, pack, z, "gated"):
        seen = max(seen, len(known))
    assert seen == 1 and not known
    found.device.close()


# ---- llama.cpp, built


@pytest.fixture
def tools(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """nvcc, cmake and c++ that do nothing and say so; a test gives them something to do."""
    found = tmp_path / "bin"
    found.mkdir()
    for name in ("nvcc", "cmake", "c++"):
        (found / name).write_text("#!/bin/sh\nexit 0\n")
        (found / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{found}:/usr/bin:/bin")
    monkeypatch.setattr(bench.build_llamacpp.sys, "stderr", open(os.devnull, "w"))  # noqa: SIM115
    return found


def test_a_build_that_fails_is_a_reason(bench: Any, tools: Path, tmp_path: Path) -> None:
    (tools / "cmake").write_text("#!/bin/sh\nexit 3\n")
    why = bench.gpu_llama.prepared(tmp_path / "b", tmp_path, 60.0)
    assert why == "its build failed: cmake -S ended with code 3, its errors are above"
    (tools / "cmake").write_text("#!/bin/sh\nexit 0\n")
    (tools / "c++").write_text("#!/bin/sh\nexit 1\n")
    why = bench.gpu_llama.prepared(tmp_path / "b", tmp_path, 60.0)
    assert why == "its build failed: c++ -O2 -std=c++17 ended with code 1, its errors are above"
    (tmp_path / "file").write_text("")
    assert "its build failed: " in bench.gpu_llama.prepared(tmp_path / "file", tmp_path, 60.0)


def test_a_source_that_cannot_be_fetched_is_a_reason(
    bench: Any, tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        bench.build_llamacpp.sys, "executable", str(tools / "nvcc")
    )  # a pip that brings nothing
    (tools / "nvcc").write_text("#!/bin/sh\nexit 1\n")  # one without a network
    assert "give --llama-source" in bench.gpu_llama.prepared(tmp_path / "b", None, 60.0)
    (tools / "nvcc").write_text("#!/bin/sh\nexit 0\n")
    assert bench.gpu_llama.prepared(tmp_path / "b", None, 60.0) == "its build failed: StopIteration"
    (tmp_path / "b" / f"x-{bench.build_llamacpp.VERSION}.tar.gz").write_text("no archive")
    assert bench.gpu_llama.prepared(tmp_path / "b", None, 60.0) == "its build failed: ReadError"


def test_a_build_that_takes_too_long_ends_with_all_that_it_started(
    bench: Any, tools: Path, tmp_path: Path
) -> None:
    """Compilers that go on would be measured beside."""
    (tools / "cmake").write_text(f"#!/bin/sh\nsleep 60 & echo $! > {tmp_path}/child\nwait\n")
    why = bench.gpu_llama.prepared(tmp_path / "b", tmp_path, 0.5)
    assert why == "its build was not finished after 0 s: run again, it goes on"
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            break
        time.sleep(0.02)
    else:
        pytest.fail("the compiler goes on")
