"""Encoders: BERT and XLM-RoBERTa, whose tokens attend to the whole text."""

from __future__ import annotations

from typing import Any

from thermocline.model.hf_config import PLAIN_ACTIVATIONS, ConfigKeys, read_spec
from thermocline.model.spec import ModelSpec
from thermocline.model.tensor_map import Names, SourceSlice, TensorMap, tensors

_NAMES = Names(
    root="",
    embed="embeddings.word_embeddings",
    layers="encoder.layer",
    attn_norm="attention.output.LayerNorm",
    ffn_norm="output.LayerNorm",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    up="intermediate.dense",
    down="output.dense",
)
_DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# Keys with the only values that are computed.
_ONLY: dict[str, Any] = {"position_embedding_type": "absolute", "is_decoder": False}
_IGNORED = (r"pooler\.dense\.(weight|bias)", r"embeddings\.(position_ids|token_type_ids)")


def bert(keys: ConfigKeys, stop: Any) -> tuple[ModelSpec, TensorMap]:
    """BERT (arXiv 1810.04805): learned positions and types, LayerNorms behind each half, ungated FFN."""
    return _encoder(keys, stop, "bert", first_position=0)


def xlm_roberta(keys: ConfigKeys, stop: Any) -> tuple[ModelSpec, TensorMap]:
    """XLM-RoBERTa (arXiv 1911.02116) and RoBERTa: a BERT whose positions begin behind the padding's."""
    keys.with_defaults({"pad_token_id": 1, "layer_norm_eps": 1e-5, "output_past": None}).raw("output_past")
    first = 1 + keys.with_defaults({"pad_token_id": 1}).integer("pad_token_id", 0, 1 << 16)
    return _encoder(keys, stop, "xlm-roberta", first_position=first)


def _encoder(
    keys: ConfigKeys, stop: Any, architecture: str, *, first_position: int
) -> tuple[ModelSpec, TensorMap]:
    keys.with_defaults(_DEFAULTS | {"classifier_dropout": None, "gradient_checkpointing": False})
    for key in ("pad_token_id", "classifier_dropout", "gradient_checkpointing"):
        keys.raw(key)
    keys.require(_ONLY)
    rows, heads = (
        keys.size("max_position_embeddings", "max_context"),
        keys.size("num_attention_heads", "n_heads"),
    )
    if rows <= first_position:
        raise keys.bad("max_position_embeddings", f"leaves no position behind the first {first_position}")
    types = keys.integer("type_vocab_size", 1, 1024)
    keys.replace("max_position_embeddings", rows - first_position)
    spec = read_spec(
        keys,
        stop,
        architecture,
        n_kv_heads=heads,
        norm="layer",
        norm_eps=keys.number("layer_norm_eps", 0.0, 1.0),
        norm_order="post",
        final_norm=False,
        activation=keys.activation("hidden_act", PLAIN_ACTIVATIONS),
        gated=False,
        position="learned",
        tied_head=True,
        pooling="mean",  # unless the files beside the config say another one
        bidirectional=True,
        embed_norm=True,
        token_types=types,
    )
    keys.raw("tie_word_embeddings")
    made = tensors(spec, _NAMES, ("norm", "qkv", "attn_out", "ffn"))
    made.tensors["pos_embed.weight"] = (
        SourceSlice(
            "embeddings.position_embeddings.weight", (rows, spec.dim), (range(first_position, rows),)
        ),
    )
    made.tensors["token_types.weight"] = (
        SourceSlice("embeddings.token_type_embeddings.weight", (types, spec.dim)),
    )
    for part in ("weight", "bias"):
        made.tensors[f"embed_norm.{part}"] = (SourceSlice(f"embeddings.LayerNorm.{part}", (spec.dim,)),)
    return spec, TensorMap(made.tensors, (*made.ignored, *_IGNORED), head="")
