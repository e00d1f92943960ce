"""The memory plan against what the core takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import golden_models
import kept_twins
import mixed
import pytest

from thermocline import LLM, SamplingParams, _native
from thermocline.cli import main
from thermocline.engine.prefill_budget import PREFILL_CHUNK
from thermocline.ops.cpu import CpuOps
from thermocline.pack.pack import Pack
from thermocline.plan.memory import layer_shape
from thermocline.session import weights

CONTEXT, THREADS = 512, 2


@pytest.mark.parametrize("name", golden_models.MODELS)
@pytest.mark.parametrize("format", ["f32", "q4_0"])
def test_the_core_s_scratch_is_below_its_bound_and_not_far(tmp_path: Path, name: str, format: str) -> None:
    """A prompt as long as a chunk, then a batch of few. A mixture counts inputs in f32 and in int8."""
    source, pack = golden_models.write(name, tmp_path / "hf"), tmp_path / "pack"
    assert main.main(["pack", str(source), "-o", str(pack), "--format", format, "-q"]) == 0
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    with LLM(pack, threads=THREADS, context=CONTEXT, max_batch=2, gpu="off") as llm:
        llm.generate(["a" * (PREFILL_CHUNK + 20), "b"], params)
        ops = llm.engine.ops
        assert isinstance(ops, CpuOps)
        taken = ops.native.scratch_bytes
        bound = _native.scratch_bytes(
            layer_shape(llm.spec), tokens=PREFILL_CHUNK, positions=CONTEXT, threads=THREADS
        )
    assert 0.25 * bound < taken <= bound


APART = {  # forms of an input that no two of a layer's matrices have in common
    "blocks": ("q4_k", "q6_k", "q2_k"),
    "a float beside blocks": ("f16", "q8_0", "q6_k"),
}


@pytest.mark.parametrize("formats", APART)
@pytest.mark.parametrize("kind", ["dense", "relu"])
def test_inputs_in_several_forms_stay_below_the_bound(tmp_path: Path, kind: str, formats: str) -> None:
    """Of a model whose inputs are nearly all of its scratch."""
    spec = replace(
        mixed.SPECS[kind], dim=8192, ffn_dim=256, n_layers=1, n_heads=2, n_kv_heads=1, max_context=1024
    )
    names = [*(f"layers.0.{n}.weight" for n in "qkv"), "layers.0.gate.weight", "layers.0.up.weight"]
    own = dict(zip(names, APART[formats] * 2, strict=False)) | {"layers.0.up": APART[formats][1]}
    pack = mixed.pack_of(tmp_path / "p", spec, own, "q8_0")
    loaded = weights.load(pack, threads=THREADS)
    ids = [1] * PREFILL_CHUNK
    mixed.logits(spec, loaded, ids, PREFILL_CHUNK, "exact")
    bound = _native.scratch_bytes(layer_shape(spec), tokens=PREFILL_CHUNK, positions=CONTEXT, threads=THREADS)
    assert 0.3 * bound < loaded.ops.native.scratch_bytes <= bound


def test_each_number_of_a_shape_counts() -> None:
    shape: dict[str, Any] = {
        "dim": 512, "ffn_dim": 2048, "experts": 4, "active": 2, "heads": 8, "kv_heads": 2, "head_dim": 64,
        "shared_dim": 256, "dense_dim": 3072,
    }  # fmt: skip
    work = {"tokens": 256, "positions": 1024, "threads": 2}
    least = _native.scratch_bytes(_native.LayerShape(**shape), **work)
    for key in ("dim", "ffn_dim", "experts", "active", "heads", "head_dim", "shared_dim", "dense_dim"):
        wider = _native.LayerShape(**(shape | {key: 2 * shape[key]}))
        assert _native.scratch_bytes(wider, **work) > least, key
    for key in work:
        more = work | {key: 2 * work[key]}
        assert _native.scratch_bytes(_native.LayerShape(**shape), **more) > least, key


def test_sizes_that_no_model_has_are_refused() -> None:
    with pytest.raises(ValueError, match="heads do not divide"):
        _native.LayerShape(dim=1, ffn_dim=1, experts=1, active=1, heads=3, kv_heads=2, head_dim=1)
    with pytest.raises(ValueError, match="out of range"):
        _native.LayerShape(dim=0, ffn_dim=1, experts=1, active=1, heads=1, kv_heads=1, head_dim=1)


@pytest.mark.parametrize("name", ["gemma4", "gemma4_moe", "gemma4_small"])
@pytest.mark.parametrize("format", ["f32", "q8_0"])
def test_layers_of_two_kinds_stay_below_the_bound(name: str, format: str, tmp_path: Path) -> None:
    """Heads of two sizes, an FFN beside the experts, what tokens bring to layers."""
    source, pack = kept_twins.write(name, tmp_path / "hf"), tmp_path / "pack"
    assert main.main(["pack", str(source), "-o", str(pack), "--format", format, "-q"]) == 0
    loaded = weights.load(Pack.open(pack), threads=THREADS)
    spec, ids = Pack.open(pack).spec, [5] * PREFILL_CHUNK
    for chunk in (PREFILL_CHUNK, 1):
        mixed.logits(spec, loaded, ids[: 512 if chunk > 1 else 3], chunk, "exact")
    bound = _native.scratch_bytes(layer_shape(spec), tokens=PREFILL_CHUNK, positions=CONTEXT, threads=THREADS)
    assert 0.2 * bound < loaded.ops.native.scratch_bytes <= bound
