"""GGUF files: the pack's own blocks under llama.cpp's names, in its order, read back with its own package."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kept_twins
import numpy as np
import pytest
import test_synth
from numpy.typing import NDArray

from thermocline import _native
from thermocline.convert import importer, synthetic, to_gguf
from thermocline.convert.random_weights.source import RandomWeights
from thermocline.errors import Unsupported, UsageError
from thermocline.files.bounded import read_at
from thermocline.files.gguf import GGUF
from thermocline.model import gguf_families, quant
from thermocline.model.spec import RopeScaling, Router
from thermocline.model.tensors import bundle_parts
from thermocline.opening.gguf_model import GGUFModel, open_gguf
from thermocline.pack.pack import Pack

gguf = pytest.importorskip("gguf")
Run = Callable[..., Any]
# GGUF's name -> ours, but for q, k and v.
NAMES = {"attn_output": "attn_out", "ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down"}


def rows_of(pack: Pack, name: str) -> Any:
    t = pack.tensors[name]
    with open(pack.weights_path, "rb") as f:
        data = read_at(f.fileno(), t.offset, t.bytes, pack.weights_path)
    return data.reshape(-1, t.stride)


def expected(pack: Pack, name: str) -> Any:
    """Our rows for a tensor of the GGUF, in its order of rows."""
    s = pack.spec
    if not name.startswith("blk."):
        ours = {"token_embd": "embed", "output": "head", "output_norm": "out_norm"}[name.split(".")[0]]
        return rows_of(pack, f"{ours}.weight")
    _, layer, part, _ = name.split(".")
    if part not in ("attn_q", "attn_k", "attn_v"):
        return rows_of(pack, f"layers.{layer}.{NAMES.get(part, part)}.weight")
    q, k = s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim
    rows = rows_of(pack, f"layers.{layer}.qkv.weight")
    if part == "attn_v":
        return rows[q + k :]
    mine = rows[:q] if part == "attn_q" else rows[q : q + k]
    # what llama.cpp's RoPE takes for elements 2i and 2i + 1 of a head are our elements i and i + head_dim/2
    half = s.head_dim // 2
    order = [
        h * s.head_dim + i + j * half
        for h in range(len(mine) // s.head_dim)
        for i in range(half)
        for j in (0, 1)
    ]
    return mine[order]


def written(tmp_path: Path, format: str, shape: str = "llama-2-7b", **changes: Any) -> tuple[Pack, Any]:
    pack = test_synth.make(tmp_path, shape, format, **changes)
    to_gguf.write_gguf(pack, tmp_path / "m.gguf")
    return pack, gguf.GGUFReader(tmp_path / "m.gguf")


@pytest.mark.parametrize("format", list(quant.FORMATS))
def test_a_gguf_holds_the_packs_blocks(format: str, tmp_path: Path) -> None:
    pack, read = written(tmp_path, format)
    assert len(read.tensors) == 3 + pack.spec.n_layers * 9
    for t in read.tensors:
        ours = expected(pack, t.name)
        kind = format if "norm" not in t.name else "f32"
        assert t.tensor_type.name == kind.upper()
        data = np.ascontiguousarray(t.data).view(np.uint8).reshape(len(ours), -1)
        assert np.array_equal(data, quant.to_gguf(kind, ours)), t.name
        theirs = gguf.quants.dequantize(t.data, t.tensor_type)
        columns = int(t.shape[0])  # GGUF says the innermost first
        assert np.array_equal(theirs.reshape(len(ours), -1), quant.decode(kind, ours, columns)), t.name


@pytest.mark.parametrize(("shape", "mix"), [("llama-2-7b", "q4_k_m"), ("mixtral-8x7b", "mxfp4")])
def test_a_gguf_without_a_pack_is_the_packs(shape: str, mix: str, tmp_path: Path) -> None:
    """Byte for byte, in the types that llama.cpp's files of that name have."""
    config = test_synth.config_file(tmp_path, shape)
    model = synthetic.SyntheticModel.of(str(config), 0, None, 0.26, 64)
    formats = synthetic.formats_named(mix, model.stats.spec)
    model.write(tmp_path / "pack", *formats)
    to_gguf.write_gguf(Pack.open(tmp_path / "pack"), tmp_path / "of-pack.gguf")
    unwritten = model.unwritten(tmp_path / "none", *formats)
    to_gguf.write_gguf(unwritten, tmp_path / "direct.gguf", RandomWeights(model.stats))
    assert (tmp_path / "direct.gguf").read_bytes() == (tmp_path / "of-pack.gguf").read_bytes()
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "direct.gguf").tensors}
    if mix == "q4_k_m":  # 4 layers: the last half of a layer, and every third one, get more bits
        assert (
            types["output.weight"] == types["blk.3.attn_v.weight"] == types["blk.3.ffn_down.weight"] == "Q6_K"
        )
        assert types["blk.0.attn_q.weight"] == types["blk.0.attn_v.weight"] == "Q4_K"
    else:
        assert types["blk.0.ffn_gate_exps.weight"] == "MXFP4" and types["blk.0.attn_q.weight"] == "Q8_0"


