"""Write a pack as a GGUF file: for llama.cpp, or for PowerInfer if the model has ReLU.

The quantised blocks stay the same and are streamed. One exception is what llama.cpp reads of a ReLU model:
its down rows become columns, in blocks of their own.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from thermocline.convert.gguf_rows import gguf_package
from thermocline.convert.tokenizer_to_gguf import to_gguf
from thermocline.errors import IOFailure, Unsupported, UsageError
from thermocline.files.bounded import open_regular, parse_json, read_at, read_small
from thermocline.files.gguf_header import POWERINFER_MAGIC
from thermocline.files.whole import replacing
from thermocline.model import quant
from thermocline.model.gguf_families import Architecture, written_as
from thermocline.model.tensors import QKV, RowPart, TensorInfo, bundle_parts
from thermocline.pack.pack import MAX_COPIED_BYTES, Pack, Progress
from thermocline.pack.writer import TensorSource, stored_rows, stored_vector
from thermocline.text.tokenizer import FILE as TOKENIZER

if TYPE_CHECKING:
    from thermocline.model.spec import ModelSpec

log = logging.getLogger(__name__)

U8 = NDArray[np.uint8]

_STEP_BYTES = 256 << 10  # what is made of them stays in a 1 MiB L2 cache
_NAMES = {
    "embed.weight": "token_embd.weight",
    "head.weight": "output.weight",
    "out_norm.weight": "output_norm.weight",
    "attn_norm.weight": "attn_norm.weight",
    "attn_out.weight": "attn_output.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "router.weight": "ffn_gate_inp.weight",
    "gate.weight": "ffn_gate.weight",
    "up.weight": "ffn_up.weight",
    "down.weight": "ffn_down.weight",
    "sinks": "attn_sinks.weight",
    "gate.bias": "ffn_gate_exps.bias",
    "up.bias": "ffn_up_exps.bias",
    "down.bias": "ffn_down_exps.bias",
    "router.bias": "ffn_gate_inp.bias",
    "router.selection_bias": "exp_probs_b.bias",
    "shared.gate.weight": "ffn_gate_shexp.weight",
    "shared.up.weight": "ffn_up_shexp.weight",
    "shared.down.weight": "ffn_down_shexp.weight",
    "q_norm.weight": "attn_q_norm.weight",
    "k_norm.weight": "attn_k_norm.weight",
    "attn_out.bias": "attn_output.bias",
    "attn_post_norm.weight": "post_attention_norm.weight",
    "ffn_post_norm.weight": "post_ffw_norm.weight",
    "predictor.fc1.weight": "fc1.weight",
    "predictor.fc2.weight": "fc2.weight",
}
_EXPERTS = {f"{part}.weight": f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")}
_QKV, _QKV_BIAS, _BUNDLE = "qkv.weight", "qkv.bias", "bundle"
_APART = {f"{letter}.weight": letter for letter in QKV}
# A GGUF has no place for activation counts, nor for the original positions of sorted neurons.
_LEFT_OUT = ("activation_count", "order")


@dataclass(frozen=True)
class TensorSlice:
    """Rows [first, first + rows) of a pack's tensor that become GGUF's tensor `name`, [rows, columns].

    `head_dim` > 0 reorders the rows of each head: llama.cpp's RoPE turns neighbours (2i, 2i + 1), ours turns
    (i, i + head_dim/2). `part` is where the row lies in the tensor's, and in which format. `stack` is the
    number of stacked matrices, one for each expert. With `across` the rows of each are GGUF's columns:
    `rows` counts GGUF's, of all matrices.
    """

    name: str
    tensor: TensorInfo
    first: int
    rows: int
    columns: int
    head_dim: int = 0
    part: RowPart | None = None  # None: all of it
    stack: int = 1
    across: bool = False

    @property
    def format(self) -> str:
        return self.tensor.format if self.part is None else self.part.format

    @property
    def at(self) -> int:
        return 0 if self.part is None else self.part.at

    @property
    def row_bytes(self) -> int:
        return quant.row_bytes(self.format, self.columns)

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


def check(
    spec: ModelSpec, tensors: Iterable[str], path: str | os.PathLike[str], overwrite: bool = False
) -> None:
    """Raise what can be refused before there is a pack: UsageError, IOFailure or Unsupported."""
    _, architecture = written_as(spec)
    extra = [name for name in tensors if name.endswith(".bias")]
    if extra and (architecture.written is None or architecture.turned):
        raise Unsupported(
            f"GGUF of {spec.architecture} is written for models without biases only; this one has {extra[0]}"
        )
    if len(spec.eos_ids) > len(_ENDS):
        raise Unsupported(f"a GGUF names {len(_ENDS)} end tokens; this model has {len(spec.eos_ids)}")
    _package()
    if os.path.lexists(path) and not (overwrite and os.path.isfile(path)):
        raise UsageError(f"{path}: exists; choose another name, or replace the file with --force")
    if not Path(path).absolute().parent.is_dir():
        raise IOFailure(f"{path}: its directory does not exist; make it first")


Rows = Callable[[str, int, int], U8]  # (tensor, first, n): rows as the pack stores them [n, stride]


def write_gguf(
    pack: Pack,
    path: str | os.PathLike[str],
    source: TensorSource | None = None,
    *,
    file_type: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write `pack` as a GGUF with its tokenizer. The file appears under its name when it is complete.

    A ReLU model is written in PowerInfer's format, which llama.cpp does not read, unless llama.cpp has its
    architecture. Activation counts are left
    out. `source` has the rows of a pack that is not on disk. `file_type` is GGUF's name for the mix of
    formats, if it is not that of most weights. Raises UsageError, IOFailure, Unsupported or BadFile.
    """
    check(pack.spec, pack.tensors, path, overwrite)
    path = Path(path)
    file_type = file_type or quant.FORMATS[pack.weight_format].file_type
    with (
        _rows_of(pack) if source is None else contextlib.nullcontext(_rows_from(pack, source)) as rows,
        replacing(path) as tmp,
    ):
        _write(pack, tmp, _header(pack, tmp, file_type), rows, progress)


