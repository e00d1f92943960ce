"""BitNet's ternary weights: what the twins do not show, and files that are damaged or of another kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import twins
from safetensors.numpy import save_file

from thermocline.convert.importer import pack
from thermocline.errors import BadFile, Unsupported
from thermocline.pack.pack import Pack

Tensors = dict[str, Any]
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.oracle
@pytest.mark.parametrize("recipe", [twins.bitnet_online, twins.bitnet_offline])
def test_matrices_have_three_values_and_the_others_many(
    recipe: Callable[[Path], Path], tmp_path: Path
) -> None:
    pack(recipe(tmp_path / "hf"), tmp_path / "p", "f32")
    p = Pack.open(tmp_path / "p")
    counts = {}
    for name, t in p.tensors.items():
        x = np.fromfile(p.weights_path, "<f4", t.bytes // 4, offset=t.offset)
        counts[name] = len(np.unique(x))
    assert counts["layers.0.gate.weight"] == counts["layers.0.attn_out.weight"] == 3
    assert counts["embed.weight"] > 1000 and counts["layers.0.ffn_norm.weight"] > 50


@pytest.mark.oracle
def test_checkpoints_saved_from_the_bare_model_are_ternary_too(tmp_path: Path) -> None:
    packs = []
    for bare in (False, True):
        hf = twins.bitnet_offline(tmp_path / f"hf{bare}")
        if bare:
            rewritten(hf, lambda all: {n.removeprefix("model."): w for n, w in all.items()})
        pack(hf, tmp_path / f"p{bare}", "f32")
        packs.append((tmp_path / f"p{bare}" / "weights.bin").read_bytes())
    assert packs[0] == packs[1]


@pytest.mark.oracle
def test_floats_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    def spoilt(tensors: Tensors) -> Tensors:
        tensors[DOWN][3, 4] = np.inf
        return tensors

    with pytest.raises(BadFile, match=r"down_proj.* not finite"):
        pack(rewritten(twins.bitnet_online(tmp_path / "hf"), spoilt), tmp_path / "p", "f32")


def rewritten(hf: Path, change: Callable[[Tensors], Tensors]) -> Path:
    file = hf / "model.safetensors"
    save_file(change(bf16_as_f32(file)), file)
    return hf


def bf16_as_f32(file: Path) -> Tensors:
    from safetensors.torch import load_file as load_torch

    return {n: (w.float() if w.is_floating_point() else w).numpy() for n, w in load_torch(file).items()}


DAMAGED: dict[str, tuple[Callable[[Tensors], Tensors], type[Exception], str]] = {
    "a fourth value": (lambda all: all | {DOWN: all[DOWN] | np.uint8(0x30)}, BadFile, "not -1, 0 or 1"),
    "no scale": (
        lambda all: {n: w for n, w in all.items() if n != f"{DOWN}_scale"}, BadFile, "has no weight_scale"
    ),
    "a scale a row": (
        lambda all: all | {f"{DOWN}_scale": np.ones(64, np.float32)}, BadFile, "weight_scale of one number"
    ),
    "NaN": (
        lambda all: all | {f"{DOWN}_scale": np.full(1, np.nan, np.float32)}, BadFile, "weight_scale nan"
    ),
    "fewer rows": (lambda all: all | {DOWN: all[DOWN][1:].copy()}, BadFile, "implies"),
    "floats": (
        lambda all: all | {DOWN: np.zeros((64, 112), np.float32)}, Unsupported, "bitnet-b1.58-2B-4T-bf16"
    ),
}  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("case", DAMAGED)
def test_packed_values_that_are_not_ternary_are_refused_in_a_line(case: str, tmp_path: Path) -> None:
    change, error, said = DAMAGED[case]
    hf = rewritten(twins.bitnet_offline(tmp_path / "hf"), change)
    with pytest.raises(error, match=said) as caught:
        pack(hf, tmp_path / "p", "f32")
    assert "\n" not in str(caught.value) and not (tmp_path / "p").exists()


@pytest.mark.oracle
@pytest.mark.parametrize(
    "change",
    [
        {"quant_method": "gptq"},
        {"linear_class": "bitlinear"},
        {"quantization_mode": "both"},
        {"use_rms_norm": True},
        {"modules_to_not_convert": ["q_proj"]},
        {"bits": 2},
    ],
)
def test_another_quantisation_is_refused_by_name(change: dict[str, Any], tmp_path: Path) -> None:
    hf = twins.bitnet_online(tmp_path / "hf")
    twins._edit_config(hf, lambda config: config["quantization_config"].update(change))
    with pytest.raises(Unsupported, match=f"quantization_config.*{next(iter(change))}"):
        pack(hf, tmp_path / "p", "f32")
