"""Packs whose tensors have formats of their own: what is in them, and what a hostile one cannot say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mixed
import numpy as np
import pytest
import test_pack

from thermocline.errors import BadFile
from thermocline.llm import BUNDLED
from thermocline.model import quant
from thermocline.model.tensors import APART, bundle_parts, expected_tensors, formats_in
from thermocline.ops.interface import F32
from thermocline.pack import manifest, pack, reorder
from thermocline.pack.pack import Pack, read_tensor

Run = Callable[..., Any]


def rows_of(p: Pack, name: str, format: str, columns: int, at: int = 0) -> F32:
    found = read_tensor(p, name)[:, at : at + quant.row_bytes(format, columns)]
    return quant.decode(format, np.ascontiguousarray(found), columns)


def as_stored(format: str, w: F32) -> F32:
    return quant.decode(format, quant.encode(format, w), w.shape[1])


@pytest.mark.parametrize("kind", ["dense", "relu", "ungated", "relu mixture"])
def test_every_tensor_has_the_format_that_it_was_given(kind: str, tmp_path: Path) -> None:
    p = mixed.pack_of(tmp_path / "p", kind)
    s, source = p.spec, mixed.Source(p.spec)
    assert pack.verify(p) == []
    for name, t in p.tensor_specs().items():
        if t.vector or t.role == "router":
            continue
        for source_name, part in zip(t.parts, t.layout, strict=True):
            truth = source(source_name, t.first, t.first + t.rows)
            got = rows_of(p, name, part.format, t.columns, part.at)
            assert np.array_equal(got, as_stored(part.format, truth)), (name, part)
    q, kv = s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim
    shapes = {f"layers.0.{n}.weight": (rows, s.dim) for n, rows in zip("qkv", (q, kv, kv), strict=True)}
    assert {n: p.tensors[n].shape for n in shapes} == shapes and "layers.0.qkv.weight" not in p.tensors
    assert "layers.1.qkv.weight" in p.tensors and "layers.1.q.weight" not in p.tensors
    assert p.tensors["layers.0.qkv.bias"].shape == (s.qkv_rows,)


def test_a_records_rows_lie_one_behind_the_other(tmp_path: Path) -> None:
    """Directly where they are of one format, as they always did; else down's begins at a cache line."""
    p = mixed.pack_of(tmp_path / "p", "relu")
    for i, formats in enumerate((("q4_k", "q6_k"), ("q4_k", "q4_k"), ("q3_k", "mxfp4"))):
        t = p.tensors[f"layers.{i}.bundle"]
        up, down = bundle_parts(t, p.spec)
        assert up is not None and (up.format, down.format) == formats
        row = quant.row_bytes(up.format, p.spec.dim)
        assert down.at == (row if formats[0] == formats[1] else -(-row // APART) * APART)
        assert (t.down_format is None) == (formats[0] == formats[1])
        assert t.stride >= down.at + quant.row_bytes(down.format, p.spec.dim)


def test_what_version_2_can_say_is_still_version_2(tmp_path: Path) -> None:
    """To the byte: the bundled pack was written before there was another."""
    data = (BUNDLED / "pack.json").read_bytes()
    m = manifest.parse_manifest(data, "pack.json")
    said = json.loads(data)
    assert said["version"] == manifest.version_of(m.tensors) == 2
    assert {n: manifest._tensor(t) | {"shape": list(t.shape)} for n, t in m.tensors.items()} == said[
        "tensors"
    ]
    assert pack.inspect(mixed.pack_of(tmp_path / "old", "relu", {}, "q8_0"))["version"] == 2
    for i, formats in enumerate((
        {"layers.1.v.weight": "f16"},
        {"layers.1.down": "f16"},
        {"layers.1.up": "f16"},
        {"layers.1.attn_out.weight": "q6_k"},
    )):  # fmt: skip
        made = mixed.pack_of(tmp_path / f"{i}", "relu", formats, "q8_0")
        assert pack.inspect(made)["version"] == 3, formats
    assert (
        pack.inspect(mixed.pack_of(tmp_path / "up", "dense", {"layers.1.up.weight": "f16"}, "q8_0"))[
            "version"
        ]
        == 3
    )
    assert (
        pack.inspect(mixed.pack_of(tmp_path / "d", "dense", {"layers.1.down.weight": "f16"}, "q8_0"))[
            "version"
        ]
        == 2
    )


LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "version 2 with a down format": lambda m: m.update(version=2),
    "q, k and v apart for nothing": lambda m: [
        m["tensors"][f"layers.0.{n}.weight"].update(format="q4_k") for n in "qkv"
    ],
    "q, k and v apart and fused": lambda m: m["tensors"].update(
        {"layers.0.qkv.weight": m["tensors"]["layers.1.qkv.weight"]}
    ),
    "v alone": lambda m: m["tensors"].pop("layers.0.k.weight"),
    "v of another size": lambda m: m["tensors"]["layers.0.v.weight"].update(shape=[256, 256]),
    "down format unknown": lambda m: m["tensors"]["layers.0.bundle"].update(down_format="q7_k"),
    "down format no text": lambda m: m["tensors"]["layers.0.bundle"].update(down_format=["q6_k"]),
    "down format of a longer row": lambda m: m["tensors"]["layers.0.bundle"].update(down_format="f32"),
    "down format that is up's": lambda m: m["tensors"]["layers.1.bundle"].update(down_format="q4_k"),
    "down format left out": lambda m: m["tensors"]["layers.0.bundle"].pop("down_format"),
    "down format null": lambda m: m["tensors"]["layers.0.bundle"].update(down_format=None),
    "down format of no bundle": lambda m: m["tensors"]["layers.1.qkv.weight"].update(down_format="q4_k"),
    "format no text": lambda m: m["tensors"]["layers.0.bundle"].update(format=["q4_k"]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_about_formats_is_refused(lie: str, tmp_path: Path) -> None:
    made = mixed.pack_of(tmp_path / "p", "relu")
    value = json.loads((made.path / "pack.json").read_text())
    value.pop("crc32c")
    LIES[lie](value)
    (made.path / "pack.json").write_bytes(manifest._render(value))
    with pytest.raises(BadFile, match=r"pack\.json") as e:
        Pack.open(made.path)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("kind", ["relu", "ungated", "relu mixture"])
def test_neurons_in_another_order_keep_their_rows(kind: str, tmp_path: Path) -> None:
    p = mixed.pack_of(tmp_path / "p", kind)
    s, rng = p.spec, np.random.default_rng(0)
    places = [
        np.concatenate([e * s.ffn_dim + rng.permutation(s.ffn_dim) for e in range(s.n_experts)])
        for _ in range(s.n_layers)
    ]
    reorder.write_reordered(p, tmp_path / "q", places, lambda _: None, drop=(), overwrite=False)
    q = Pack.open(tmp_path / "q")
    assert formats_in(q.tensors) == formats_in(p.tensors) | {f"layers.{i}.order": "i32" for i in range(3)}
    for name in p.tensors:
        rows = read_tensor(p, name)
        moved = name.endswith((".gate.weight", ".bundle"))
        assert np.array_equal(read_tensor(q, name), rows[places[int(name[7])]] if moved else rows), name


def test_formats_are_counted_and_a_tokens_bytes_are_each_tensors(tmp_path: Path, thermocline: Run) -> None:
    p = mixed.pack_of(tmp_path / "p", "relu")
    told = pack.inspect(p)
    assert sum(f["bytes"] for f in told["formats"].values()) == sum(t.bytes for t in p.tensors.values())
    assert sum(f["parameters"] for f in told["formats"].values()) == told["parameters"]
    s, last = p.spec, p.tensors["layers.2.bundle"]
    downs = s.ffn_dim * (last.stride - bundle_parts(last, s)[1].at)
    assert told["formats"]["mxfp4"] == {"tensors": 1, "parameters": s.ffn_dim * s.dim, "bytes": downs}
    assert told["formats"]["q8_0"]["parameters"] == s.n_heads * s.head_dim * s.dim
    payload = sum(t.payload * t.rows for n, t in p.tensor_specs().items() if n != "embed.weight")
    row = quant.row_bytes("q4_k", s.dim)
    assert told["bytes_per_token_dense"] == payload + row  # one row of the embeddings
    ran = thermocline("inspect", p.path)
    for format in told["formats"]:
        assert format in ran.out


def test_formats_that_are_given_for_nothing_say_nothing() -> None:
    spec = test_pack.SPEC
    plain = expected_tensors(spec, "q8_0")
    assert expected_tensors(spec, "q8_0", {"layers.0.bundle": "f16", "layers.9.q.weight": "f16"}) == plain
    apart = expected_tensors(spec, "q8_0", {"layers.1.qkv.weight": "f16", "layers.1.q.weight": "f16"})
    assert apart["layers.1.qkv.weight"].format == "f16"
