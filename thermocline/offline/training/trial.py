"""Try predictors out: how close they are to exact on several kinds of text, and how many bytes they read.

A bound that holds on one kind of text says little about others: predictors at 0.002 nats on stories were at
0.15 on an encyclopaedia.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from thermocline.engine.decoder import bind, for_context
from thermocline.engine.sampler import SamplingParams
from thermocline.errors import UsageError
from thermocline.offline import evaluate
from thermocline.ops.interface import I32, FFNStats, Weights
from thermocline.pack.predictor import Predictors
from thermocline.pack.stored_model import tensor_specs
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session
from thermocline.text.tokenizer import Tokenizer, read_text

if TYPE_CHECKING:
    from thermocline.files.bounded import Json
    from thermocline.pack.pack import Pack

MIX = Path(__file__).parents[2] / "mix"
OWN = "its own"  # the text that a model writes
OWN_TOGETHER = 4  # of them, computed together
Texts = tuple[tuple[str, I32], ...]  # name, [windows, tokens of a window]
Progress = Callable[[str, int, int, str], None]  # what, done, in all, unit


@dataclass(frozen=True)
class TrialJob:
    """The input of trials."""

    pack: Pack
    threads: int
    texts: Texts  # texts to measure on
    own: bool  # whether to measure on a text that the model writes, too
    context: int
    limit: int  # windows of each text
    seed: int
    ram: float | None = None  # GiB that all of it may take; None: what is free
    gpu: str = "off"
    vram: float | None = None

    @property
    def contexts(self) -> set[int]:
        """Return the sizes of windows."""
        return {windows.shape[1] for _, windows in self.texts} | ({self.context} if self.own else set())


def past(deadline: float) -> bool:
    return time.monotonic() > deadline


def mix(tokenizer: Tokenizer, context: int, limit: int) -> Texts:
    """Return the package's texts as windows, at most `limit` of each. A short text gives one short window."""
    texts = [(path.stem, read_text(path)) for path in sorted(MIX.glob("*.txt"))]
    return tuple(
        (name, evaluate.windows(tokenizer, text, min(context, len(tokenizer.encode(text))), limit))
        for name, text in texts
    )


@dataclass(frozen=True)
class Verdict:
    """The result of a trial: the divergence from exact, and the bytes that the FFNs read for a token."""

    divergence: evaluate.Divergence  # over all texts
    texts: tuple[tuple[str, evaluate.Divergence], ...]
    predicted: float  # share of gate rows that are read
    active: float  # share of neurons that are not zero in exact mode
    bytes: float  # per token: predictors, gate, up and down rows
    bytes_exact: float
    predictor_bytes: float  # per token, of `bytes`

    @property
    def worst(self) -> tuple[str, evaluate.Divergence]:
        """The text whose predictions are furthest from exact."""
        return max(self.texts, key=lambda text: text[1].kld.value)

    def facts(self) -> Json:
        d, (name, worst) = self.divergence, self.worst
        return {
            "tokens": d.own.tokens,
            "kld": asdict(worst.kld),
            "kld_p99": worst.kld_p99,
            "worst_text": name,
            "texts": [_text_facts(*text) for text in self.texts],
            "same_top": asdict(d.same_top),
            "perplexity": asdict(d.own.perplexity),
            "perplexity_exact": asdict(d.base.perplexity),
            "perplexity_change_percent": 100 * (d.ratio.value - 1),
            "predicted_fraction": self.predicted,
            "active_fraction": self.active,
            "ffn_bytes_per_token": self.bytes,
            "ffn_bytes_per_token_exact": self.bytes_exact,
            "predictor_bytes_per_token": self.predictor_bytes,
        }


def _text_facts(name: str, d: evaluate.Divergence) -> Json:
    change = 100 * (d.ratio.value - 1)
    facts = {"name": name, "tokens": d.own.tokens, "kld": asdict(d.kld), "kld_p99": d.kld_p99}
    return facts | {"perplexity_change_percent": change}


