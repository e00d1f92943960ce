"""Compare our quantiser with llama-quantize and its imatrix: bytes, and mean KL divergence from the source.

    python bench/llamacpp/quantise.py PACK --text TEXT [--formats q4_k_m q6_k] [--llama build/bin]

Both quantise the same f32 weights, with moments of the same inputs (written as an imatrix for llama-quantize;
for models that llama.cpp runs, `--llama-imatrix` has its own tool measure them). All results are decoded to
f32 and judged by `offline/evaluate.py`, so only the weights differ. A ReLU model goes to llama-quantize with
down as it is for other models; ours has down's rows by neuron. `--noise X` adds X of a matrix's RMS to its
weights first: a model that exists only quantised would otherwise fit its own grid.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thermocline.convert import to_gguf
from thermocline.convert.importer import pack as import_pack
from thermocline.files.bounded import read_small
from thermocline.files.gguf import GGUF
from thermocline.model.spec import ModelSpec
from thermocline.offline import evaluate
from thermocline.offline.packing import over_texts
from thermocline.offline.packing import quantise_pack as steps
from thermocline.offline.packing.rows import PackRows
from thermocline.ops.interface import I32
from thermocline.pack.pack import Pack
from thermocline.pack.writer import PackExtras, write_pack
from thermocline.quantise.importance import Importance, of_moments
from thermocline.quantise.moments import Moments

F32 = NDArray[np.float32]
FORMATS = ("q4_k_m", "q5_k_m", "q6_k", "q3_k_m", "q4_0", "iq4_xs")
GGUF_NAMES = {
    "qkv": ("attn_q", "attn_k", "attn_v"), "attn_out": ("attn_output",),
    "ffn": ("ffn_gate", "ffn_up"), "down": ("ffn_down",),
}  # fmt: skip


class Twin:
    """Rows of a pack for one of another activation: down is turned where bundles begin or end; with noise."""

    def __init__(self, rows: PackRows, spec: ModelSpec, noise: float = 0.0) -> None:
        self.rows, self.spec, self.noise = rows, spec, noise
        self._turned: tuple[str, F32] = ("", np.empty((0, 0), np.float32))

    def __call__(self, name: str, first: int, last: int, /) -> NDArray[Any]:
        own, s = self.rows.pack.spec, self.spec
        if own.sparse == s.sparse or ".down" not in name or name.endswith(".bias"):
            found = name if own.sparse == s.sparse else name.replace(".up.weight", ".up")
            found = found if s.sparse == own.sparse or not s.sparse else found.replace(".up", ".up.weight")
            x = self.rows(found, first, last)
            return self._noisy(x, name, first) if x.ndim == 2 else x
        if self._turned[0] != name:
            layer = name.rpartition(".down")[0]
            there, n = (
                f"{layer}.down" if own.sparse else f"{layer}.down.weight",
                s.ffn_dim if own.sparse else s.dim,
            )
            self._turned = (name, np.ascontiguousarray(self.rows(there, 0, n).T))
        return self._noisy(self._turned[1][first:last], name, first)

    def _noisy(self, x: F32, name: str, first: int) -> F32:
        if not self.noise:
            return x
        rng = np.random.default_rng([first, *name.encode()])
        rms = np.float32(np.sqrt(np.mean(np.square(x))))
        return x + rng.standard_normal(x.shape, np.float32) * rms * np.float32(self.noise)


def rewritten(source: Pack, spec: ModelSpec, dst: Path, noise: float = 0.0) -> Pack:
    """Write a pack's weights as f32, for this spec."""
    files = {name: read_small(source.path / name, 1 << 26) for name in source.files}
    optional = {n for n, t in source.tensor_specs().items() if t.optional and ".order" not in n}
    kept = {n for n in optional if "activation_count" not in n}
    write_pack(dst, spec, "f32", Twin(PackRows(source), spec, noise), PackExtras(optional=kept, files=files))
    return Pack.open(dst)


def write_imatrix(path: Path, importance: Importance) -> None:
    """Write importances as llama.cpp's older imatrix files have them."""
    entries = []
    for name, values in importance.items():
        layer, _, reader = name.rpartition(".")
        for tensor in GGUF_NAMES.get(reader, ()):
            entries.append((f"blk.{layer.removeprefix('layers.')}.{tensor}.weight", values))
    with open(path, "wb") as out:
        out.write(struct.pack("<i", len(entries)))
        for tensor, values in entries:
            out.write(struct.pack("<i", len(tensor)) + tensor.encode())
            out.write(struct.pack("<ii", 1, values.size) + values.astype("<f4").tobytes())
        out.write(struct.pack("<ii", 1, 4) + b"text")


