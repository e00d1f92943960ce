"""Workers in the place of `self_check.comparison`, for tests: a card that computes wrongly, crashes or hangs.

python -m pretended_cards DIR GPU       # CARD says which
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def main(directory: str, asked: str) -> None:
    where, card = Path(directory), os.environ["CARD"]
    with open(os.environ["CARD_LOG"], "a") as log:
        log.write(f"{card} {asked}\n")
    if card == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if card == "hangs":
        time.sleep(600)
    if card == "raises":
        raise RuntimeError("no such symbol")
    if card == "full":
        answer: dict[str, Any] = {"failed": "its memory is full"}
    else:
        answer = {"few": float(card), "many": 1e-6}
    (where / "answer.json").write_text(json.dumps(answer))


def wrongly(directory: str) -> None:
    """The stand-in with one kernel that is a little off."""
    from thermocline.ops.kernels import torch_kernels
    from thermocline.session.self_check import comparison

    name = os.environ["CARD"]
    true = getattr(torch_kernels, name)

    def off(out: Any, *args: Any) -> None:
        true(out, *args)
        out[..., -32:] *= 1.5

    setattr(torch_kernels, name, off)
    comparison.main(directory, "stand-in")


if __name__ == "__main__":
    if sys.argv[2] == "stand-in":
        wrongly(sys.argv[1])
    else:
        main(*sys.argv[1:])
