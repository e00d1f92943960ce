"""Twins as transformers wrote them once: their JSON files and shapes are kept, their numbers are drawn anew.

    python tests/kept_twins.py      # records them anew; needs the extra test-all

So tests of readers and packers need no torch. transformers' logits of some are kept too, to compare with.
Like `twins.py` it imports nothing of ours.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import twins
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

HERE = Path(__file__).parent
SHAPES, TRUTH = HERE / "kept_twins.json", HERE / "kept_twins.npz"
Json = dict[str, Any]

# One per shape of code: two norms and activations, rope scalings, windows, fused and parallel blocks.
LOGITS = (
    "llama_relu_tied",
    "llama3",
    "bamboo",
    "opt",
    "qwen3",
    "gemma3",
    "phi3",
    "nemotron",
    "falcon_7b",
    "minicpm",
    "qwen3_moe",
    "olmoe",
    "glm4_moe",
    "ernie4_5_moe",
    "hunyuan_moe",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_moe_stacked",
    "nemotron_h_moe",
    "granite_hybrid",
    "lfm2_moe",
    "granite",
    "olmo3",
    "smollm3",
    "gemma4",
    "gemma4_moe",
    "gemma4_small",
    "smallthinker",
    "stablelm_12b",
    "cohere2",
    "gpt_neox",
    "phi2",
    "phimoe",
    "llama4",
    "deepseek_v2",
    "deepseek_v3",
)


# Others than 0: draws in which no rounding decides between experts.
SEEDS = {"phimoe": 15, "llama4": 1}


def ids() -> list[int]:
    """Return the sequence whose logits are kept."""
    found: list[int] = np.random.default_rng(0).integers(3, twins.VOCAB, 40).tolist()
    return found


def _recorded() -> dict[str, Json]:
    found: dict[str, Json] = json.loads(SHAPES.read_text()) if SHAPES.exists() else {}
    return found


def config(name: str) -> bytes:
    """Return the config.json of a twin."""
    return json.dumps(RECORDED[name]["files"]["config.json"], indent=2).encode()


def logits(name: str) -> NDArray[np.float32]:
    """Return transformers' logits of `ids()`."""
    with np.load(TRUTH) as kept:
        found: NDArray[np.float32] = kept[name]
    return found


def vectors(name: str) -> NDArray[np.float32]:
    """Return transformers' vectors of the first tokens of `ids()`, or scores of pairs, as `twins` says."""
    return logits(name)


def write(name: str, path: Path) -> Path:
    """Write a twin's directory."""
    kept = RECORDED[name]
    return _write(path, kept["files"], kept["shards"], SEEDS.get(name, 0))


def _write(path: Path, files: Json, shards: dict[str, dict[str, list[int]]], seed: int) -> Path:
    path.mkdir(parents=True)
    for file, content in files.items():
        (path / file).parent.mkdir(exist_ok=True)
        (path / file).write_text(json.dumps(content, indent=2))
    rng = np.random.default_rng(seed)
    for file, shapes in shards.items():
        tensors = {name: twins.random_tensor(name, tuple(shape), rng) for name, shape in shapes.items()}
        if len(shards) == 1:
            twins.steer(tensors, seed)
        save_file(tensors, path / file, {"format": "pt"})
    return path


def llama(path: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a Llama whose config has these keys in place of the twin's."""
    files = RECORDED["llama"]["files"]
    config = files["config.json"] | changes
    return _write(path, files | {"config.json": config}, {"model.safetensors": _llama_shapes(config)}, seed)


def _llama_shapes(config: Json) -> dict[str, list[int]]:
    dim, width, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], dim], "model.norm.weight": [dim]}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = [config["vocab_size"], dim]
    matrices = {
        "self_attn.q_proj": [queries, dim], "self_attn.k_proj": [keys, dim], "self_attn.v_proj": [keys, dim],
        "self_attn.o_proj": [dim, queries], "mlp.gate_proj": [width, dim], "mlp.up_proj": [width, dim],
        "mlp.down_proj": [dim, width], "input_layernorm": [dim], "post_attention_layernorm": [dim],
    }  # fmt: skip
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in matrices.items()}
    return shapes


RECORDED = _recorded()
TWINS: dict[str, Callable[[Path], Path]] = {name: partial(write, name) for name in RECORDED}


def record() -> None:
    """Write what this file keeps, from transformers."""
    kept: dict[str, Json] = {}
    for name, make in (twins.TWINS | twins.EMBEDDERS | twins.RANKERS).items():
        with tempfile.TemporaryDirectory() as base:
            path = make(Path(base) / name)
            found = of(path)
            if found is not None:
                kept[name] = found
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in kept.items()]
    SHAPES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    RECORDED.update(kept)
    with tempfile.TemporaryDirectory() as base:
        truth = {name: twins.hf_logits(write(name, Path(base) / name), ids()) for name in LOGITS}
        for truth_of, names in ((twins.hf_vectors, twins.EMBEDDERS), (twins.hf_scores, twins.RANKERS)):
            truth |= {name: truth_of(write(name, Path(base) / name), ids()) for name in names}
    np.savez_compressed(TRUTH, allow_pickle=False, **truth)


def of(path: Path) -> Json | None:
    """Return what is kept of a twin's directory, or None if its tensors are not all of f32."""
    shards: dict[str, dict[str, list[int]]] = {}
    for shard in sorted(path.glob("*.safetensors")):
        with safe_open(shard, "np") as file:
            slices = {key: file.get_slice(key) for key in sorted(file.keys())}
            if any(s.get_dtype() != "F32" for s in slices.values()):
                return None
            shards[shard.name] = {key: list(s.get_shape()) for key, s in slices.items()}
    files = {p.relative_to(path).as_posix(): json.loads(p.read_text()) for p in sorted(path.rglob("*.json"))}
    return {"files": files, "shards": shards}


if __name__ == "__main__":
    record()
