"""The error of every mix, end to end: logits of small random models beside numpy's over the decoded weights.

    python bench/engine/format_error.py [--mix q4_k_m q6_k] [--isa avx2] [--kind dense sparse mixture odd]
        [--llama-driver /tmp/llama/llama-driver-native]

A model's logits, of a prompt and of tokens one by one, are compared with those of `ops.reference`, which
computes in f32 with the weights that the pack's bytes decode to. The figure is NMSE, squared error over
squared size. Numbers are held to 1e-6. Weights in blocks meet activations rounded to int8, and are held to
5e-4. With the driver that `bench/llamacpp/vs_llamacpp.py` builds, llama.cpp's error is shown beside ours: it
reads the same blocks from a GGUF file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path += [str(room) for room in Path(__file__).resolve().parents[1].iterdir()]  # what other rooms have

import numpy as np
from engines import Driver
from reference_weights import decoded

from thermocline.convert import synthetic
from thermocline.convert.to_gguf import write_gguf
from thermocline.engine.decoder import bind, forward
from thermocline.engine.kv_cache import KVCache, blocks_for
from thermocline.machine import hardware
from thermocline.model.formats import FORMATS
from thermocline.model.mixes import MIXES, NUMBERS
from thermocline.ops import reference
from thermocline.ops.interface import F32, I32, Batch, FFNStats, Weights
from thermocline.pack.pack import Pack
from thermocline.pack.stored_model import tensor_specs
from thermocline.session import weights

NUMBERS_NMSE, BLOCKS_NMSE = 1e-6, 5e-4
PROMPT, SINGLE = 24, 4  # tokens together, then one by one
SMALL: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 64,
}  # fmt: skip
ODD = {"hidden_size": 320, "num_attention_heads": 5, "num_key_value_heads": 5, "intermediate_size": 672}
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 3, "intermediate_size": 256}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # a shape, and what makes it small
    "dense": ("llama-2-7b", SMALL),
    "sparse": ("bamboo-7b", SMALL),  # dReLU: bundles
    # Every token goes to all experts: of two that are nearly alike, an error would choose the other.
    "mixture": ("mixtral-8x7b", SMALL | EXPERTS),
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
    llama: float | None = None  # llama.cpp's NMSE; None: it was not asked, or does not know the model


def model_of(directory: Path, kind: str) -> synthetic.SyntheticModel:
    """A small random model of a kind."""
    shape, changes = KINDS[kind]
    config = directory / "config.json"
    config.write_text(json.dumps(synthetic.shapes()[shape] | changes))
    return synthetic.SyntheticModel.of(str(config), 0, None, 0.26, 64)


def made(directory: Path, kind: str, mix: str) -> Pack:
    """Such a model's pack, in a mix's formats."""
    model = model_of(directory, kind)
    where = directory / f"{kind}-{mix}"
    model.write(where, *synthetic.formats_named(mix, model.stats.spec))
    return Pack.open(where)


def batches(ids: I32) -> Iterator[Batch]:
    """A prompt, then tokens one by one, of one sequence."""
    table = np.arange(blocks_for(len(ids)), dtype=np.int32)[None]
    for first, last in ((0, PROMPT), *((i, i + 1) for i in range(PROMPT, len(ids)))):
        at = np.arange(first, last, dtype=np.int32)
        yield Batch(ids[first:last], at, 0 * at, table, at - first)


def logits(pack: Pack, values: Weights, ops: Any, ids: I32) -> F32:
    model, kv = bind(pack.spec, values, ops), KVCache(pack.spec, blocks_for(len(ids)))
    steps = batches(ids)
    return np.concatenate([forward(model, kv, b, ops, sparsity="exact", stats=FFNStats()) for b in steps])


def llama_logits(pack: Pack, driver: Path, ids: I32) -> F32:
    """llama.cpp's after the prompt, and after each token that follows it."""
    gguf, tokens, out = (pack.path.with_suffix(suffix) for suffix in (".gguf", ".i32", ".f32"))
    write_gguf(pack, gguf, overwrite=True)
    ids.tofile(tokens)
    with Driver("llama.cpp", [driver, gguf, tokens, 64, 1, 0]) as llama:
        said = llama.ask("logits", 1, 1, PROMPT, SINGLE, out)
    return np.fromfile(out, np.float32).reshape(said["rows"], -1)


def nmse(a: F32, b: F32) -> float:
    x, y = a.astype(np.float64), b.astype(np.float64)
    return float(((x - y) ** 2).sum() / (y**2).sum())


def error_of(directory: Path, kind: str, mix: str, isa: str, driver: Path | None = None) -> FormatError:
    pack = made(directory, kind, mix)
    ids = np.random.default_rng(7).integers(3, pack.spec.vocab_size, PROMPT + SINGLE).astype(np.int32)
    loaded = weights.load(pack, threads=1, isa=isa)
    wanted = logits(pack, decoded(pack), reference, ids)
    ours = nmse(logits(pack, loaded.weights, loaded.ops, ids), wanted)
    theirs = None
    if driver is not None and not pack.spec.sparse:
        theirs = nmse(llama_logits(pack, driver, ids), wanted[PROMPT - 1 :])
    limit = NUMBERS_NMSE if mix in NUMBERS else BLOCKS_NMSE
    stored = tensor_specs(pack).values()
    bits = 8 * sum(t.bytes for t in stored) / sum(t.parameters for t in stored)
    return FormatError(mix, kind, formats_in(pack), bits, ours, limit, theirs)


def formats_in(pack: Pack) -> dict[str, int]:
    """How many matrices have each format."""
    matrices = [t for t in pack.tensors.values() if len(t.shape) > 1 and t.format != "i32"]
    return dict(Counter(f for t in matrices for f in (t.format, t.down_format) if f is not None))


def row_of(e: FormatError) -> str:
    mark, llama = "" if e.nmse <= e.limit else " **above**", "" if e.llama is None else f"{e.llama:.1e}"
    formats = ", ".join(f"{n} {f}" for f, n in e.formats.items())
    return f"| {e.mix} | {e.kind} | {e.bits:.2f} | {e.nmse:.1e}{mark} | {e.limit:.0e} | {llama} | {formats} |"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = list(dict.fromkeys([*MIXES, *FORMATS]))
    p.add_argument("--mix", nargs="+", choices=every, default=list(MIXES))
    p.add_argument("--kind", nargs="+", choices=list(KINDS), default=list(KINDS))
    p.add_argument("--llama-driver", type=Path, help="llama-driver-native or -avx2, of vs_llamacpp.py")
    p.add_argument("--isa", default="", help="an instruction set, instead of the best")
    args = p.parse_args()
    print(f"NMSE of logits, {args.isa or hardware.isa().chosen}\n")
    print(
        "| mix | model | bits | NMSE | limit | llama.cpp | formats |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for mix in args.mix:
            for kind in args.kind:
                e = error_of(Path(scratch), kind, mix, args.isa, args.llama_driver)
                failed += not e.nmse <= e.limit
                print(row_of(e), flush=True)
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