@contextlib.contextmanager
def _rows_of(pack: Pack) -> Iterator[Rows]:
    """Give the rows of a pack's file."""
    fd, _ = open_regular(pack.weights_path)

    def rows(name: str, first: int, n: int) -> U8:
        t = pack.tensors[name]
        data = read_at(fd, t.offset + first * t.stride, n * t.stride, pack.weights_path)
        return data.reshape(n, t.stride)

    try:
        yield rows
    finally:
        os.close(fd)


def _rows_from(pack: Pack, source: TensorSource) -> Rows:
    """Return the rows that a pack would have of a source."""
    specs = pack.tensor_specs()

    def rows(name: str, first: int, n: int) -> U8:
        t = specs[name]
        if t.vector:
            return stored_vector(t, source).reshape(-1, t.stride)[first : first + n]
        return stored_rows(t, source, first, first + n)

    return rows


def _write(pack: Pack, path: Path, writer: Any, rows: Rows, progress: Progress | None) -> None:
    _, architecture = written_as(pack.spec)
    pieces = [(name, p) for name in pack.tensors for p in _pieces(pack, name, architecture)]
    total, done = sum(p.nbytes for _, p in pieces), 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress:
            progress(done, total)

    for name, p in pieces:
        _add(writer, p, _StreamedSlice(partial(rows, name), p, advance))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if for_powerinfer(pack.spec):
        with open(path, "r+b") as f:
            f.write(POWERINFER_MAGIC)


def for_powerinfer(spec: ModelSpec) -> bool:
    """Return whether a model's GGUF has PowerInfer's layout. Raises Unsupported where it has none."""
    return spec.sparse and written_as(spec)[1].written is None


def _package() -> Any:
    return gguf_package("writing GGUF")


def _header(pack: Pack, path: Path, file_type: str) -> Any:
    gguf, s = _package(), pack.spec
    name, architecture = written_as(s)
    w = gguf.GGUFWriter(path, name)
    w.add_name(pack.source["name"] or pack.path.name)
    w.add_vocab_size(s.vocab_size)
    _add_tokenizer(w, pack)
    if s.window_layers is not None and s.sliding_window is not None:
        w.add_context_length(s.max_context)
        w.add_sliding_window(s.sliding_window)
    else:  # llama.cpp attends to all positions, which makes no difference up to the size of the window
        w.add_context_length(min(s.max_context, s.sliding_window or s.max_context))
    w.add_embedding_length(s.dim)
    w.add_block_count(s.n_layers)
    w.add_feed_forward_length(s.dense_dim or s.ffn_dim)
    w.add_head_count(s.n_heads)
    w.add_head_count_kv(s.n_kv_heads)
    w.add_key_length(s.head_dim)
    w.add_value_length(s.head_dim)
    if s.n_experts > 1:
        _add_experts(w, s, architecture)
    w.add_rope_dimension_count(s.rotary_dim or s.head_dim)
    w.add_rope_freq_base(s.rope_theta)
    if s.rope_scaling is not None:
        w.add_rope_scaling_type(gguf.RopeScalingType(s.rope_scaling.kind))
        w.add_rope_scaling_factor(s.rope_scaling.factor)
        w.add_rope_scaling_orig_ctx_len(s.rope_scaling.original_context)
        w.add_rope_scaling_yarn_beta_fast(s.rope_scaling.beta_fast)
        w.add_rope_scaling_yarn_beta_slow(s.rope_scaling.beta_slow)
    w.add_layer_norm_rms_eps(s.norm_eps)
    if architecture.written is not None and "logit_scale" in architecture.written.says:
        w.add_embedding_scale(s.embed_scale)
        w.add_residual_scale(s.residual_scale)
        w.add_attention_scale(s.head_dim**-0.5 if s.attention_scale is None else s.attention_scale)
        w.add_logit_scale(1 / s.logit_scale)  # by which logits are divided
    w.add_file_type(gguf.LlamaFileType[file_type])
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    return w


