"""Verdicts on a card: made once for each setup and kind of model, by a child process, and kept in a cache.

A driver that crashes or hangs takes the child along, and nobody else.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from thermocline.errors import BadFile, IOFailure, ThermoclineError
from thermocline.files.bounded import parse_json, read_small
from thermocline.files.whole import replacing
from thermocline.model import quant
from thermocline.options import switched
from thermocline.session.options import default_cache_dir
from thermocline.session.self_check.miniature import Miniature

if TYPE_CHECKING:
    from thermocline.pack.stored_model import StoredModel

log = logging.getLogger(__name__)

# NMSE of (single tokens, a prompt). On the stand-in, over all of `synth`'s shapes, rounding gave up to 1.3e-8
# where weights are floats. In q4_k_m it gave (6.7e-4, 1.7e-3), and for prompts of two mixtures (LFM2 and
# Qwen3-Next) at most half the limit: what is nearly a half goes to either integer, and a prompt is int8 on
# the CPU alone.
FLOAT_LIMITS, BLOCK_LIMITS = (1e-4, 1e-4), (2e-3, 5e-3)
LIMIT_S = 300.0  # of the child: kernels are compiled, a second each, on a machine that may be busy
DYING_S = 5.0  # a process that the driver holds may not even be killed
WORKER = "thermocline.session.self_check.comparison"
PACKAGE = Path(__file__).resolve().parents[2]
MOST_BYTES = 1 << 16  # of a verdict's file

Outcome = Literal["right", "wrong", "crashed", "hung", "failed"]


@dataclass(frozen=True)
class Setup:
    """The card and the software that, beside the model, decide whether it computes rightly."""

    card: str
    driver: str
    torch: str
    triton: str
    sources: str  # a hash of the package's ops
    overlap: bool = False  # of launches

    @classmethod
    def of(cls, card: str, driver: str) -> Setup:
        return cls(
            card, driver, _version("torch"), _version("triton"), _sources(), switched(os.environ, "overlap")
        )

    def __str__(self) -> str:
        return f"{self.card}, driver {self.driver}, torch {self.torch}, triton {self.triton}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted((PACKAGE / "ops").rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class CardVerdict:
    """The finding of a self-check."""

    outcome: Outcome  # "failed": an error that may pass, as of a full card; it is checked again
    model: str  # its kind and formats
    said: str  # the finding in a few words
    seconds: float  # that the check took
    setup: Setup

    @property
    def line(self) -> str:
        return f"{self.model}: {self.outcome} ({self.said}, {self.seconds:.1f} s)"


def why_not(model: StoredModel, index: int, card: str, driver: str) -> str | None:
    """Return why GPU `index` is not to be trusted with a model, or None; check it where nobody has before."""
    small, setup = Miniature.of(model), Setup.of(card, driver)
    path = directory() / f"{_key(small, setup)}.json"
    verdict = _read(path)
    if verdict is None or verdict.outcome == "failed":
        verdict = check(small, setup, str(index))
        kept = _keep(path, verdict)
    else:
        kept = True
    if verdict.outcome == "right":
        return None
    why = f"its self-check {_ENDS[verdict.outcome]} ({verdict.said}; {setup})"
    return why if verdict.outcome == "failed" or not kept else f"{why}; to check it again, remove {path}"


_ENDS = {
    "wrong": "found other answers than the CPU's", "crashed": "crashed", "hung": "did not end",
    "failed": "failed",
}  # fmt: skip


def known(cards: list[str], driver: str) -> list[CardVerdict]:
    """Return the verdicts on these cards that hold for the present setup, by model."""
    setups = [Setup.of(card, driver) for card in dict.fromkeys(cards)]
    found = (_read(path) for path in sorted(directory().glob("*.json")))
    return sorted((v for v in found if v is not None and v.setup in setups), key=lambda v: v.model)


def directory() -> Path:
    return default_cache_dir(os.environ) / "gpu-self-check"


def _key(small: Miniature, setup: Setup) -> str:
    parts = repr((setup, small.spec, small.weight_format, sorted(small.formats.items()), small.optional))
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def _read(path: Path) -> CardVerdict | None:
    """Return a kept verdict; None: there is none that can be read, so the card is checked."""
    try:
        found = parse_json(read_small(path, MOST_BYTES), str(path))
        verdict = CardVerdict(**(found | {"setup": Setup(**found["setup"])}))
        return verdict if verdict.outcome in get_args(Outcome) else None
    except (IOFailure, BadFile, OSError, KeyError, TypeError):
        return None


def _keep(path: Path, verdict: CardVerdict) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            new.write_text(json.dumps(asdict(verdict), indent=1), encoding="utf-8")
    except (IOFailure, OSError) as e:
        log.warning(f"the GPU's self-check cannot be remembered, and runs each time: {e}")
        return False
    return True


# ---- the check


def check(small: Miniature, setup: Setup, asked: str) -> CardVerdict:
    """Compare a GPU with the CPU in a child process."""
    log.info(f"{setup.card} is checked for the first time with this setup: {small.label}")
    begin = time.monotonic()
    outcome: Outcome
    try:
        with tempfile.TemporaryDirectory(prefix="thermocline-", ignore_cleanup_errors=True) as name:
            where = Path(name)
            small.write(where / "model")
            outcome, said = _judged(where, _exit_code(where, asked), small)
    except (ThermoclineError, OSError) as e:  # no room for the miniature, no process
        outcome, said = "failed", str(e)
    return CardVerdict(outcome, small.label, said, round(time.monotonic() - begin, 1), setup)


def _exit_code(where: Path, asked: str) -> int | None:
    """Run the child; None: it did not end in time."""
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    argv = [sys.executable, "-P", "-m", WORKER, str(where), asked]
    with (where / "output").open("wb") as output, _running(argv, env, output) as child:
        try:
            return child.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return None


@contextlib.contextmanager
def _running(argv: list[str], env: dict[str, str], output: object) -> Iterator[subprocess.Popen[bytes]]:
    """A child that is killed at the end, whatever happens; one that cannot be is left behind."""
    child = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)  # type: ignore[call-overload]
    try:
        yield child
    finally:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(DYING_S)


def _judged(where: Path, code: int | None, small: Miniature) -> tuple[Outcome, str]:
    if code is None:
        return "hung", f"no answer within {LIMIT_S:g} s"
    if code != 0:
        return "crashed", _signal_name(code) if code < 0 else _last_line(
            where / "output"
        ) or f"exit code {code}"
    answer = parse_json(read_small(where / "answer.json", MOST_BYTES), "answer.json")
    if "failed" in answer:
        return "failed", str(answer["failed"])
    found = float(answer["few"]), float(answer["many"])
    right = all(nmse <= most for nmse, most in zip(found, limits(small), strict=True))
    few, many = (f"{nmse:.2g} (at most {most:g})" for nmse, most in zip(found, limits(small), strict=True))
    return ("right" if right else "wrong"), f"NMSE of single tokens {few}, of a prompt {many}"


def limits(small: Miniature) -> tuple[float, float]:
    """Return the NMSE that is still rounding, of few tokens and of a prompt."""
    return BLOCK_LIMITS if any(quant.FORMATS[f].block > 1 for f in small.matrix_formats) else FLOAT_LIMITS


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _last_line(output: Path) -> str:
    lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else ""