def matrix_bytes(pack: Pack) -> int:
    return sum(t.payload * t.rows for t in pack.tensor_specs().values() if not t.vector)


def gguf_matrix_bytes(path: Path) -> int:
    with GGUF(path) as gguf:
        return sum(t.end - t.start for t in gguf.tensors.values() if len(t.shape) > 1)


class Comparison:
    def __init__(self, o: argparse.Namespace, work: Path) -> None:
        self.o, self.work = o, work
        given = Pack.open(o.pack)
        self.spec = given.spec
        self.source = rewritten(given, self.spec, work / "source", o.noise)
        plain = replace(self.spec, activation="silu") if self.spec.sparse else self.spec
        self.twin = rewritten(self.source, plain, work / "twin") if plain != self.spec else self.source
        self.gguf = work / "twin.gguf"
        to_gguf.write_gguf(self.twin, self.gguf)
        text = Path(o.text).read_text()
        self.calibration = over_texts.windows_for(self.source, text, o.calibrate_tokens)
        self.test: I32 = over_texts.windows_for(self.source, text, o.test_tokens, skip=len(self.calibration))
        self.moments: Moments = over_texts.measure_inputs(self.source, self.calibration, o.threads, silent)
        self.importance = of_moments(self.moments)
        self.imatrix = work / "imatrix.dat"
        if o.llama_imatrix and not self.spec.sparse:
            self.imatrix = self._llama_imatrix(text)
        else:
            write_imatrix(self.imatrix, self.importance)

    def _llama_imatrix(self, text: str) -> Path:
        out, cut = self.work / "imatrix.gguf", self.work / "calibration.txt"
        cut.write_text(text[: int(len(text) * 0.5)])
        chunks = str(len(self.calibration))
        self._llama("llama-imatrix", "-m", self.gguf, "-f", cut, "-o", out, "--chunks", chunks, "-c", "512")
        return out

    def _llama(self, tool: str, *arguments: str | Path) -> None:
        command = [str(Path(self.o.llama) / tool), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")

    def judged(self, pack: Pack) -> evaluate.Divergence:
        decoded = rewritten(pack, self.spec, self.work / "decoded")
        found = over_texts.divergence(decoded, self.source, self.test, self.o.threads, silent)
        subprocess.run(["rm", "-r", self.work / "decoded"], check=True)
        return found

    def ours(self, format: str, importance: Importance, moments: Moments) -> tuple[int, evaluate.Divergence]:
        dst = self.work / "ours"
        job = steps.QuantiseJob(self.source, dst, format, self.o.threads, importance, moments, overwrite=True)
        steps.quantise(job, silent)
        made = Pack.open(dst)
        return matrix_bytes(made), self.judged(made)

    def theirs(self, format: str, imatrix: bool) -> tuple[int, evaluate.Divergence]:
        out, dst = self.work / "theirs.gguf", self.work / "theirs"
        name = {"mxfp4": "MXFP4_MOE"}.get(format, format.upper())
        asked = ("--imatrix", self.imatrix) if imatrix else ()
        self._llama("llama-quantize", *asked, self.gguf, out, name, str(self.o.threads))
        import_pack(out, dst, overwrite=True)
        return gguf_matrix_bytes(out), self.judged(Pack.open(dst))


def silent(what: str, done: int, of: int, unit: str) -> None:
    """Show nothing."""


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("pack")
    p.add_argument("--text", required=True)
    p.add_argument("--formats", nargs="+", default=FORMATS)
    p.add_argument("--llama", default="build/bin", help="where llama-quantize and llama-imatrix are")
    p.add_argument("--llama-imatrix", action="store_true", help="measure with llama-imatrix")
    p.add_argument("--calibrate-tokens", type=int, default=20480)
    p.add_argument("--test-tokens", type=int, default=12288)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--noise", type=float, default=0.0)
    o = p.parse_args()
    with tempfile.TemporaryDirectory(dir=o.__dict__.get("work")) as work:
        c = Comparison(o, Path(work))
        for format in o.formats:
            rows: dict[str, Callable[[], tuple[int, evaluate.Divergence]]] = {
                "llama-quantize": partial(c.theirs, format, False),
                "llama-quantize, imatrix": partial(c.theirs, format, True),
                "ours": partial(c.ours, format, {}, {}),
                "ours, importance": partial(c.ours, format, c.importance, {}),
                "ours, calibrated": partial(c.ours, format, {}, c.moments),
            }
            for how, run in rows.items():
                nbytes, d = run()
                figures = {"kld": d.kld.value, "error": d.kld.error, "same_top": d.same_top.value}
                print(json.dumps({"format": format, "how": how, "bytes": nbytes} | figures), flush=True)


if __name__ == "__main__":
    main()
