"""Translate a GGUF's metadata and tensor names to those that its family's reader in `families.py` expects.

llama.cpp renames and rearranges what Hugging Face writes. `read_model` undoes that, so that one reader serves
both. To add a family, add its line to `ARCHITECTURES`, and its tensors' names if they differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from thermocline.errors import Unsupported
from thermocline.files.bounded import Json, quoted
from thermocline.files.gguf import GGUF
from thermocline.model.dense import gguf as dense
from thermocline.model.embedding import pooling
from thermocline.model.families import GEMMA3N, parse_config
from thermocline.model.gemma import gguf as gemma
from thermocline.model.gguf_metadata import (
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    GGUFKeys,
    biased,
    common,
    like_llama,
    rope,
    window,
)
from thermocline.model.latent import gguf as latent_gguf
from thermocline.model.mixtures import gguf as mixtures
from thermocline.model.mixtures import gpt_oss, llama4
from thermocline.model.mixtures.gguf import experts
from thermocline.model.recurrent import gguf as recurrent
from thermocline.model.relu import smallthinker
from thermocline.model.spec import PLAIN_ROUTER, ModelSpec, RopeScaling, Router
from thermocline.model.tensor_map import SourceSlice, TensorMap, pairs


def _llama(k: GGUFKeys) -> Json:
    """Return the config of a Llama, of a Mistral (if there is a window) or of a Mixtral (with experts)."""
    near = window(k)
    if k.integer(".expert_count", default=0) and not k.gguf.powerinfer:
        return like_llama(k, "MixtralForCausalLM", mixture=True) | near | experts(k, "num_local_experts")
    more = biased(k, "attention_bias")
    if near["sliding_window"] is not None:
        return like_llama(k, "MistralForCausalLM") | more | near
    return like_llama(k, "LlamaForCausalLM", "relu" if k.gguf.powerinfer else "silu") | more


def _qwen2(k: GGUFKeys) -> Json:
    return like_llama(k, "Qwen2ForCausalLM")


def _qwen3(k: GGUFKeys) -> Json:
    return like_llama(k, "Qwen3ForCausalLM") | biased(k, "attention_bias")


def _arcee(k: GGUFKeys) -> Json:
    return like_llama(k, "ArceeForCausalLM", "relu2") | biased(k)


def _phi3(k: GGUFKeys) -> Json:
    return like_llama(k, "Phi3ForCausalLM", partial=True) | window(k)


def _minicpm(k: GGUFKeys) -> Json:
    """Return MiniCPM's config. A file without its three scales is refused: they cannot be guessed."""
    config, logits = like_llama(k, "MiniCPMForCausalLM"), k.number(".logit_scale", low=1e-6)
    return {
        **config,
        "scale_emb": k.number(".embedding_scale"),
        "scale_depth": k.number(".residual_scale") * math.sqrt(config["num_hidden_layers"]),
        "dim_model_base": config["hidden_size"] / logits,
    }


def _nemotron(k: GGUFKeys) -> Json:
    config = common(k)
    k.raw(".attention.layer_norm_rms_epsilon")  # the converter writes the one epsilon under both names
    return {
        **config,
        "architectures": ["NemotronForCausalLM"],
        "norm_eps": k.number(".attention.layer_norm_epsilon"),
        **biased(k),
        **rope(k, config["head_dim"], partial=True),
    }


