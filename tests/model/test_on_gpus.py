"""Families' twins on a stand-in for a GPU, in part and as a whole: the logits of the CPU, which are those of
transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import kept_twins
import placements
import pytest
import test_plan
from test_gpu import generated, gpu_ops, stand_in, storage
from test_gpu_layers import logits
from test_gpu_moe import Counting
from test_options import TOKENS, nmse

from thermocline.convert import importer
from thermocline.engine.decoder import bind
from thermocline.model.tensors import ALIGN
from thermocline.ops.device import StandIn
from thermocline.ops.kernels import torch_kernels
from thermocline.pack.pack import Pack
from thermocline.plan.hotness import Curve
from thermocline.plan.memory import Needs
from thermocline.plan.subject import of_model
from thermocline.session import gpu, gpu_loading, gpu_tier, gpu_weights, weights

pytestmark = pytest.mark.oracle
__all__ = ["stand_in"]  # fixtures

TWINS = (
    "glm4_moe", "glm4_moe_air", "ernie4_5_moe", "qwen3_moe", "granite_moe_shared", "phimoe", "smallthinker",
    "llama4", "gpt_oss", "olmoe", "minimax_m2", "hunyuan_moe", "cohere2", "stablelm_12b", "olmo3", "smollm3",
    "gemma4", "gemma4_moe", "gemma4_unified", "gemma4_small", "granite", "deepseek_v2", "qwen3_5_moe",
    "nemotron_h", "granite_hybrid", "lfm2_moe",
)  # fmt: skip


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pack]:
    base = tmp_path_factory.mktemp("packed")

    def made(name: str) -> Pack:
        path = base / name
        if not path.exists():
            importer.pack(kept_twins.write(name, base / f"{name}-hf"), path, "f32")
        return Pack.open(path)

    return made


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_says_the_same_wherever_its_layers_are(
    name: str, packed: Callable[[str], Pack], stand_in: StandIn
) -> None:
    """Prompts, chunks and single steps, past windows; three requests in company."""
    pack = packed(name)
    whole = weights.load(pack, threads=2)
    truth = logits(pack.spec, whole.weights, whole.ops)
    said = generated(pack, whole.weights, whole.ops, "exact")
    for seed in range(4):
        places = placements.some(pack.spec, seed) if seed else placements.whole(pack.spec)
        ops = gpu_ops(stand_in, pack.spec)
        made = gpu_weights.load(pack, places, (stand_in,), ops.cpu)
        y = logits(pack.spec, made, ops, places, chunk=(TOKENS, 1, 5, 1)[seed])
        assert max(nmse(a, b) for a, b in zip(y, truth, strict=True)) < 1e-6, places
        ops.forget()
        if seed < 2:
            assert generated(pack, made, ops, "exact", storage=storage(places)) == said


@pytest.mark.parametrize("name", TWINS)
def test_a_plan_counts_what_is_taken_of_a_device(name: str, packed: Callable[[str], Pack]) -> None:
    """All that can be is there; then some of it. Keys and values are `KVCache`'s to count."""
    pack, vram = packed(name), 1 << 30
    said = []
    for _ in range(3):
        device = Counting()
        found = (gpu.OpenGpu(device, torch_kernels, vram),)
        here = replace(test_plan.NO_DISK, gpu=replace(gpu.PRETENDED, vram_bytes=vram))
        made = gpu_tier.planned_of(found, of_model(pack, "exact", Curve()), here, Needs("exact", 64, 3, 2))
        assert made is not None and made[0].plan is not None
        plan = made[0].plan.bytes["gpu"]
        opened = gpu_loading.opened(pack, made[0], made[1], None, None, threads=2, max_batch=3, progress=None)
        loaded = opened.loaded
        bind(pack.spec, loaded.weights, loaded.ops)
        later = ("runtime", "keys and values", "recurrent states")  # a session's
        promised = sum(size for part, size in plan.items() if part not in later)
        assert promised - ALIGN * len(pack.tensors) < device.taken <= promised
        said.append(generated(pack, loaded.weights, loaded.ops, "exact", storage=opened.storage))
        vram = sum(plan.values()) - plan.get("attention", 0) // 3
        device.close()
    assert said[0] == said[1] == said[2]
