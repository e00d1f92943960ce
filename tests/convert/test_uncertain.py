"""Sources that say less than a model needs, or two things: what decides, and that it is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_twins
import transformers
import twins
from safetensors.numpy import load_file, save_file

from thermocline.convert import importer, pack_cache
from thermocline.errors import BadFile, Unsupported, UsageError
from thermocline.model import families
from thermocline.pack.pack import Pack

pytestmark = pytest.mark.oracle


def test_a_head_that_differs_from_the_embeddings_is_used_though_the_config_says_tied(tmp_path: Path) -> None:
    """transformers warns and does not tie them, and llama.cpp's converter writes it: it was ignored here."""
    src = twins.llama(tmp_path / "llama")
    twins._edit_config(src, lambda c: c.update(tie_word_embeddings=True))
    ids = list(range(3, 20))
    truth = twins.hf_logits(src, ids)
    model = test_twins.loaded(src)
    assert not model.spec.tied_head
    assert test_twins.nmse(model.logits(ids, len(ids)), truth) <= 1e-6

    tensors = load_file(src / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, src / "model.safetensors")
    importer.pack(src, tmp_path / "same", "f32")
    assert Pack.open(tmp_path / "same").spec.tied_head
    tensors["lm_head.weight"][-1, -1] += 1e-6
    save_file(tensors, src / "model.safetensors")
    importer.pack(src, tmp_path / "other", "f32")
    assert not Pack.open(tmp_path / "other").spec.tied_head


@pytest.mark.parametrize("family", ["Bamba", "FalconH1"])
def test_an_infinity_in_a_hybrids_config_does_not_make_it_a_bad_file(family: str, tmp_path: Path) -> None:
    """Theirs say `"time_step_limit": [0.0, Infinity]`, which is not JSON: they were called damaged."""
    config = getattr(transformers, f"{family}Config")().to_dict()
    config |= {"architectures": [f"{family}ForCausalLM"], "time_step_limit": [0.0, float("inf")]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "Infinity" in (tmp_path / "config.json").read_text()
    with pytest.raises(Unsupported, match=f"architecture '{family}ForCausalLM' is not supported"):
        families.read_config(tmp_path)
    other = {"architectures": ["LlamaForCausalLM"], "rope_theta": float("inf")}
    (tmp_path / "config.json").write_text(json.dumps(other))
    with pytest.raises(BadFile, match="Infinity is not JSON"):
        families.read_config(tmp_path)


def test_the_activation_that_a_user_chose_is_in_the_pack_and_in_the_caches_key(
    tmp_path: Path, thermocline: Callable[..., Any]
) -> None:
    src, cache = twins.qwen2_drelu(tmp_path / "SparseQwen2"), tmp_path / "cache"
    bench = ["bench", "-m", src, "-p", "4", "-n", "0", "-r", "1", "--cache-dir", cache]
    refused = thermocline(*bench)
    assert refused.code == 6 and refused.err.count("\n") == 1 and "--activation drelu" in refused.err
    assert thermocline(*bench, "--activation", "drelu").code == 0
    packs = [pack_cache.resolve(src, cache, None, activation=a) for a in ("drelu", "relu")]
    assert [Pack.open(p).spec.up_activation for p in packs] == ["relu", "none"]
    assert len(list(cache.iterdir())) == 2
    assert pack_cache.resolve(packs[0], cache, None, activation="drelu") == packs[0]
    with pytest.raises(UsageError, match="its activation is drelu, not relu"):
        pack_cache.resolve(packs[0], cache, None, activation="relu")
    out = tmp_path / "out"
    assert thermocline("pack", src, "-o", out, "--activation", "relu").code == 0
    assert Pack.open(out).spec.up_activation == "none"
    for command in (["inspect"], ["plan"]):
        assert thermocline(*command, out).code == 0
    wrong = thermocline("plan", out, "--activation", "drelu")
    assert wrong.code == 2 and "its activation is relu, not drelu" in wrong.err
