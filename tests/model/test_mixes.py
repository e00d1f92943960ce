"""Mixes by name: which matrix gets which format, as llama.cpp's files have them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from thermocline.model.formats import FORMATS
from thermocline.model.mixes import MIXES, formats_of
from thermocline.model.spec import ModelSpec
from thermocline.model.tensors import expected_tensors

SPEC = ModelSpec(
    architecture="llama", dim=4096, ffn_dim=11008, n_layers=32, n_heads=32, n_kv_heads=32, head_dim=128,
    vocab_size=32000, max_context=4096, norm="rms", norm_eps=1e-5, activation="silu"
)  # fmt: skip
MIXTURE = replace(SPEC, n_experts=8, n_experts_active=2, n_kv_heads=8, ffn_dim=14336)
SHARED = replace(MIXTURE, shared_dim=2048, dense_layers=(0, 1), dense_dim=4096)
FINE = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]  # layers of a 7B that get more bits


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    "spec", [SPEC, MIXTURE, SHARED, replace(SPEC, activation="relu"), replace(SPEC, gated=False)]
)
def test_every_mix_names_a_format_for_every_matrix(mix: str, spec: ModelSpec) -> None:
    chosen = formats_of(mix, spec)
    made = expected_tensors(spec, "f32", chosen)
    assert set(chosen.values()) <= set(FORMATS)
    left = {n for n, t in made.items() if t.format == "f32" and not t.vector and t.role != "router"}
    assert not left or mix == "f32"


@pytest.mark.parametrize(("mix", "fine"), [("q4_k_m", "q6_k"), ("q5_k_m", "q6_k")])
def test_half_of_the_layers_values_and_down_get_more_bits(mix: str, fine: str) -> None:
    chosen = formats_of(mix, SPEC)
    for part in ("v", "down"):
        assert [i for i in range(32) if chosen[f"layers.{i}.{part}.weight"] == fine] == FINE
    assert chosen["head.weight"] == "q6_k"
    assert chosen["embed.weight"] == MIXES[mix].base


@pytest.mark.parametrize(
    ("mix", "spec", "counts"),
    [  # of attention's values and output, and of down, as llama-quantize prints them
        ("q2_k", SPEC, {"q3_k": 96}),
        ("q3_k_m", SPEC, {"q5_k": 2 + 2, "q4_k": 30 + 32 + 30}),
        ("q3_k_l", SPEC, {"q5_k": 96}),
        ("q4_k_s", SPEC, {"q5_k": 4 + 4, "q4_k": 28 + 32 + 28}),
        ("q4_0", SPEC, {"q4_0": 96}),
        ("iq4_xs", SPEC, {"iq4_xs": 92, "q5_k": 4}),
        ("q4_k_m", MIXTURE, {"q8_0": 32, "q5_k": 32, "q4_k": 16, "q6_k": 16}),
        ("q4_k_m", SHARED, {"q8_0": 32, "q5_k": 32, "q4_k": 32, "q6_k": 30}),
    ],
)
def test_formats_are_those_of_llama_quantize(mix: str, spec: ModelSpec, counts: dict[str, int]) -> None:
    chosen = formats_of(mix, spec)
    parts = ("v.weight", "attn_out.weight", "down.weight")
    assert Counter(f for n, f in chosen.items() if n.endswith(tuple(f".{p}" for p in parts))) == counts


def test_importances_change_what_the_first_layers_get() -> None:
    down = "layers.0.down.weight"
    assert [formats_of("iq4_xs", SPEC, importance=i)[down] for i in (False, True)] == ["q5_k", "iq4_xs"]
    assert [formats_of("q4_0", SPEC, importance=i)[down] for i in (False, True)] == ["q4_0", "q4_1"]


def test_a_tied_embedding_is_a_head() -> None:
    assert formats_of("q4_k_m", replace(SPEC, tied_head=True))["embed.weight"] == "q6_k"


def test_rows_that_256_does_not_divide_fall_back() -> None:
    """As Nemotron's files: of 2688 columns."""
    chosen = formats_of("q4_k_m", replace(SPEC, dim=2688, ffn_dim=1856, n_heads=21, n_kv_heads=21))
    assert chosen["layers.4.q.weight"] == chosen["layers.4.down.weight"] == "q5_0"
    assert chosen["layers.0.v.weight"] == chosen["head.weight"] == "q8_0"
    odd = formats_of("iq4_xs", replace(SPEC, ffn_dim=11000))
    assert odd["layers.9.down.weight"] == "f16"


def test_experts_alone_are_mxfp4() -> None:
    chosen = formats_of("mxfp4", MIXTURE)
    assert {n.split(".")[2] for n, f in chosen.items() if f == "mxfp4"} == {"gate", "up", "down"}
    assert chosen["layers.0.q.weight"] == chosen["head.weight"] == "q8_0"


def test_bundles_have_down_by_neuron() -> None:
    """Rows of dim columns: what a mix gives to down fits them, or falls back for them."""
    chosen = formats_of("q4_k_m", replace(SPEC, activation="relu", ffn_dim=1000))
    assert chosen["layers.0.down"] == "q6_k"
    assert chosen["layers.4.up"] == "q4_k"


def test_a_formats_name_gives_it_to_all() -> None:
    assert set(formats_of("q4_k", SPEC).values()) == {"q4_k", "q5_0"} - (
        {"q5_0"} if 11008 % 256 == 0 else set()
    )
