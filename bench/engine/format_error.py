"""The error of every mix, end to end: logits of small random models beside numpy's over the decoded weights.

    python bench/engine/format_error.py [--mix q4_k_m q6_k] [--isa avx2] [--kind dense sparse mixture odd]

A model's logits, of a prompt and of tokens one by one, are compared with those of `ops.reference`, which
computes in f32 with the weights that the pack's bytes decode to. The figure is NMSE, squared error over
squared size. Numbers are held to 1e-6. Weights in blocks meet activations rounded to int8, and are held to
5e-4.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from reference_weights import decoded

from thermocline.convert import synthetic
from thermocline.engine.decoder import bind, forward
from thermocline.engine.kv_cache import KVCache, blocks_for
from thermocline.machine import hardware
from thermocline.model.formats import FORMATS
from thermocline.model.mixes import MIXES, NUMBERS
from thermocline.ops import reference
from thermocline.ops.interface import F32, Batch, FFNStats, Weights
from thermocline.pack.pack import Pack
from thermocline.session import weights

NUMBERS_NMSE, BLOCKS_NMSE = 1e-6, 5e-4
PROMPT, SINGLE = 24, 4  # tokens together, then one by one
SMALL: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 64,
}  # fmt: skip
ODD = {"hidden_size": 320, "num_attention_heads": 5, "num_key_value_heads": 5, "intermediate_size": 672}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # a shape, and what makes it small
    "dense": ("llama-2-7b", SMALL),
    "sparse": ("bamboo-7b", SMALL),  # dReLU: bundles
    "mixture": ("mixtral-8x7b", SMALL | {"num_local_experts": 3, "intermediate_size": 256}),
    "odd": ("llama-2-7b", SMALL | ODD),  # 256 does not divide its rows: fallbacks
}


@dataclass(frozen=True)
class FormatError:
    """One model's figures."""

    mix: str
    kind: str
    formats: dict[str, int]  # matrices by format
    bits: float  # of a weight
    nmse: float
    limit: float


def made(directory: Path, kind: str, mix: str) -> Pack:
    """A small random pack of a kind, in a mix's formats."""
    shape, changes = KINDS[kind]
    config = directory / "config.json"
    config.write_text(json.dumps(synthetic.shapes()[shape] | changes))
    model = synthetic.SyntheticModel.of(str(config), 0, None, 0.26, 64)
    where = directory / f"{kind}-{mix}"
    model.write(where, *synthetic.formats_named(mix, model.stats.spec))
    return Pack.open(where)


def batches(spec_vocab: int) -> Iterator[Batch]:
    """A prompt, then tokens one by one, of one sequence."""
    ids = np.random.default_rng(7).integers(3, spec_vocab, PROMPT + SINGLE).astype(np.int32)
    table = np.arange(blocks_for(len(ids)), dtype=np.int32)[None]
    for first, last in ((0, PROMPT), *((i, i + 1) for i in range(PROMPT, len(ids)))):
        at = np.arange(first, last, dtype=np.int32)
        yield Batch(ids[first:last], at, 0 * at, table, at - first)


def logits(pack: Pack, values: Weights, ops: Any) -> F32:
    model, kv = bind(pack.spec, values, ops), KVCache(pack.spec, blocks_for(PROMPT + SINGLE))
    steps = batches(pack.spec.vocab_size)
    return np.concatenate([forward(model, kv, b, ops, sparsity="exact", stats=FFNStats()) for b in steps])


def nmse(a: F32, b: F32) -> float:
    x, y = a.astype(np.float64), b.astype(np.float64)
    return float(((x - y) ** 2).sum() / (y**2).sum())


def error_of(directory: Path, kind: str, mix: str, isa: str) -> FormatError:
    pack = made(directory, kind, mix)
    loaded = weights.load(pack, threads=1, isa=isa)
    ours = logits(pack, loaded.weights, loaded.ops)
    wanted = logits(pack, decoded(pack), reference)
    matrices = [t for t in pack.tensors.values() if len(t.shape) > 1 and t.format != "i32"]
    count: dict[str, int] = {}
    for t in matrices:
        for format in (t.format, *((t.down_format,) if t.down_format else ())):
            count[format] = count.get(format, 0) + 1
    weighed = pack.tensor_specs().values()
    bits = 8 * sum(t.bytes for t in weighed) / sum(t.parameters for t in weighed)
    limit = NUMBERS_NMSE if mix in NUMBERS else BLOCKS_NMSE
    return FormatError(mix, kind, count, bits, nmse(ours, wanted), limit)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = list(dict.fromkeys([*MIXES, *FORMATS]))
    p.add_argument("--mix", nargs="+", choices=every, default=list(MIXES))
    p.add_argument("--kind", nargs="+", choices=list(KINDS), default=list(KINDS))
    p.add_argument("--isa", default="", help="an instruction set, instead of the best")
    args = p.parse_args()
    print(f"NMSE of logits, {args.isa or hardware.isa().chosen}\n")
    print("| mix | model | bits | NMSE | limit | formats |\n|---|---|---|---|---|---|", flush=True)
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for mix in args.mix:
            for kind in args.kind:
                e = error_of(Path(scratch), kind, mix, args.isa)
                failed += not e.nmse <= e.limit
                mark = "" if e.nmse <= e.limit else " **above**"
                formats = ", ".join(f"{n} {f}" for f, n in e.formats.items())
                print(
                    f"| {mix} | {kind} | {e.bits:.2f} | {e.nmse:.1e}{mark} | {e.limit:.0e} | {formats} |",
                    flush=True,
                )
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
