"""Planted routing has the statistics of the trace that it was fitted to, and they are counted rightly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from build_docs import difference

from thermocline.cli.commands import synth
from thermocline.convert import synthetic
from thermocline.convert.random_weights.source import RandomWeights
from thermocline.model import quant
from thermocline.offline.routing.route_trace import read_route_trace
from thermocline.offline.routing.statistics import HALF_LIFE, Choices, hit_rate, measure

Run = Callable[..., Any]
FIGURES = ("skew", "lru", "decayed")
# BigMoeOnEdge's traces (docs/bench-data/2026-07-15-route-trace, Apache-2.0), one prompt each, by
# `thermocline routes`: tokens decoded, experts a token takes of 128, then by 10, 20 and 40 % of the experts
# the shares of choices on the hottest, hits of LRU and of decayed frequency; overlap by distance.
TRACES: dict[str, dict[str, Any]] = {
    "qwen3-30b": {
        "tokens": 128, "prompt": 28, "active": 6,
        "skew": (0.580, 0.799, 0.969), "lru": (0.546, 0.762, 0.939), "decayed": (0.603, 0.801, 0.943),
        "overlap": {"1": 0.380, "8": 0.267, "32": 0.236},
    },
    "gemma-4-26b": {
        "tokens": 128, "prompt": 29, "active": 6,
        "skew": (0.596, 0.796, 0.962), "lru": (0.543, 0.736, 0.923), "decayed": (0.599, 0.774, 0.929),
        "overlap": {"1": 0.357, "8": 0.261, "32": 0.219},
    },
    "gpt-oss-120b": {
        "tokens": 64, "prompt": 85, "active": 2,
        "skew": (0.736, 0.919, 0.997), "lru": (0.646, 0.793, 0.817), "decayed": (0.669, 0.793, 0.817),
        "overlap": {"1": 0.179, "8": 0.131, "32": 0.118},
    },
}  # fmt: skip
POINTS = 0.03
SMALL = {
    "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4,
    "vocab_size": 4096, "head_dim": 64, "num_experts": 128, "moe_intermediate_size": 32,
    "bos_token_id": 1, "eos_token_id": 2, "intermediate_size": 64,
}  # fmt: skip


def mixture(directory: Path, shape: str = "qwen3-30b-a3b", **changes: Any) -> Path:
    """Write the config of a mixture with 128 small experts."""
    path = directory / "config.json"
    path.write_text(json.dumps(synthetic.shapes()[shape] | SMALL | changes))
    return path


def planted(directory: Path, thermocline: Run, routing: str, *more: Any, **changes: Any) -> dict[str, Any]:
    """Return what `routes` says of a synthetic model of q8_0."""
    made = directory / "pack"
    ran = thermocline("synth", mixture(directory, **changes), "--routing", routing, "-o", made, "-q")
    assert ran.code == 0, ran.err
    ran = thermocline("routes", made, "--json", "-q", *more)
    assert ran.code == 0, ran.err
    told: dict[str, Any] = json.loads(ran.out)
    assert difference("routes", told) == []
    return told


def apart(told: dict[str, Any], trace: dict[str, Any]) -> dict[str, float]:
    """Return each figure's distance from its trace's."""
    found = {
        f"{what} {held}": value - wanted
        for what in FIGURES
        for (held, value), wanted in zip(told[what].items(), trace[what], strict=True)
    }
    return found | {f"overlap {lag}": told["overlap"][lag] - v for lag, v in trace["overlap"].items()}


SLOW = {"qwen3-30b", "gemma-4-26b"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in TRACES]
)
def test_planted_routing_is_within_3_points_of_its_trace(name: str, tmp_path: Path, thermocline: Run) -> None:
    """Skew, overlap with tokens before and its fading, and the hits of two caches; of random tokens."""
    trace = TRACES[name]
    told = planted(
        tmp_path, thermocline, name, "-n", trace["tokens"], "-d", trace["prompt"],
        num_experts_per_tok=trace["active"]
    )  # fmt: skip
    assert (told["experts"], told["active"], told["layers"]) == (128, trace["active"], 12)
    found = apart(told, trace)
    assert max(map(abs, found.values())) <= POINTS, found


def test_every_routing_has_a_source() -> None:
    assert tuple(TRACES) == tuple(synthetic.ROUTINGS) == synth.ROUTINGS


def test_random_routing_has_neither_skew_nor_locality(tmp_path: Path, thermocline: Run) -> None:
    told = planted(tmp_path, thermocline, "random", "-n", 64, num_experts_per_tok=6, num_hidden_layers=4)
    assert told["overlap"]["1"] < 0.1 and told["skew"]["20%"] < 0.5 and told["lru"]["20%"] < 0.35


@pytest.mark.shared
@pytest.mark.parametrize(("name", "file"), list(zip(TRACES, ("qwen", "gemma", "gptoss"), strict=True)))
def test_the_table_is_what_the_traces_say(name: str, file: str, shared_data: Path) -> None:
    trace, found = TRACES[name], read_route_trace(shared_data / "route-traces" / f"{file}.csv")
    about = measure(found)
    assert (about.tokens, about.active, about.experts) == (trace["tokens"], trace["active"], 128)
    told = {what: getattr(about, what) for what in (*FIGURES, "overlap")}
    assert max(map(abs, apart(told, trace).values())) < 6e-4


# ---- every kind of mixture

LATENT = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
LATENT |= {"num_key_value_heads": 4, "n_routed_experts": 64, "num_experts_per_tok": 6}
# Of each kind of router and of mixer: sigmoid and groups, a bias for selection, the layer's input, a norm of
# its own, latents, windows with sinks, ReLU experts, recurrent layers between.
KINDS: dict[str, dict[str, Any]] = {
    "deepseek-v3": LATENT | {"n_routed_experts": 128, "q_lora_rank": 96},
    "ernie-4.5-21b-a3b": {"moe_num_experts": 64},
    "smallthinker-4b": {"moe_ffn_hidden_size": 32},
    "gemma-4-26b-a4b": {"num_global_key_value_heads": 1, "global_head_dim": 64},
    "gpt-oss-20b": {"intermediate_size": 32},
    "lfm2-8b-a1b": {"num_experts": 32},
    "phi-3.5-moe": {"intermediate_size": 32},
    "llama-4-scout": {"intermediate_size": 32, "intermediate_size_mlp": 64},
}


@pytest.mark.parametrize("shape", list(KINDS))
def test_every_kind_of_router_can_be_planted(shape: str, tmp_path: Path, thermocline: Run) -> None:
    changes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    known = synthetic.shapes()[shape]
    own = {
        k: v for k, v in (changes | {"num_hidden_layers": known["num_hidden_layers"]}).items() if k in known
    }
    config = known | {k: v for k, v in SMALL.items() if k in known} | own | KINDS[shape]
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = {}
    for routing in ("random", "qwen3-30b"):
        given = ("--layers", 8, "--routing", routing, "-o", tmp_path / routing, "-q")
        ran = thermocline("synth", tmp_path / "config.json", *given)
        assert ran.code == 0, ran.err
        told[routing] = json.loads(
            thermocline("routes", tmp_path / routing, "--json", "-q", "-n", 64, "-t", 1).out
        )
    before, after = told["random"], told["qwen3-30b"]
    chance = before["active"] / before["experts"]
    assert after["overlap"]["1"] > chance + 0.15 and after["overlap"]["1"] < 0.7
    assert after["overlap"]["1"] > after["overlap"]["32"] - 0.01
    assert after["lru"]["40%"] > 0.7 and after["skew"]["40%"] > 0.8


def test_the_router_reads_columns_that_nothing_else_writes(tmp_path: Path) -> None:
    """FFNs leave both blocks alone, embeddings the slow one, attention the token's."""
    model = synthetic.SyntheticModel.of(str(mixture(tmp_path)), 0, None, None, 64).planted("qwen3-30b")
    source, formats = RandomWeights(model.stats), ("f32", "q8_0", "q4_k", "mxfp4")
    for format in formats:

        def rows(name: str, n: int, columns: int, format: str = format) -> Any:
            return quant.decode(format, source.encoded(name, format, 0, n), columns)

        embed = rows("embed.weight", 64, 512)
        # MXFP4's least scale is not 0
        assert np.abs(embed[:, -32:]).max() < 1e-35 and embed[:, -64:-32].any()
        out = rows("layers.1.attn_out.weight", 512, 1024)
        assert out[-32:].any() and not out[-64:-32].any() and not out[:32].any()
        if format != "q4_k":  # whose blocks are longer than these rows
            down = rows("layers.1.down.weight", 1024, 32).reshape(2, 512, 32)
            assert not down[:, -64:].any() and not down[:, :32].any() and down[:, 32:-64].any(axis=2).all()


