"""Whether a GGUF file is the model that llama.cpp runs: greedy tokens and logits, side by side.

    python bench/llamacpp/agree.py --gguf FILE --build-dir DIR [--pack DIR]
        [--llama-source DIR --llama-build DIR] [--isa avx2]

Each of several random prompts is continued greedily by Thermocline; llama.cpp is then given the same tokens,
and each row of its logits compared: the likeliest token, and where that differs, the margin by which
llama.cpp prefers its own, in standard deviations of the difference between the engines: a few can go either
way.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from build_llamacpp import build, build_driver, source_tree
from engines import LOGITS_PROMPT, Duel, nmse
from thermocline_driver import opened

from thermocline.engine.sampler import SamplingParams
from thermocline.machine import hardware
from thermocline.offline.bench import Test, random_tokens
from thermocline.pack.stored_model import StoredModel
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gguf", type=Path, required=True)
    p.add_argument("--pack", type=Path, help="what `thermocline pack` made of it, instead of the file itself")
    p.add_argument("--build-dir", type=Path, required=True, help="where llama.cpp is, or will be, built")
    p.add_argument("--llama-source", type=Path, help="an unpacked llama.cpp tree, instead of fetching one")
    p.add_argument("--llama-build", type=Path, help="its build directory, instead of making one")
    p.add_argument("--isa", choices=["native", "avx2"], default="native", help="of both engines")
    p.add_argument("--prompts", type=int, default=10)
    p.add_argument("--tokens", type=int, default=64)
    return p.parse_args()


def answers(model: StoredModel, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Prompts and their greedy continuations."""
    threads = hardware.cores().usable_physical
    options = EngineOptions(threads=threads, context=LOGITS_PROMPT + tokens)
    engine = Session.open(model, options).load()
    out = []
    for ids in prompts:
        request = engine.submit(ids, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
        while request.finish_reason is None:
            engine.step()
        out.append(request.ids)
    return out


def compare(duel: Duel, threads: int, tokens: int, directory: Path) -> dict[str, Any]:
    with duel.ours() as ours:
        a = ours.logits(threads, directory, tokens)[:tokens]
    with duel.llama(mmap=1, repack=1) as llama:
        b = llama.logits(threads, directory, tokens)[:tokens]
    mine = a.argmax(1)
    other = np.flatnonzero(mine != b.argmax(1))
    margins = [(b[r].max() - b[r, mine[r]]) / (a[r] - b[r]).std() for r in other]
    return {
        "nmse": nmse(a, b),
        "rows": len(a),
        "same": len(a) - len(other),
        "margins": [round(float(m), 2) for m in margins],
    }


def main() -> None:
    args = arguments()
    source = args.llama_source or source_tree(args.build_dir)
    driver = build_driver(
        source, build(source, args.llama_build or args.build_dir / args.isa, args.isa), args.build_dir
    )
    given, threads = args.pack or args.gguf, hardware.cores().usable_physical
    model = opened(given)
    prompts = [random_tokens(model.spec, seed, LOGITS_PROMPT) for seed in range(args.prompts)]
    test = Test(threads, 0, LOGITS_PROMPT, args.tokens)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "tokens.i32"
        for i, ids in enumerate(answers(model, prompts, args.tokens)):
            np.array([*ids, 0], np.int32).tofile(file)  # the row after the last token is not compared
            duel = Duel(given, model.spec, args.gguf, file, [test], args.isa, driver)
            print(json.dumps({"prompt": i} | compare(duel, threads, args.tokens, Path(scratch))), flush=True)


if __name__ == "__main__":
    main()