def _add_experts(w: Any, s: ModelSpec, architecture: Architecture) -> None:
    """Add a mixture's sizes, and its router if llama.cpp's code does not know what it does."""
    w.add_expert_count(s.n_experts)
    w.add_expert_used_count(s.n_experts_active)
    if architecture.written is None:
        return
    gguf, r = _package(), s.router
    w.add_expert_feed_forward_length(s.ffn_dim)
    if r.score != "logits":  # gpt-oss's converter writes none
        w.add_expert_gating_func(gguf.ExpertGatingFuncType[r.score.upper()])
    if r.score == "sigmoid" and s.router_input == "ffn_norm":
        w.add_expert_weights_norm(r.weights == "normalised")
        w.add_expert_weights_scale(r.scale)
        w.add_expert_group_count(r.groups)
        w.add_expert_group_used_count(r.groups_kept)
        w.add_leading_dense_block_count(len(s.dense_layers))
        w.add_expert_shared_count(s.shared_dim // s.ffn_dim)


def _add_tokenizer(w: Any, pack: Pack) -> None:
    """Add the tokenizer, the chat template, and the model's own begin and end tokens."""
    gguf, s = _package(), pack.spec
    keys: dict[str, Any] = {"tokenizer.ggml.model": "none"}
    if TOKENIZER in pack.files:
        first_eos = s.eos_ids[0] if s.eos_ids else None
        keys = to_gguf(pack.path / TOKENIZER, s.bos_id, first_eos, s.vocab_size)
        if keys["tokenizer.ggml.model"] == "none":
            reader = "PowerInfer" if for_powerinfer(s) else "llama.cpp"
            log.warning(
                f"{pack.path}: GGUF cannot say what its tokenizer does: {reader} finds no tokenizer in the "
                "file, Thermocline does"
            )
    ids = [("bos", s.bos_id), *zip(_ENDS, s.eos_ids, strict=False)]
    keys |= {f"tokenizer.ggml.{name}_token_id": i for name, i in ids if i is not None}
    if (template := _chat_template(pack)) is not None:
        keys["tokenizer.chat_template"] = template
    if for_powerinfer(s):
        keys["powerinfer.sparse_threshold"] = pack.predictor.threshold if pack.predictor is not None else 0.0
    for key, value in keys.items():
        w.add_key_value(key, value, gguf.GGUFValueType.get_type(value))


_ENDS = ("eos", "eot", "eom")


def _chat_template(pack: Pack) -> str | None:
    if "chat_template.jinja" in pack.files:
        return read_small(pack.path / "chat_template.jinja", MAX_COPIED_BYTES).decode()
    for path in (pack.path / n for n in ("tokenizer_config.json", "chat_template.json") if n in pack.files):
        found = parse_json(read_small(path, MAX_COPIED_BYTES), str(path)).get("chat_template")
        if isinstance(found, list):  # several templates, by name
            named = (t.get("template") for t in found if isinstance(t, dict) and t.get("name") == "default")
            found = next(named, None)
        if isinstance(found, str):
            return found
    return None


def _pieces(pack: Pack, name: str, architecture: Architecture) -> Iterator[TensorSlice]:
    info, s = pack.tensors[name], pack.spec
    prefix, part, experts = "", name, 1
    if name.startswith("layers."):
        _, layer, part = name.split(".", 2)
        prefix, experts = f"blk.{layer}.", s.ffn(int(layer)).experts
    if part in (_QKV, _QKV_BIAS):
        first = 0
        for letter, heads in zip(QKV, (s.n_heads, s.n_kv_heads, s.n_kv_heads), strict=True):
            n = heads * s.head_dim
            if part == _QKV:
                turned = _turned_by(architecture, f"attn_{letter}", s)
                yield TensorSlice(f"{prefix}attn_{letter}.weight", info, first, n, s.dim, turned)
            else:
                own = RowPart(info.format, 4 * first)
                yield TensorSlice(f"{prefix}attn_{letter}.bias", info, 0, 1, n, part=own)
            first += n
    elif part in _APART:
        turned = _turned_by(architecture, f"attn_{_APART[part]}", s)
        yield TensorSlice(f"{prefix}attn_{_APART[part]}.weight", info, 0, info.shape[0], s.dim, turned)
    elif part == _BUNDLE:
        up, down = bundle_parts(info, s)
        assert up is not None, "GGUF is written for gated models only"
        if architecture.written is not None:
            yield from _bundle_of_experts(s, prefix, info, up, down)
            return
        yield TensorSlice(f"{prefix}ffn_up.weight", info, 0, s.ffn_dim, s.dim, part=up)
        yield TensorSlice(f"{prefix}ffn_down_t.weight", info, 0, s.ffn_dim, s.dim, part=down)
    elif part in _LEFT_OUT:
        return
    elif len(info.shape) == 1:
        theirs = _NAMES[part]
        if part == "ffn_norm.weight":
            theirs = architecture.names["post_attention_layernorm"] + ".weight"
        yield TensorSlice(f"{prefix}{theirs}", info, 0, 1, info.shape[0])
    elif experts > 1 and part in _EXPERTS:
        rows = experts * info.shape[-2]
        yield TensorSlice(f"{prefix}{_EXPERTS[part]}", info, 0, rows, info.shape[-1], stack=experts)
    else:
        yield TensorSlice(f"{prefix}{_NAMES[part]}", info, 0, info.shape[-2], info.shape[-1])


def _bundle_of_experts(
    s: ModelSpec, prefix: str, info: TensorInfo, up: RowPart, down: RowPart
) -> Iterator[TensorSlice]:
    """Return a bundle as llama.cpp has it: stacks of up, and of down with a column for each neuron."""
    e, f, d = s.n_experts, s.ffn_dim, s.dim
    try:
        quant.row_bytes(down.format, f)
    except Unsupported:
        raise Unsupported(
            f"{prefix}ffn_down_exps: rows of {f} neurons do not fill blocks of {down.format}; pack the model "
            "as q8_0 or q4_0"
        ) from None
    yield TensorSlice(f"{prefix}ffn_up_exps.weight", info, 0, e * f, d, part=up, stack=e)
    yield TensorSlice(f"{prefix}ffn_down_exps.weight", info, 0, e * d, f, part=down, stack=e, across=True)


def _turned_by(architecture: Architecture, projection: str, spec: ModelSpec) -> int:
    """Return the size of heads whose rows the architecture has in pairs; 0: it has them as we do."""
    return spec.head_dim if projection in architecture.turned else 0


def _add(writer: Any, p: TensorSlice, rows: _StreamedSlice) -> None:
    vector = len(p.tensor.shape) == 1
    stacked = (p.stack,) if p.stack > 1 else ()
    shape = (p.columns,) if vector else (*stacked, p.rows // p.stack, p.columns)
    kind = _package().GGMLQuantizationType[p.format.upper()]
    writer.add_tensor(p.name, rows, raw_shape=shape, raw_dtype=kind)


class _StreamedSlice:
    """A tensor as GGUFWriter needs it (`dtype`, `nbytes`, `tofile`), a few MiB in memory at a time."""

    dtype = np.dtype(np.int8)  # with uint8 GGUFWriter would take shapes to be in bytes

    def __init__(
        self, rows: Callable[[int, int], U8], piece: TensorSlice, advance: Callable[[int], None]
    ) -> None:
        self._rows, self._piece, self._advance = rows, piece, advance

    @property
    def nbytes(self) -> int:
        return self._piece.nbytes

    def tofile(self, file: IO[bytes]) -> None:
        p, t = self._piece, self._piece.tensor
        if p.across:
            self._turn_over(file)
            return
        whole = max(1, p.head_dim)  # a head is reordered as a whole
        step = max(1, _STEP_BYTES // (t.stride * whole)) * whole
        for at in range(0, p.rows, step):
            n = min(step, p.rows - at)
            data = self._rows(p.first + at, n)[:, p.at : p.at + p.row_bytes]
            rows = quant.to_gguf(p.format, _turned(np.ascontiguousarray(data), p.head_dim))
            file.write(np.ascontiguousarray(rows).data)
            self._advance(n * p.row_bytes)

    def _turn_over(self, file: IO[bytes]) -> None:
        """Write a matrix after the other, each decoded, transposed and encoded."""
        p, deep = self._piece, self._piece.rows // self._piece.stack
        stored = quant.row_bytes(p.format, deep)
        for e in range(p.stack):
            data = self._rows(p.first + e * p.columns, p.columns)[:, p.at : p.at + stored]
            values = quant.decode(p.format, np.ascontiguousarray(data), deep)
            rows = quant.encode(p.format, np.ascontiguousarray(values.T))
            file.write(np.ascontiguousarray(quant.to_gguf(p.format, rows)).data)
            self._advance(deep * p.row_bytes)


def _turned(rows: U8, head_dim: int) -> U8:
    """Return rows [heads * head_dim, bytes] with the two halves of each head interleaved."""
    if not head_dim:
        return rows
    return rows.reshape(-1, 2, head_dim // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