@pytest.mark.parametrize(
    ("shape", "more", "said"),
    [("llama-2-7b", (), "one expert"), ("gpt-oss-20b", ("--active", "0.1"), "biases")],
)
def test_what_cannot_be_planted_is_refused(
    shape: str, more: tuple[str, ...], said: str, tmp_path: Path, thermocline: Run
) -> None:
    ran = thermocline("synth", shape, "--routing", "qwen3-30b", "-o", tmp_path / "x", *more)
    assert ran.code == 6 and said in ran.err and not (tmp_path / "x").exists()


# ---- the figures


def by_definition(chosen: Any, slots: int, half_life: float) -> float:
    hits = asked = 0
    inside: set[int] = set()
    for t, now in enumerate(chosen.tolist()):
        if t >= len(chosen) / 4:
            hits, asked = hits + len(inside & set(now)), asked + len(now)
        uses = {e: [t - s for s in range(t + 1) if e in chosen[s]] for e in {*inside, *now}}
        score = {
            e: sum(2 ** (-a / half_life) for a in ages)
            if half_life
            else chosen[t - min(ages)].tolist().index(e) - 10 * min(ages)
            for e, ages in uses.items()
        }
        others = sorted(inside - set(now), key=score.__getitem__, reverse=True)
        inside = {*now, *others[: max(0, slots - len(now))]}
    return hits / asked