@dataclass(frozen=True)
class Judge:
    """A loaded model in which predictors are tried. Calling it with predictors returns a `Verdict`."""

    session: Session
    texts: Texts
    progress: Callable[[int, int, str], None]
    deadline: float = math.inf

    @staticmethod
    def of(a: TrialJob, predictors: int, deadline: float, progress: Progress) -> Judge:
        """Open a judge of predictors of so many bytes at most, and make its texts. Raises OutOfBudget."""
        session = Judge.open_session(a, predictors, progress)
        texts = a.texts
        if a.own:
            late = partial(past, _halfway(deadline))
            own = own_text(session, a.limit, a.context, a.seed, late, at_least=0 if texts else 1)
            texts = (((OWN, own),) if len(own) else ()) + texts
        return Judge(session, texts, partial(progress, "trying"), deadline)

    @staticmethod
    def open_session(a: TrialJob, predictors: int, progress: Progress = lambda *_: None) -> Session:
        """Open the model; read no weight. Predictors take memory twice while they are put in their place.

        With a GPU all readers share the engine's cache. It computes their tokens in pieces as large as its
        buffers of logits are.
        """
        spec, contexts, batch, positions = a.pack.spec, a.contexts, OWN_TOGETHER, None
        gpu = a.gpu if spec.n_experts == 1 else "off"  # which would compute a mixture's neurons unasked
        readers = sum(2 * evaluate.reader_bytes(spec, context) for context in contexts)
        if gpu != "off":
            readers, batch = 2 * len(contexts) * evaluate.scoring_bytes(spec), evaluate.GPU_PIECE
            largest = max(contexts, default=a.context)
            positions = evaluate.positions_for(max(2 * len(contexts), batch), max(largest, a.context))
        options = EngineOptions(
            threads=a.threads, context=a.context, max_batch=batch, kv_tokens=positions, ram=a.ram, gpu=gpu,
            vram=a.vram,
        )  # fmt: skip
        return Session.open(
            a.pack,
            options,
            progress=lambda what, done, size: progress(what, done, size, "B"),
            beside=readers + 2 * predictors,
            tried=2 * predictors,
        )

    def quick(self) -> Judge | None:
        """Return a judge with a quarter of the windows and half the time; None if there are few windows."""
        few = tuple((name, windows[: max(1, len(windows) // 4)]) for name, windows in self.texts)
        many = sum(len(windows) for _, windows in self.texts)
        small = max(sum(len(windows) for _, windows in few), 4)
        return replace(self, texts=few, deadline=_halfway(self.deadline)) if many >= 2 * small else None

    def __call__(self, predictors: Predictors) -> Verdict:
        trial = self.session.with_predictors(predictors)
        found: list[list[evaluate.Comparison]] = [[] for _ in self.texts]
        sums = FFNStats(), FFNStats()
        readers = {c: self._readers(trial, c, sums) for c in {w.shape[1] for _, w in self.texts}}
        turns = [(at, i) for i, (_, w) in enumerate(self.texts) for at in range(len(w))]
        for done, (at, i) in enumerate(sorted(turns)):  # of every text one before a second of any
            self.progress(done, len(turns), " windows")
            if at and past(self.deadline):
                break
            window = self.texts[i][1][at : at + 1]
            found[i] += evaluate.comparisons(*readers[window.shape[1]], window)
        self.progress(len(turns), len(turns), " windows")
        for reader in (one for pair in readers.values() for one in pair):
            reader.close()
        joined = [evaluate.Comparison.join(parts) for parts in found]
        of = tuple((name, evaluate.Divergence.of(j)) for (name, _), j in zip(self.texts, joined, strict=True))
        return self._verdict(evaluate.Divergence.of(evaluate.Comparison.join(joined)), of, *sums)

    def _readers(
        self, trial: Weights, context: int, sums: tuple[FFNStats, FFNStats]
    ) -> tuple[evaluate.Reader, evaluate.Reader]:
        """Return the readers of the trial and of exact mode, which add to `sums`."""
        session, loaded = self.session, self.session.loaded
        spec, ops = for_context(session.pack.spec, context), loaded.ops
        model, there = bind(spec, trial, ops), session.gpus is not None
        cache, step = (session.load().kv, evaluate.GPU_PIECE) if there else (None, None)
        exact = model if there else bind(spec, loaded.weights, ops)  # a GPU's recordings are of one
        own = evaluate.Reader(model, ops, context=context, sparsity="predict", cache=cache)
        base = evaluate.Reader(exact, ops, context=context, step=step, cache=cache)
        own.stats, base.stats = sums
        return own, base

    def _verdict(
        self,
        d: evaluate.Divergence,
        texts: tuple[tuple[str, evaluate.Divergence], ...],
        own: FFNStats,
        base: FFNStats,
    ) -> Verdict:
        """Return the verdict. Exact mode counts as if it read tokens one by one: batches share rows."""
        spec, specs = self.session.pack.spec, tensor_specs(self.session.pack)
        gate, neuron = (
            statistics.fmean(specs[f"layers.{i}.{kind}"].payload for i in spec.ffn_layers)
            for kind in ("gate.weight", "bundle")
        )
        row = neuron / (2 if spec.gated else 1)  # up, or down
        layers = len(spec.ffn_layers)
        every = layers * spec.n_experts * spec.ffn_dim
        tokens = own.neurons / every
        active = base.active / base.neurons
        read = own.predicted * gate + own.rows * row + own.predictor_bytes
        gates = layers * spec.n_experts_active * spec.ffn_dim
        exact, predictors = gates * gate + every * active * neuron, own.predictor_bytes / tokens
        return Verdict(d, texts, own.predicted / own.neurons, active, read / tokens, exact, predictors)


def _halfway(deadline: float) -> float:
    """Return the deadline after half of the remaining time."""
    now = time.monotonic()
    return now + (deadline - now) / 2


def own_text(
    session: Session,
    count: int,
    context: int,
    seed: int,
    late: Callable[[], bool] = lambda: False,
    at_least: int = 0,
) -> I32:
    """Return texts that the model writes by itself [count, context], to which no predictor was fitted.

    There are fewer if it gets `late`, but no fewer than `at_least`. Raises UsageError.
    """
    spec = session.pack.spec
    start = spec.bos_id if spec.bos_id is not None else next(iter(spec.eos_ids), None)
    if start is None:
        raise UsageError("this model cannot begin a text by itself; give one with --text FILE")
    engine = session.load()
    free = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, ignore_eos=True)
    asked = [
        engine.submit([start], replace(free, seed=seed + i, max_tokens=context - 1)) for i in range(count)
    ]
    while engine.step():
        if late() and sum(r.finish_reason is not None for r in asked) >= at_least:
            break
    whole = [r.ids[:context] for r in asked if len(r.ids) >= context]
    return np.array(whole, np.int32).reshape(-1, context)