def _falcon(k: GGUFKeys) -> Json:
    """Return Falcon's config. 40B has two norms. Rows of the fused q, k, v are already in our order."""
    config, two = common(k), "blk.0.attn_norm_2.weight" in k.gguf.tensors
    grouped = two or config["num_key_value_heads"] > 1
    if grouped and not two:
        k.number(".rope.freq_base")  # required: 11B's is not the default, and converters left it out
    drop = ("intermediate_size", "num_key_value_heads", "head_dim")
    return {
        **{key: v for key, v in config.items() if key not in drop},
        "architectures": ["FalconForCausalLM"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_kv_heads": config["num_key_value_heads"],
        "new_decoder_architecture": grouped,
        "num_ln_in_parallel_attn": 2 if two else 1,
        "activation": "relu" if k.gguf.powerinfer else "gelu",
        "layer_norm_epsilon": k.number(".attention.layer_norm_epsilon"),
        **rope(k, config["head_dim"]),
    }


def _bamboo(k: GGUFKeys) -> Json:
    """Return Bamboo's config: PowerInfer's own architecture, with dReLU, otherwise like Mistral."""
    return {
        **_llama(k),
        "architectures": ["BambooForCausalLM"],
        "hidden_act": "relu",
        "sliding_window": None,
    }


def _opt(k: GGUFKeys) -> Json:
    """Return OPT's config. The architecture is PowerInfer's own: llama.cpp does not have it."""
    config = common(k)
    k.raw(".attention.layer_norm_epsilon")
    drop = ("intermediate_size", "num_key_value_heads", "head_dim")
    return {
        **{key: v for key, v in config.items() if key not in drop},
        "architectures": ["OPTForCausalLM"],
        "ffn_dim": config["intermediate_size"],
        "activation_function": "relu",
        "do_layer_norm_before": True,
    }


# --- names --------------------------------------------------------------------------------------------------

_LLAMA_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_EXPERT = re.compile(r"(?:block_sparse_moe|mlp|feed_forward|mixer)\.experts\.(\d+)\.(\w+)")
_HEAD_NORM = re.compile(r"self_attn\.([qk])_layernorm\.norms\.(\d+)")
_EXPERT_NAMES = {"w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up"}
_EXPERT_NAMES |= {"gate_proj": "ffn_gate", "down_proj": "ffn_down", "up_proj": "ffn_up"}
_EXPERT_NAMES |= {"gate": "ffn_gate", "down": "ffn_down", "up": "ffn_up"}
_QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_MIXTURE_NAMES = _LLAMA_NAMES | {
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_GPT_OSS_NAMES = _LLAMA_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "mlp.router": "ffn_gate_inp",
}
_OLMO_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GLM_NAMES = {"post_attention_layernorm": "post_attention_norm"}
_HUNYUAN_NAMES = {
    "mlp.gate.wg": "ffn_gate_inp",
    "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
    "mlp.shared_mlp.up_proj": "ffn_up_shexp",
    "mlp.shared_mlp.down_proj": "ffn_down_shexp",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
}
_GEMMA_NAMES = _LLAMA_NAMES | gemma.NAMES
_PHI3_NAMES = _LLAMA_NAMES | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
_FALCON_NAMES = {
    "transformer.word_embeddings": "token_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "ln_mlp": "attn_norm",
    "ln_attn": "attn_norm_2",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
_OPT_NAMES = {
    "model.decoder.embed_tokens": "token_embd",
    "model.decoder.embed_positions": "position_embd",
    "model.decoder.final_layer_norm": "output_norm",
    "lm_head": "output",
    "self_attn_layer_norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "final_layer_norm": "ffn_norm",
    "fc1": "ffn_up",
    "fc2": "ffn_down",
}


@dataclass(frozen=True)
class Written:
    """Fields in which a family may differ from a Llama, and its files still say the model: we write them.

    always  what llama.cpp's code knows of the family
    says    what keys of the header and names of tensors say
    laid    whether its code knows which layers have windows and rope, as this model has them
    """

    family: str  # a spec's `architecture`
    always: Mapping[str, Any]
    says: frozenset[str] = frozenset()
    laid: Callable[[ModelSpec], bool] = lambda s: s.window_layers is None

    def fits(self, s: ModelSpec) -> bool:
        """Return whether a file says all of this model."""
        known = all(getattr(s, key) == value for key, value in self.always.items())
        plain = (f for f in fields(ModelSpec) if "later" in f.metadata or f.name == "rope_scaling")
        others = (f for f in plain if f.name not in self.says and f.name not in self.always)
        first_layers_dense = s.dense_layers == tuple(range(len(s.dense_layers)))
        return (
            known
            and s.activation == self.always.get("activation", s.activation)
            and first_layers_dense
            and self.laid(s)
            and (s.rope_scaling is None or _keyed(s.rope_scaling))
            and all(getattr(s, f.name) == f.default for f in others)
        )


def _keyed(r: RopeScaling) -> bool:
    """Return whether keys say this scaling: gpt-oss's YaRN, whose other numbers have none."""
    usual = math.isclose(r.attention_factor, 0.1 * math.log(r.factor) + 1)
    return r.kind == "yarn" and not r.truncate and usual


@dataclass(frozen=True)
class Architecture:
    """A GGUF architecture: how to read its config, and its names of tensors."""

    config: Callable[[GGUFKeys], Json]
    names: dict[str, str]  # Hugging Face's -> GGUF's, without `layers.N.` and the last part
    turned: tuple[str, ...] = ()  # whose rows llama.cpp stores in pairs (i, i + head_dim/2) for its RoPE
    written: Written | None = None
    # (slice, layer, its name there) -> where the GGUF has it; None: under its name
    moved: Callable[[SourceSlice, str, str], SourceSlice | None] | None = None
    # What the file says of a spec besides its config, and where it has some packed tensors
    located: Callable[[ModelSpec, GGUF], recurrent.Located] | None = None


_SCALES = ("embed_scale", "residual_scale", "attention_scale", "logit_scale")
_DEEPSEEKS = frozenset(("router", "shared_dim", "dense_layers", "dense_dim"))
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(_llama, _LLAMA_NAMES, ("attn_q", "attn_k")),
    "bamboo": Architecture(_bamboo, _LLAMA_NAMES, ("attn_q", "attn_k")),
    "opt": Architecture(_opt, _OPT_NAMES),
    "qwen2": Architecture(_qwen2, _LLAMA_NAMES),
    "qwen3": Architecture(_qwen3, _LLAMA_NAMES | _QK_NORMS, written=Written("qwen3", {"qk_norm": True})),
    "qwen3moe": Architecture(
        mixtures.qwen3_moe,
        _MIXTURE_NAMES | _QK_NORMS,
        written=Written("qwen3-moe", {"qk_norm": True, "router": PLAIN_ROUTER}),
    ),
    "gpt-oss": Architecture(
        gpt_oss.gguf_config,
        _GPT_OSS_NAMES,
        written=Written(
            "gpt-oss", gpt_oss.ALWAYS, frozenset(("rope_scaling", "window_layers")), gpt_oss.laid
        ),
        moved=gpt_oss.in_gguf,
    ),
    "olmoe": Architecture(
        mixtures.olmoe,
        _MIXTURE_NAMES | _QK_NORMS,
        written=Written("olmoe", {"qk_norm": True, "qk_norm_whole": True, "router": Router(weights="score")}),
    ),
    "glm4moe": Architecture(
        mixtures.glm4_moe,
        _MIXTURE_NAMES | _QK_NORMS | _GLM_NAMES,
        written=Written("glm4-moe", {}, _DEEPSEEKS | {"rotary_dim", "qk_norm"}),
    ),
    "dots1": Architecture(
        mixtures.dots1,
        _MIXTURE_NAMES | _QK_NORMS,
        written=Written("dots1", {"qk_norm": True}, _DEEPSEEKS),
    ),
    "ernie4_5-moe": Architecture(mixtures.ernie4_5_moe, _MIXTURE_NAMES, ("attn_q", "attn_k")),
    "granitemoe": Architecture(
        mixtures.granite_moe,
        _LLAMA_NAMES | {"block_sparse_moe.router.layer": "ffn_gate_inp"},
        ("attn_q", "attn_k"),
        moved=mixtures.granite_moe_in_gguf,
    ),
    "smallthinker": Architecture(
        smallthinker.gguf_config,
        _LLAMA_NAMES | smallthinker.NAMES,
        written=Written(
            "smallthinker",
            smallthinker.ALWAYS,
            frozenset(("router", "rope_layers", "window_layers")),
            smallthinker.laid,
        ),
    ),
    "deepseek2": Architecture(latent_gguf.deepseek2, _MIXTURE_NAMES | latent_gguf.NAMES),
    "minimax-m2": Architecture(mixtures.minimax_m2, _LLAMA_NAMES | _QK_NORMS),
    "phimoe": Architecture(mixtures.phimoe, _LLAMA_NAMES),
    "llama4": Architecture(
        llama4.gguf_config, _LLAMA_NAMES | llama4.NAMES, ("attn_q", "attn_k"), moved=llama4.in_gguf
    ),
    "hunyuan-moe": Architecture(mixtures.hunyuan_moe, _MIXTURE_NAMES | _HUNYUAN_NAMES),
    "qwen3next": Architecture(
        recurrent.qwen3_next, _MIXTURE_NAMES | _QK_NORMS | recurrent.QWEN, located=recurrent.deltanets
    ),
    "qwen35": Architecture(
        recurrent.qwen3_5, _LLAMA_NAMES | _QK_NORMS | recurrent.QWEN, located=recurrent.deltanets
    ),
    "qwen35moe": Architecture(
        recurrent.qwen3_5_moe, _MIXTURE_NAMES | _QK_NORMS | recurrent.QWEN, located=recurrent.deltanets
    ),
    "nemotron_h": Architecture(recurrent.nemotron_h, recurrent.NEMOTRON, located=recurrent.mambas),
    "nemotron_h_moe": Architecture(recurrent.nemotron_h, recurrent.NEMOTRON, located=recurrent.mambas),
    "granitehybrid": Architecture(
        recurrent.granite_hybrid,
        _LLAMA_NAMES | recurrent.GRANITE,
        ("attn_q", "attn_k"),
        located=recurrent.granites,
    ),
    "lfm2": Architecture(recurrent.lfm2, _LLAMA_NAMES | recurrent.LFM2, located=recurrent.convolutions),
    "lfm2moe": Architecture(
        recurrent.lfm2_moe, _LLAMA_NAMES | recurrent.LFM2, located=recurrent.convolutions
    ),
    "gemma2": Architecture(gemma.gemma2, _GEMMA_NAMES),
    "gemma3": Architecture(gemma.gemma3, _GEMMA_NAMES | _QK_NORMS),
    "gemma4": Architecture(gemma.gemma4, _GEMMA_NAMES | _QK_NORMS, moved=gemma.in_gguf),
    "phi3": Architecture(_phi3, _PHI3_NAMES),
    "falcon": Architecture(_falcon, _FALCON_NAMES),
    "nemotron": Architecture(_nemotron, _LLAMA_NAMES),
    "arcee": Architecture(_arcee, _LLAMA_NAMES, ("attn_q", "attn_k")),
    "minicpm": Architecture(_minicpm, _LLAMA_NAMES, ("attn_q", "attn_k")),
    "granite": Architecture(
        dense.granite,
        _LLAMA_NAMES,
        ("attn_q", "attn_k"),
        written=Written("granite", {}, frozenset(_SCALES)),
    ),
    "olmo2": Architecture(
        dense.olmo2,
        _LLAMA_NAMES | _QK_NORMS | _OLMO_NAMES,
        written=Written("olmo2", {"norm_order": "after", "qk_norm": True, "qk_norm_whole": True}),
    ),
    "starcoder2": Architecture(
        dense.starcoder2, _LLAMA_NAMES | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
    ),
    "stablelm": Architecture(dense.stablelm, _LLAMA_NAMES),
    "command-r": Architecture(dense.cohere, _LLAMA_NAMES | _QK_NORMS, ("attn_q", "attn_k")),
    "cohere2": Architecture(dense.cohere2, _LLAMA_NAMES, ("attn_q", "attn_k")),
    "gptneox": Architecture(dense.gpt_neox, dense.NEOX_NAMES),
    "phi2": Architecture(dense.phi2, _LLAMA_NAMES | dense.PHI_NAMES),
    "smollm3": Architecture(dense.smollm3, _LLAMA_NAMES, ("attn_q", "attn_k")),
}


def written_as(spec: ModelSpec) -> tuple[str, Architecture]:
    """Return the architecture of a GGUF of this model, llama.cpp's or PowerInfer's. Raises Unsupported."""
    s = spec
    like_llama = s.norm == "rms" and s.gated and s.position == "rope"
    for name, a in ARCHITECTURES.items():
        w = a.written
        if w is None or not like_llama or w.family != s.architecture or not w.fits(s):
            continue
        if s.activation == w.always.get("activation", "silu"):
            return name, a
    drelu = s.up_activation == "relu"
    mixture = s.n_experts > 1 and s.sparse  # no engine reads a GGUF of others' ReLU experts
    like_llama &= s.activation in ("silu", "relu")
    if not like_llama or not Written("", {}).fits(s) or mixture or drelu > s.sparse:
        families = [a.written.family for a in ARCHITECTURES.values() if a.written is not None]
        raise Unsupported(
            "GGUF is written for models with SiLU or ReLU in a gated FFN, an RMS norm and plain RoPE only, "
            "such as llama-2-7b; for mixtures of experts with SiLU, such as mixtral-8x7b; and for "
            + ", ".join(families)
        )
    name = "bamboo" if drelu else "llama"
    return name, ARCHITECTURES[name]


# Published names of models with ReLU: ReluLLaMA, ProSparse, TurboSparse-Mistral and -Mixtral, SparseQwen2.
_RELU_NAMES = re.compile("relu|prosparse|turbosparse|sparseqwen", re.IGNORECASE)
_LAYER = re.compile(r".*(?:layers|h)\.(\d+)\.(.+)")


def read_model(gguf: GGUF, activation: str | None = None) -> tuple[ModelSpec, TensorMap]:
    """Read the model in a GGUF, and where each packed tensor's rows are in it.

    GGUF has no key for the activation; llama.cpp assumes the family's SiLU. The activation is ReLU if
    `activation` says so, if the file is PowerInfer's, or if its name says so. Only `activation` can tell
    which ReLU. Raises BadFile, Unsupported, UsageError.
    """
    k = GGUFKeys(gguf)
    found = ARCHITECTURES.get(k.architecture)
    if k.architecture == "gemma3n":
        raise Unsupported(f"{k.name}: {GEMMA3N}")
    if found is None:
        raise Unsupported(
            f"{k.name}: architecture {quoted(k.architecture)} is not supported; known: "
            f"{', '.join(ARCHITECTURES)}"
        )
    config, pooled = found.config(k), k.integer(".pooling_type", default=0)
    if not k.flag(".attention.causal", True):
        raise Unsupported(f"{k.name}: attention.causal is false, which is not supported in {k.architecture}")
    k.finish()
    assumed = config.get("hidden_act") == "silu"
    if assumed and (activation is not None or gguf.powerinfer or _called_relu(k)):
        config["hidden_act"] = "relu"
    spec, tensor_map = parse_config(config, None, k.name, activation, sure=not assumed)
    spec, tensor_map = _with_pooling(k, spec, tensor_map, pooled)
    spec, own = found.located(spec, gguf) if found.located else (spec, {})
    tensors = own | {
        ours: tuple(_translated(p, found, spec, gguf) for p in pieces)
        for ours, pieces in tensor_map.tensors.items()
        if ours not in own
    }
    factors = map(re.escape, (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS))
    sharing = "|".join(str(i) for i in range(spec.n_layers) if spec.kv_layer(i) != i)
    unused = rf"blk\.({sharing})\.attn_[kv](_norm)?\.weight"  # of layers that share keys and values
    skipped = tuple(p.replace(r"model\.layers\.", r"blk\.") for p in tensor_map.skipped)
    head = (r"output\.weight",) if spec.embeds else ()
    return spec, TensorMap(tensors, (*factors, *head, r"blk\.\d+\.fc[12]\.weight", unused), skipped=skipped)


_POOLINGS = ("none", "mean", "cls", "last")  # by llama.cpp's numbers; 4 is that of a classifier


def _with_pooling(
    k: GGUFKeys, spec: ModelSpec, tensor_map: TensorMap, kind: int
) -> tuple[ModelSpec, TensorMap]:
    """Return the model that embeds, if a GGUF says so.

    Its vectors have length 1, as llama.cpp's server has them.
    """
    if kind >= len(_POOLINGS):
        raise Unsupported(f"{k.name}: pooling_type {kind} is not supported; known: 0 to {len(_POOLINGS) - 1}")
    if kind:
        modules = pooling.Modules(_POOLINGS[kind], unit_vectors=True)
        return pooling.embedding(spec, tensor_map, modules, {}, k.name)
    names = (k.raw(f"general.{part}") for part in ("name", "basename"))
    return pooling.yes_or_no(spec, *names), tensor_map


def _called_relu(k: GGUFKeys) -> bool:
    names = (k.raw(f"general.{part}") for part in ("name", "basename", "finetune"))
    return any(_RELU_NAMES.search(n) for n in (k.gguf.path.name, *names) if isinstance(n, str))


def _translated(piece: SourceSlice, a: Architecture, spec: ModelSpec, gguf: GGUF) -> SourceSlice:
    if piece.tensor is None:
        return piece
    m = _LAYER.fullmatch(piece.tensor)
    if m and a.moved and (elsewhere := a.moved(piece, m[1], m[2])) is not None:
        return elsewhere
    if m and m[2] == latent_gguf.KV_B:
        return latent_gguf.head_in_gguf(piece, m[1], spec, gguf)
    stem, _, last = (m[2] if m else piece.tensor).rpartition(".")
    if m and (expert := _EXPERT.fullmatch(stem)):
        return _expert(piece, f"blk.{m[1]}.{_EXPERT_NAMES[expert[2]]}", int(expert[1]), spec, gguf)
    if m and piece.part is not None:
        return _stacked_expert(piece, f"blk.{m[1]}", piece.part, spec, gguf)
    if m and last in ("e_score_correction_bias", "expert_bias"):
        return replace(piece, tensor=f"blk.{m[1]}.exp_probs_b.bias", shape=(spec.n_experts,))
    if m and (head := _HEAD_NORM.fullmatch(stem)):
        return _of_head(piece, f"blk.{m[1]}.attn_{head[1]}_norm.weight", int(head[2]), spec)
    if stem not in a.names:
        raise Unsupported(f"{gguf.path}: tensor {piece.tensor} has no name in this architecture")
    short = a.names[stem]
    name = f"blk.{m[1]}.{short}.{last}" if m else f"{short}.{last}"
    if short == "ffn_down" and name not in gguf.tensors:
        return _transposed_down(replace(piece, tensor=name))
    piece = replace(piece, tensor=name, plus=0.0)  # the converter adds a norm's 1
    if short == "attn_qkv":
        return replace(piece, pick=())
    if m and short in _APART and name not in gguf.tensors and f"blk.{m[1]}.attn_qkv.{last}" in gguf.tensors:
        return _fused(piece, f"blk.{m[1]}.attn_qkv.{last}", _APART.index(short), spec)
    if short in a.turned:
        return replace(piece, pick=pairs(piece.shape[0], spec.head_dim))
    if short == "position_embd":
        return _positions(piece, gguf)
    return piece


def _expert(piece: SourceSlice, name: str, expert: int, spec: ModelSpec, gguf: GGUF) -> SourceSlice:
    """Return an expert's matrix in a stack of them, or its own tensor as in the first files of Mixtral."""
    stack = f"{name}_exps.weight"
    if stack not in gguf.tensors and f"{name}.{expert}.weight" in gguf.tensors:
        return replace(piece, tensor=f"{name}.{expert}.weight")
    both = f"{name.rpartition('.')[0]}.ffn_gate_up_exps.weight"
    if stack not in gguf.tensors and both in gguf.tensors and not name.endswith("ffn_down"):
        rows = piece.rows  # of a gate, which up follows
        first = (2 * expert + name.endswith("ffn_up")) * rows
        shape = (spec.n_experts, 2 * rows, piece.shape[1])
        return replace(piece, tensor=both, shape=shape, part=expert, pick=(range(first, first + rows),))
    return replace(piece, tensor=stack, shape=(spec.n_experts, *piece.shape), part=expert)


def _stacked_expert(piece: SourceSlice, layer: str, expert: int, spec: ModelSpec, gguf: GGUF) -> SourceSlice:
    """Return an expert's matrix, of a family that has gates and ups in one stack, and downs in another."""
    if not piece.pick:
        return replace(piece, tensor=f"{layer}.ffn_down_exps.weight")
    half = ("ffn_gate", "ffn_up")[piece.pick[0].start // piece.rows % 2]
    alone = SourceSlice(piece.tensor, (piece.rows, spec.dim))
    return _expert(alone, f"{layer}.{half}", expert, spec, gguf)


_APART = ("attn_q", "attn_k", "attn_v")


def _fused(piece: SourceSlice, name: str, which: int, spec: ModelSpec) -> SourceSlice:
    """Return q, k or v of a tensor that has them one under the other."""
    kv = spec.n_kv_heads * spec.head_dim
    first = (0, spec.n_heads * spec.head_dim, spec.n_heads * spec.head_dim + kv)[which]
    rows = range(first, first + piece.rows)
    return replace(piece, tensor=name, shape=(spec.qkv_rows, *piece.shape[1:]), pick=(rows,))


def _of_head(piece: SourceSlice, name: str, head: int, spec: ModelSpec) -> SourceSlice:
    """Return the norm of one head's q or k, which are rows of one tensor."""
    heads, size = spec.n_heads if "_q_" in name else spec.n_kv_heads, spec.head_dim
    return SourceSlice(name, (heads, size), (range(head * size, (head + 1) * size),), flat=True)


def _transposed_down(piece: SourceSlice) -> SourceSlice:
    """Return PowerInfer's transposed down projection, `ffn_down_t`, which has a row for each neuron."""
    name = str(piece.tensor).replace("ffn_down", "ffn_down_t")
    if len(piece.shape) == 1:
        return replace(piece, tensor=name)
    return replace(piece, tensor=name, shape=piece.shape[::-1], transposed=not piece.transposed)


def _positions(piece: SourceSlice, gguf: GGUF) -> SourceSlice:
    """Return the table of positions, which a file may hold without the rows that no token uses."""
    found = gguf.tensors.get(str(piece.tensor))
    if found is not None and found.shape == (piece.rows, piece.shape[1]):
        return replace(piece, shape=found.shape, pick=())
    return piece