@pytest.mark.parametrize("half_life", [0, 16])
def test_hits_are_those_of_the_definition(half_life: float) -> None:
    rng = np.random.default_rng(2)
    for slots in (4, 6, 12):
        chosen = np.array([rng.choice(16, 2, replace=False) for _ in range(64)])
        assert hit_rate(chosen, slots, half_life) == by_definition(chosen, slots, half_life)
    assert HALF_LIFE == 16


def test_figures_of_choices_that_one_can_count() -> None:
    """Every second token takes experts 0 and 1, the others 2 and 3."""
    found = measure(Choices((np.array([[0, 1], [2, 3]] * 40),) * 2, 10, "counted"))
    assert (found.overlap["1"], found.overlap["2"], found.touched) == (0.0, 1.0, 0.4)
    assert found.skew == {"10%": 0.25, "20%": 0.5, "40%": 1.0}
    assert (found.lru["20%"], found.lru["40%"]) == (0.0, 1.0)
    assert found.alike == pytest.approx(1.0)


HEAD = "# route_trace v1\n# model=m arch=toy n_layer=1 n_expert=4 n_expert_used=1\n"
COLUMNS = "turn,phase,step,layer,slot,expert,weight\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD + COLUMNS, "0 decoded tokens"),
        (HEAD + COLUMNS + "0,0,0,0,0,1,1\n0,0,1,0,0,1,1\n", "0 decoded tokens"),
        (HEAD + "a,b\n", "columns"),
        (HEAD + COLUMNS + "0,1,0,0,0,x,1\n", "not one of numbers"),
        (HEAD + COLUMNS + "0,1,0,0,0\n0,1,0,0,0,1,1\n", "not one of numbers"),
        (HEAD + COLUMNS + "0,1,0,0,0,1,1\n0,1,1,0,0,4,1\n", "not one of 4"),
        (HEAD + COLUMNS + "0,1,0,0,0,1,1\n0,1,1,0,0,2,1\n0,1,1,0,1,3,1\n", "3 choices"),
        (HEAD + COLUMNS + "0,1,0,0,0,1,1\n0,1,1,0,0,2,1\n0,1,2,1,0,3,1\n0,1,0,0,0,1,1\n", "choices"),
        (HEAD.replace("n_expert=4", "n_expert=-4") + COLUMNS, "n_expert"),
    ],
)
def test_a_damaged_trace_is_refused(text: str, said: str, tmp_path: Path, thermocline: Run) -> None:
    (tmp_path / "t.csv").write_text(text)
    ran = thermocline("routes", tmp_path / "t.csv")
    assert ran.code == 3 and said in ran.err and ran.err.count("\n") == 1


def test_a_trace_is_read_and_a_dense_model_refused(tmp_path: Path, thermocline: Run, tiny_pack: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEAD + COLUMNS + "".join(f"0,1,{t},0,0,{t % 2},1\n" for t in range(8)))
    assert "1 of 4 in each of 1 layers" in thermocline("routes", path).out
    assert thermocline("routes", path, "--text", path).code == 2
    assert thermocline("routes", tiny_pack).code == 6