def test_a_tied_head_and_a_window_are_said_llama_cpps_way(tmp_path: Path) -> None:
    _, read = written(tmp_path, "q8_0", "mistral-7b", tie_word_embeddings=True, sliding_window=128)
    assert "output.weight" not in {t.name for t in read.tensors}
    assert value(read, "llama.context_length") == 128


def value(read: Any, key: str) -> Any:
    return read.fields[key].contents()


def test_the_header_says_the_model(tmp_path: Path) -> None:
    pack, read = written(tmp_path, "q4_0", rms_norm_eps=1e-6, rope_theta=5e5, head_dim=32)
    s = pack.spec
    facts = {
        "general.architecture": "llama",
        "general.file_type": 2,
        "tokenizer.ggml.model": "none",
        "llama.vocab_size": s.vocab_size,
        "llama.context_length": s.max_context,
        "llama.embedding_length": s.dim,
        "llama.feed_forward_length": s.ffn_dim,
        "llama.block_count": s.n_layers,
        "llama.attention.head_count": s.n_heads,
        "llama.attention.head_count_kv": s.n_kv_heads,
        "llama.attention.key_length": 32,
        "llama.attention.value_length": 32,
        "llama.rope.dimension_count": 32,
        "llama.rope.freq_base": 5e5,
        "llama.attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
    }
    assert {k: value(read, k) for k in facts} == facts


def test_writing_takes_little_memory(tmp_path: Path) -> None:
    pack = test_synth.make(tmp_path, "llama-2-7b", "q8_0", vocab_size=1 << 17, num_hidden_layers=1)
    tracemalloc.start()
    to_gguf.write_gguf(pack, tmp_path / "m.gguf")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "m.gguf").stat().st_size > 70e6
    assert peak < 24 << 20


def test_the_command_writes_a_gguf_alone(tmp_path: Path, thermocline: Run) -> None:
    shape = test_synth.config_file(tmp_path, "llama-2-7b")
    argv = ["synth", shape, "--gguf", tmp_path / "m.gguf", "--format", "q5_k_m", "--layers", "2"]
    ran = thermocline(*argv)
    assert ran.code == 0 and "as q5_k_m into" in ran.err
    read = gguf.GGUFReader(tmp_path / "m.gguf")
    assert value(read, "general.file_type") == gguf.LlamaFileType.MOSTLY_Q5_K_M
    assert value(read, "llama.block_count") == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "m.gguf"]
    for wrong, said in ((["synth", shape], "-o DIR"), ([*argv, "--json", "--force"], "give its directory")):
        ran = thermocline(*wrong)
        assert ran.code == 2 and said in ran.err and ran.err.count("\n") == 1


