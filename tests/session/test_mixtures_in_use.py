"""Today's mixtures as people use them: run, batches, prefixes, several answers, plans, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kept_twins
import numpy as np
import pytest
import tiny
import twins
from safetensors.numpy import save_file

from thermocline import LLM, SamplingParams
from thermocline.errors import OutOfBudget

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
RECURRENT = ("qwen3_5_moe_stacked", "nemotron_h_moe", "granite_hybrid", "lfm2_moe")
GEMMA4 = ["gemma4_moe", "gemma4_small"]  # the second has no experts, but as much beside its FFNs
PROMPTS = ["It was the best of times", "A thin layer of water where warm meets cold", "x"]


@pytest.fixture(
    scope="module",
    params=["glm4_moe", "ernie4_5_moe", "olmoe", "phimoe", "llama4", "deepseek_v3", *RECURRENT, *GEMMA4],
)
def hf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A twin with a token for each byte."""
    path, kept = tmp_path_factory.mktemp("mixture") / "hf", kept_twins.RECORDED[request.param]
    path.mkdir()
    tokens: dict[str, Any] = {
        "vocab_size": tiny.BYTES + 2,
        "bos_token_id": tiny.BYTES,
        "eos_token_id": tiny.BYTES + 1,
    }
    config, more = kept["files"]["config.json"], tokens | {"max_position_embeddings": 256}
    if "text_config" in config:  # of a wrapper, which says the first and the last token itself
        inner = {k: v for k, v in config["text_config"].items() if k not in ("bos_token_id", "eos_token_id")}
        sizes = {k: more.pop(k) for k in ("vocab_size", "max_position_embeddings")}
        more["text_config"] = inner | sizes
    config = config | more
    if "vocab_size_per_layer_input" in config:
        config["vocab_size_per_layer_input"] = config["vocab_size"]
    (path / "config.json").write_text(json.dumps(config))
    tiny.tokenizer().save(str(path / "tokenizer.json"))
    rng = np.random.default_rng(1)
    shapes = kept["shards"]["model.safetensors"].items()
    rows = {n: (tiny.BYTES + 2, *s[1:]) if s[0] == twins.VOCAB else tuple(s) for n, s in shapes}
    tensors = {n: twins.random_tensor(n, s, rng) for n, s in rows.items()}
    twins.steer(tensors, 1)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def opened(hf: Path, **how: Any) -> LLM:
    options: dict[str, Any] = {"threads": 2, "context": 128, "gpu": "off"} | how
    return LLM(hf, cache_dir=hf.parent / "cache", **options)


def test_an_answer_depends_on_nothing_but_its_prompt(hf: Path) -> None:
    """Not on its company, threads, chunks, or what is known of its beginning."""
    with opened(hf) as llm:
        alone = [llm.generate(p, GREEDY) for p in PROMPTS]
        again = llm.generate(PROMPTS[1], GREEDY)
    assert again.figures.logits_hash == alone[1].figures.logits_hash
    with opened(hf, max_batch=3, threads=1) as llm:
        together = llm.generate(PROMPTS, GREEDY)
    for a, b in zip(alone, together, strict=True):
        assert a.token_ids == b.token_ids and a.figures.logits_hash == b.figures.logits_hash
    with opened(hf, sparsity="off") as llm:
        assert llm.generate(PROMPTS[0], GREEDY).figures.logits_hash == alone[0].figures.logits_hash


def test_several_answers_to_one_prompt_are_drawn(hf: Path) -> None:
    with opened(hf, max_batch=3) as llm:
        found = llm.best_of(3, PROMPTS[0], SamplingParams(temperature=1.0, max_tokens=6, seed=1))
    assert len(found) == 3


def test_commands_describe_and_run_it(hf: Path, thermocline: Callable[..., Any], tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    assert thermocline("pack", hf, "-o", pack, "--format", "q8_0").code == 0
    assert thermocline("verify", pack).code == 0
    told = json.loads(thermocline("inspect", pack, "--json").out)
    assert told["spec"]["router"]["score"] in ("softmax", "sigmoid", "logits")
    assert ("shared" in told["parts"]) == (told["spec"]["shared_dim"] > 0)
    ran = thermocline("run", "-m", pack, "-n", "4", "-c", "64", PROMPTS[0])
    assert ran.code == 0, ran.err
    planned = thermocline("plan", "-m", pack, "--hardware", "rtx4090-i9-13900k")
    assert planned.code == 0 and "tok/s" in planned.out
    profiled = thermocline("profile", "-m", pack, "--text", hf / "config.json")
    assert profiled.code != 0 and profiled.err.count("\n") == 1


def test_less_memory_than_it_needs_is_refused_in_a_line(hf: Path) -> None:
    with pytest.raises(OutOfBudget, match="the model needs") as e:
        opened(hf, ram=0.01)
    assert "\n" not in str(e.value)
