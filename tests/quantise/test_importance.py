"""Files of importances: ours, and llama.cpp's two kinds."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from thermocline.errors import BadFile
from thermocline.model.spec import ModelSpec, Recurrent
from thermocline.quantise import importance
from thermocline.quantise.moments import reader_of

SPEC = ModelSpec(
    architecture="llama", dim=64, ffn_dim=96, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16,
    vocab_size=300, max_context=64, norm="rms", norm_eps=1e-5, activation="silu", n_experts=2,
    n_experts_active=1,
)  # fmt: skip


def values() -> importance.Importance:
    rng = np.random.default_rng(0)
    shapes = {"layers.0.qkv": (1, 64), "layers.1.attn_out": (1, 64), "layers.0.ffn": (2, 64)}
    shapes |= {"layers.1.down": (2, 96), "head": (1, 64)}
    return {name: rng.random(shape, np.float32) for name, shape in shapes.items()}


def same(a: importance.Importance, b: importance.Importance) -> bool:
    return a.keys() == b.keys() and all(np.allclose(a[n], b[n]) for n in a)


GGUF_NAMES = {
    "layers.0.qkv": "blk.0.attn_q.weight", "layers.1.attn_out": "blk.1.attn_output.weight",
    "layers.0.ffn": "blk.0.ffn_gate_exps.weight", "layers.1.down": "blk.1.ffn_down_exps.weight",
    "head": "output.weight",
}  # fmt: skip


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    importance.write(tmp_path / "own.safetensors", values())
    assert same(importance.read(tmp_path / "own.safetensors", SPEC), values())


def write_dat(path: Path, found: importance.Importance) -> None:
    data = struct.pack("<i", len(found) + 1)
    for ours, x in found.items():
        name = GGUF_NAMES[ours].encode()
        data += struct.pack("<i", len(name)) + name + struct.pack("<ii", 7, x.size)
        data += (7 * x).astype("<f4").tobytes()
    other = b"blk.0.time_mix_key.weight"
    data += struct.pack("<i", len(other)) + other + struct.pack("<ii", 1, 1) + struct.pack("<f", 0.5)
    path.write_bytes(data + struct.pack("<ii", 7, 4) + b"text")


def test_an_old_imatrix_is_read(tmp_path: Path) -> None:
    write_dat(tmp_path / "imatrix.dat", values())
    assert same(importance.read(tmp_path / "imatrix.dat", SPEC), values())


def test_a_gguf_imatrix_is_read(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    w = gguf.GGUFWriter(tmp_path / "imatrix.gguf", "none")
    w.add_type("imatrix")
    for ours, x in values().items():
        counts = np.full((len(x), 1), 5, np.float32)
        w.add_tensor(f"{GGUF_NAMES[ours]}.in_sum2", 5 * x if len(x) > 1 else 5 * x[0])
        w.add_tensor(f"{GGUF_NAMES[ours]}.counts", counts if len(x) > 1 else counts[0])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    assert same(importance.read(tmp_path / "imatrix.gguf", SPEC), values())


def test_an_expert_that_was_never_chosen_has_equal_columns(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    w = gguf.GGUFWriter(tmp_path / "imatrix.gguf", "none")
    w.add_tensor(
        "blk.0.ffn_up_exps.weight.in_sum2", np.stack([np.arange(64), np.zeros(64)]).astype(np.float32)
    )
    w.add_tensor("blk.0.ffn_up_exps.weight.counts", np.array([[2], [0]], np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    found = importance.read(tmp_path / "imatrix.gguf", SPEC)["layers.0.ffn"]
    assert (found[0] == np.arange(64) / 2).all() and (found[1] == 1).all()


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"layers.0.qkv": np.ones((1, 32), np.float32)}, r"is \(1, 32\), the model needs \(1, 64\)"),
        (
            {"layers.7.qkv": np.ones((1, 64), np.float32)},
            r"'layers.7.qkv' is \(1, 64\), the model needs None",
        ),
        ({"head": np.full((1, 64), np.nan, np.float32)}, "negative or not finite"),
        ({"head": np.full((1, 64), -1, np.float32)}, "negative or not finite"),
    ],
)
def test_another_models_or_damaged_importances_are_refused(
    tmp_path: Path, change: importance.Importance, wrong: str
) -> None:
    importance.write(tmp_path / "i.safetensors", values() | change)
    with pytest.raises(BadFile, match=wrong):
        importance.read(tmp_path / "i.safetensors", SPEC)


@pytest.mark.parametrize(
    "data", [b"", b"abc", b"\x05\0\0\0" + b"\xff" * 40, b"\0" * 64, b"\x02\0\0\0\xff\xff\xff\x7f"]
)
def test_what_is_no_file_of_importances_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "bad.dat").write_bytes(data)
    with pytest.raises(BadFile):
        importance.read(tmp_path / "bad.dat", SPEC)


def test_names_of_recurrent_layers_are_those_of_their_matrices(tmp_path: Path) -> None:
    """What reads the stream has one name; a model without such layers has neither."""
    r = Recurrent(heads=2, groups=1, state=16, head_dim=16, conv=4)
    spec = replace(SPEC, mixers=("mamba2", *("attention",) * (SPEC.n_layers - 1)), recurrent=r)
    out = np.arange(1, r.inner + 1, dtype=np.float32)[None]
    into = np.arange(1, spec.dim + 1, dtype=np.float32)[None]
    wanted = {"layers.0.mixer": into, "layers.0.mixer_out": out}
    importance.write(tmp_path / "own", wanted)
    assert same(importance.read(tmp_path / "own", spec), wanted)
    with pytest.raises(BadFile, match=r"'layers\.0\.mixer' is"):
        importance.read(tmp_path / "own", SPEC)
    assert [reader_of(f"layers.0.mixer.{n}.weight") for n in ("in", "qkv", "z", "beta", "alpha", "out")] == [
        *["layers.0.mixer"] * 5, "layers.0.mixer_out"
    ]  # fmt: skip
    assert reader_of("layers.0.mixer.conv.weight") is None