def test_the_command_writes_both(tmp_path: Path, thermocline: Run) -> None:
    shape = test_synth.config_file(tmp_path, "llama-2-7b")
    argv = ["synth", shape, "-o", tmp_path / "pack", "--gguf", tmp_path / "m.gguf"]
    ran = thermocline(*argv)
    assert ran.code == 0 and "m.gguf" in ran.err
    again = thermocline(*argv)
    assert again.code == 2 and "m.gguf: exists" in again.err
    before = (tmp_path / "m.gguf").read_bytes()
    assert thermocline(*argv, "--force", "--seed", "1").code == 0
    assert (tmp_path / "m.gguf").read_bytes() != before


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "OPT": ("opt-6.7b", {}, "gated FFN"),
    "GELU": ("llama-2-7b", {"hidden_act": "gelu"}, "SiLU or ReLU"),
    "biases": ("llama-2-7b", {"attention_bias": True}, "without biases"),
    "scaled RoPE": (
        "llama-2-7b",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            }
        },
        "plain RoPE",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_llama_cpp_cannot_express_is_refused_before_the_pack_is_written(
    case: str, tmp_path: Path, thermocline: Run
) -> None:
    shape, changes, said = REFUSED[case]
    config = test_synth.config_file(tmp_path, shape, **changes)
    ran = thermocline("synth", config, "-o", tmp_path / "pack", "--gguf", tmp_path / "m.gguf")
    assert ran.code == 6
    assert said in ran.err and ran.err.count("\n") == 1
    assert not (tmp_path / "pack").exists()


# twin -> GGUF's architecture
SAID = {
    "qwen3": "qwen3", "olmoe": "olmoe", "glm4_moe": "glm4moe", "glm4_moe_air": "glm4moe", "dots1": "dots1",
    "gpt_oss": "gpt-oss", "granite": "granite", "olmo2": "olmo2",
}  # fmt: skip


def of_twin(name: str, directory: Path) -> Pack:
    """Pack a twin in f32, with the window (dots) and the limit (gpt-oss) that llama.cpp's code has."""
    config = kept_twins.TWINS[name](directory / "hf") / "config.json"
    said = json.loads(config.read_text())
    if name == "dots1":
        said |= {"sliding_window": None, "layer_types": None}
    if name == "gpt_oss":
        said["swiglu_limit"] = 7.0
    if name == "smallthinker":
        said["sliding_window_size"] = 4096
    config.write_text(json.dumps(said))
    importer.pack(config.parent, directory / "p", "f32")
    return Pack.open(directory / "p")


@pytest.mark.parametrize("name", [*SAID, "qwen3-30b-a3b"])
def test_what_a_family_has_beyond_a_llama_is_said_in_its_file(name: str, tmp_path: Path) -> None:
    """Read again, the file is the same model, tensor by tensor."""
    made = of_twin(name, tmp_path) if name in SAID else test_synth.make(tmp_path, name, "f32")
    to_gguf.write_gguf(made, tmp_path / "m.gguf")
    read = open_gguf(tmp_path / "m.gguf")
    assert isinstance(read, GGUFModel)
    assert read.metadata["general.architecture"] == SAID.get(name, "qwen3moe")
    assert (read.spec, read.tensors) == (made.spec, made.tensors)
    held = _native.Arena(read.weights_bytes)
    read.begin_load(held).finish()
    found = (ctypes.c_uint8 * read.weights_bytes).from_address(held.address)
    assert bytes(found) == made.weights_path.read_bytes()


