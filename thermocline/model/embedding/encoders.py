"""Encoders: BERT and XLM-RoBERTa, whose tokens attend to the whole text."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
_IGNORED = (
    r"(roberta\.)?pooler\.dense\.(weight|bias)",
    r"(bert\.|roberta\.)?embeddings\.(position_ids|token_type_ids)",
)


@dataclass(frozen=True)
class _Head:
    """The names of a classifier's encoder, and of the matrices before and behind its tanh."""

    root: str
    dense: str
    out: str


_BERT_HEAD = _Head("bert.", "bert.pooler.dense", "classifier")
_ROBERTA_HEAD = _Head("roberta.", "classifier.dense", "classifier.out_proj")


def bert(keys: ConfigKeys, stop: Any) -> tuple[ModelSpec, TensorMap]:
    """BERT (arXiv 1810.04805): learned positions and types, LayerNorms behind each half, ungated FFN."""
    return _encoder(keys, stop, "bert", first_position=0)


def bert_classifier(keys: ConfigKeys, stop: Any) -> tuple[ModelSpec, TensorMap]:
    """A cross-encoder: a BERT that reads two texts and says how much they have to do with each other."""
    return _encoder(keys, stop, "bert", first_position=0, head=_BERT_HEAD)


def xlm_roberta(keys: ConfigKeys, stop: Any) -> tuple[ModelSpec, TensorMap]:
    """XLM-RoBERTa (arXiv 1911.02116) and RoBERTa: a BERT whose positions begin behind the padding's."""
    return _encoder(keys, stop, "xlm-roberta", first_position=_behind_padding(keys))


def xlm_roberta_classifier(keys: ConfigKeys, stop: Any) -> tuple[ModelSpec, TensorMap]:
    """Read a cross-encoder of the same kind: BGE's rerankers."""
    return _encoder(keys, stop, "xlm-roberta", first_position=_behind_padding(keys), head=_ROBERTA_HEAD)


def _behind_padding(keys: ConfigKeys) -> int:
    keys.with_defaults({"output_past": None}).raw("output_past")
    return 1 + keys.with_defaults({"pad_token_id": 1}).integer("pad_token_id", 0, 1 << 16)


def _encoder(
    keys: ConfigKeys, stop: Any, architecture: str, *, first_position: int, head: _Head | None = None
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
        # Of one that embeds, the files beside the config say which.
        pooling="mean" if head is None else "cls",
        classifies=head is not None,
        bidirectional=True,
        embed_norm=True,
        token_types=types,
    )
    keys.raw("tie_word_embeddings")
    root = "" if head is None else head.root
    made = tensors(spec, replace(_NAMES, root=root), ("norm", "qkv", "attn_out", "ffn"))
    made.tensors["pos_embed.weight"] = (
        SourceSlice(
            f"{root}embeddings.position_embeddings.weight", (rows, spec.dim), (range(first_position, rows),)
        ),
    )
    made.tensors["token_types.weight"] = (
        SourceSlice(f"{root}embeddings.token_type_embeddings.weight", (types, spec.dim)),
    )
    for part in ("weight", "bias"):
        made.tensors[f"embed_norm.{part}"] = (SourceSlice(f"{root}embeddings.LayerNorm.{part}", (spec.dim,)),)
    if head is not None:
        _check_labels(keys)
        for ours, theirs, size in (("dense", head.dense, spec.dim), ("out", head.out, 1)):
            made.tensors[f"classifier.{ours}.weight"] = (SourceSlice(f"{theirs}.weight", (size, spec.dim)),)
            made.tensors[f"classifier.{ours}.bias"] = (SourceSlice(f"{theirs}.bias", (size,)),)
    return spec, TensorMap(made.tensors, (*made.ignored, *_IGNORED), head="")


def _check_labels(keys: ConfigKeys) -> None:
    labels = keys.with_defaults({"id2label": {}}).raw("id2label")
    if not isinstance(labels, dict) or len(labels) != 1:
        raise keys.unsupported("id2label", "is not one label: only classifiers that rank are supported")