@pytest.mark.parametrize("name", ["smallthinker", "smallthinker_softmax"])
def test_relu_experts_that_llama_cpp_reads_come_back(name: str, tmp_path: Path) -> None:
    """A down row of a neuron is a column there; in f32 nothing is lost."""
    made = of_twin(name, tmp_path)
    to_gguf.write_gguf(made, tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes()[:4] == b"GGUF"
    importer.pack(tmp_path / "m.gguf", tmp_path / "again", "f32")
    again = Pack.open(tmp_path / "again")
    assert (again.spec, again.tensors) == (made.spec, made.tensors)
    assert again.weights_path.read_bytes() == made.weights_path.read_bytes()


def test_blocks_of_down_rows_are_made_anew_where_they_become_columns(tmp_path: Path) -> None:
    """Of a synthetic SmallThinker in q4_0: every other matrix keeps its blocks."""
    made = test_synth.make(tmp_path, "smallthinker-4b", "q4_0", active=0.4, skew=0.55)
    to_gguf.write_gguf(made, tmp_path / "m.gguf")
    with GGUF(tmp_path / "m.gguf") as gguf:
        found = {n: (t.type, t.shape) for n, t in gguf.tensors.items() if n.startswith("blk.0.ffn_")}
    down = found.pop("blk.0.ffn_down_exps.weight")
    assert down == ("q4_0", (8, 256, 256)) and len(found) == 4
    importer.pack(tmp_path / "m.gguf", tmp_path / "again")
    again = Pack.open(tmp_path / "again")
    rows = [quant.decode("q4_0", down_rows(p, 0), 256) for p in (made, again)]
    error = ((rows[0] - rows[1]) ** 2).sum() / (rows[0] ** 2).sum()
    assert 0 < error < 0.03


def down_rows(pack: Pack, layer: int) -> NDArray[np.uint8]:
    info = pack.tensors[f"layers.{layer}.bundle"]
    _, down = bundle_parts(info, pack.spec)
    data = np.fromfile(pack.weights_path, np.uint8, info.bytes, offset=info.offset)
    width = quant.row_bytes("q4_0", pack.spec.dim)
    return np.ascontiguousarray(data.reshape(-1, info.stride)[:, down.at : down.at + width])


def test_windows_that_llama_cpp_would_not_have_are_refused(tmp_path: Path) -> None:
    spec = synthetic.read_shape("smallthinker-21b")[1]
    assert gguf_families.written_as(spec)[0] == "smallthinker"
    for change in ({"sliding_window": 2048}, {"rope_layers": None}, {"router": Router(weights="score")}):
        with pytest.raises(Unsupported, match="GGUF is written for"):
            gguf_families.written_as(dataclasses.replace(spec, **change))


def test_what_no_file_can_say_is_refused() -> None:
    """llama.cpp's code for Qwen3-MoE always divides weights by their sum, and has a router in every layer."""
    spec = synthetic.read_shape("qwen3-30b-a3b")[1]
    assert gguf_families.written_as(spec)[0] == "qwen3moe"
    for change in (
        {"router": Router(weights="score")},
        {"dense_layers": (1,), "dense_dim": 64},
        {"residual_scale": 0.5},
        {"sliding_window": 9, "window_layers": (1,)},
        {"rope_scaling": RopeScaling(kind="linear", factor=2.0)},
    ):
        with pytest.raises(Unsupported, match="GGUF is written for"):
            gguf_families.written_as(dataclasses.replace(spec, **change))


def test_without_the_package_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = test_synth.make(tmp_path, "llama-2-7b")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(Unsupported, match=r"pip install 'thermocline\[gguf\]'"):
        to_gguf.write_gguf(pack, tmp_path / "m.gguf")


def test_a_file_is_not_replaced_unasked_nor_a_directory_ever(tmp_path: Path) -> None:
    pack = test_synth.make(tmp_path, "llama-2-7b")
    (tmp_path / "m.gguf").write_bytes(b"mine")
    with pytest.raises(UsageError, match="exists"):
        to_gguf.write_gguf(pack, tmp_path / "m.gguf")
    with pytest.raises(UsageError, match="exists"):
        to_gguf.write_gguf(pack, tmp_path, overwrite=True)
    assert (tmp_path / "m.gguf").read_bytes() == b"mine"


def test_a_failure_leaves_nothing_behind(tmp_path: Path, thermocline: Run) -> None:
    pack = test_synth.make(tmp_path, "llama-2-7b")
    with open(pack.weights_path, "r+b") as f:
        f.truncate(pack.weights_bytes // 2)
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(Exception, match="too early"):
        to_gguf.write_gguf(pack, tmp_path / "m.gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    shape = test_synth.config_file(tmp_path, "llama-2-7b")
    ran = thermocline("synth", shape, "-o", tmp_path / "other", "--gguf", tmp_path / "absent" / "m.gguf")
    assert ran.code == 4 and not (tmp_path / "other").exists()
