"""`thermocline bench`: prompt and token speed, as llama-bench measures them, beside the memory's speed.

The work is done by `Engine`, as in a user's run. A row has llama-bench's keys, then ours.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from thermocline import __version__
from thermocline.engine.kv_cache import BLOCK, blocks_for
from thermocline.engine.request import Figures, Request, request_for
from thermocline.engine.request import disk_figures as of_disk
from thermocline.engine.sampler import Sampler, SamplingParams
from thermocline.errors import UsageError
from thermocline.machine import hardware
from thermocline.ops.cpu import CpuOps
from thermocline.ops.interface import CPU, opaque
from thermocline.pack.pack import Pack, parts_of, planting
from thermocline.pack.stored_model import StoredModel
from thermocline.session.session import Session
from thermocline.text.tokenizer import FILE, Tokenizer, read_text

if TYPE_CHECKING:
    from thermocline import _native
    from thermocline.model.spec import ModelSpec
    from thermocline.model.tensors import TensorInfo
    from thermocline.session.options import EngineOptions

Progress = Callable[[str, int, int, str], None]  # what, done, total, unit
ROOF_SECONDS = 0.3
CLOCKED_TOKENS = 8  # tokens of a test that are run once more to tell Python's time from the kernels'


# ---- tests


@dataclass(frozen=True)
class Test:
    """A test: `prompt` tokens together, then `gen` one by one, after `depth` tokens of context."""

    threads: int
    depth: int
    prompt: int
    gen: int

    @property
    def name(self) -> str:
        parts = [f"{what}{n}" for what, n in (("pp", self.prompt), ("tg", self.gen)) if n]
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def given(self) -> int:
        """Return the tokens of context and prompt: at least one, from which generation starts."""
        return max(1, self.depth + self.prompt)

    @property
    def context(self) -> int:
        return self.given + self.gen


def tests_of(
    *,
    prompts: Iterable[int],
    gens: Iterable[int],
    pairs: Iterable[tuple[int, int]],
    depths: Iterable[int],
    threads: Iterable[int],
) -> list[Test]:
    """Return the tests in llama-bench's order; 0 leaves one out. UsageError if none is left."""
    both = [(p, 0) for p in prompts if p] + [(0, n) for n in gens if n] + [pg for pg in pairs if any(pg)]
    tests = [Test(t, d, p, n) for t in threads for d in depths for p, n in both]
    if not tests:
        raise UsageError("nothing to measure: -p and -n are both 0, and there is no -pg")
    return list(dict.fromkeys(tests))


def check_context(spec: ModelSpec, tests: Iterable[Test]) -> None:
    for test in tests:
        if test.context > spec.max_context:
            raise UsageError(
                f"{test.name} needs a context of {test.context} tokens; the model's limit is "
                f"{spec.max_context}"
            )


@dataclass(frozen=True)
class Feed:
    """The tokens of all tests: first those of the deepest context, then those that a test adds."""

    name: str  # the source of the tokens
    ids: list[int]


def feed_of(pack: StoredModel, tests: Sequence[Test], text: str | None, seed: int) -> Feed:
    n = max(t.depth for t in tests) + max(t.context - t.depth for t in tests) + 1  # one that ends the test
    if text is None:
        return Feed(f"random, seed {seed}", random_tokens(pack.spec, seed, n))
    return Feed(text, text_tokens(pack, Path(text), n))


def random_tokens(spec: ModelSpec, seed: int, n: int) -> list[int]:
    """Return random tokens, none of which ends a text. The first is the model's BOS, if it has one."""
    usable = np.setdiff1d(np.arange(spec.vocab_size), spec.eos_ids)
    ids = [int(i) for i in np.random.default_rng(seed).choice(usable, n)]
    return ids if spec.bos_id is None else [spec.bos_id, *ids[1:]]


def text_tokens(pack: StoredModel, path: Path, n: int) -> list[int]:
    if not pack.small_files.has(FILE):
        raise UsageError(f"{pack.path}: has no tokenizer for {path}; leave --text out to feed random tokens")
    found = Tokenizer(pack.small_files, pack.spec).encode(read_text(path), parse_special=True)
    ids = [i for i in found if i not in pack.spec.eos_ids]
    if len(ids) < n:
        raise UsageError(f"{path}: {len(ids)} tokens, the tests need {n}; give a longer text")
    return ids[:n]


# ---- running it


class Recorder(Protocol):
    """Looks on while tokens are computed: native ops that record, or what reads of a GPU's ops."""

    def begin(self) -> None:
        """Record from here on."""

    def take(self, tokens: int) -> None:
        """Take in a step of so many tokens that has ended."""


class Script(Sampler):
    """A sampler that works like a greedy one, but returns the next of `tokens`, so that the text is fixed."""

    def __init__(self, spec: ModelSpec, tokens: Iterable[int]) -> None:
        super().__init__(SamplingParams(temperature=0, seed=0), spec.vocab_size)
        self._tokens = iter(tokens)

    def sample(self, logits: np.ndarray[Any, np.dtype[np.float32]]) -> int:
        super().sample(logits)
        return next(self._tokens)


class Clock:
    """Times the native calls of an ops object. The rest of a token's time is Python's."""

    def __init__(self, native: Any) -> None:
        self.native, self.ns = native, 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.native, name)

        def timed(*args: Any) -> Any:
            begin = time.perf_counter_ns()
            try:
                return call(*args)
            finally:
                self.ns += time.perf_counter_ns() - begin

        return timed


@dataclass(frozen=True)
class Sample:
    """One run of a test."""

    ns: int
    first_token_s: float  # from the start of the timed part; only meaningful with a prompt
    figures: Figures


class Bench:
    """One engine over a loaded pack for all `tests`, with a native context per thread count.

    The deepest context is computed once and held in the KV cache: shallower ones are its beginnings.
    """

    def __init__(
        self,
        pack: StoredModel,
        tests: Sequence[Test],
        feed: Feed,
        options: EngineOptions,
        progress: Progress,
    ) -> None:
        """`options`: but for the context, threads and requests together, which are the tests'."""

        def loading(what: str, done: int, total: int) -> None:
            progress(what, done, total, "B")

        begin = time.perf_counter()
        self.pack, self.tests, self.feed, self.progress = pack, tests, feed, progress
        depth, widest = max(t.depth for t in tests), max(t.threads for t in tests)
        self.context_ids, self.next_ids = feed.ids[:depth], feed.ids[depth:]
        context = max(t.context for t in tests)
        kv_blocks = depth // BLOCK + blocks_for(max(t.context - t.depth for t in tests)) + 1
        kv_blocks *= (
            1 if pack.spec.sliding_window is None else 2
        )  # held and running, each with its own window
        options = replace(options, context=context, max_batch=1, threads=widest, kv_tokens=kv_blocks * BLOCK)
        self.session = Session.open(pack, options, progress=loading)
        try:
            if self.session.gpus is not None and len({t.threads for t in tests}) > 1:
                raise UsageError("with a GPU one number of threads at a time: its recordings are made for it")
            self.engine = self.session.load()
            every = {t.threads for t in tests}
            self.ops = {t: opaque(CpuOps(t)) for t in every - {widest}}
            self.ops[widest] = self.session.loaded.ops
            self.load_s = time.perf_counter() - begin
            self._compute_context()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free the weights; a GPU's queues end."""
        self.session.close()

    def _compute_context(self) -> None:
        if not self.context_ids:
            return
        request = self._submit(self.context_ids, self.next_ids[1:2])
        while request.finish_reason is None:
            self._step(request)
            self.progress("computing the context", request.computed, len(self.context_ids), " tokens")
        self._held = self.engine.kv.open([*self.context_ids, 0])

    def roof(self, threads: int) -> float | None:
        """Return the GB/s of reading the weights. None if a GPU holds a part, or if they are too few."""
        return self.session.read_gbs(threads, ROOF_SECONDS)

    def warm_up(self) -> None:
        """Run every test once, with at most one generated token."""
        for i, test in enumerate(self.tests):
            self.progress("warming up", i, len(self.tests), " tests")
            self.sample(replace(test, gen=min(1, test.gen)))
        self.progress("warming up", len(self.tests), len(self.tests), " tests")

    def sample(self, test: Test) -> Sample:
        request = self._start(test)
        begin = time.perf_counter()
        ns = self._finish(request, test)
        return Sample(ns, request.first_s - begin, request.figures())

    def watch(self, test: Test, recorder: Recorder) -> None:
        """Run a test once and record its generated tokens, which are the script's also with a GPU."""
        if isinstance(recorder, CpuOps):
            self.ops[test.threads] = opaque(recorder)
        self.engine.model = replace(self.engine.model, chooser=None)  # it would begin a step ahead
        request = self._start(test)
        recorder.begin()
        for i in range(test.gen):
            self.progress("recording", i, test.gen, " tokens")
            self._until(request, i + 2)
            recorder.take(1)
        self.progress("recording", test.gen, test.gen, " tokens")

    def python_share(self, test: Test) -> float | None:
        """Return Python's share of a token's time; None if no token is generated, or with a GPU."""
        if test.gen == 0 or self.session.gpus is not None:  # of a GPU's step the CPU's calls are a part
            return None
        test = replace(test, prompt=0, gen=min(test.gen, CLOCKED_TOKENS))
        request = self._start(test)
        ops = copy.copy(cast(CpuOps, self.ops[test.threads]))
        clock = Clock(ops.native)
        ops.native = cast("_native.Context", clock)  # which times its calls
        self.engine.ops = opaque(ops)
        ns = self._finish(request, test)
        return 1 - clock.ns / ns

    # -- one request

    def _start(self, test: Test) -> Request:
        """Start a request and compute all that is not timed: its context and, without a prompt, one token."""
        engine = self.engine
        engine.ops = self.ops[test.threads]
        if test.prompt:  # the roof emptied the caches and let the threads sleep; a token undoes both
            self._until(self._submit(self.next_ids[:1], self.next_ids[1:2]), 1)
        own = test.given - test.depth
        given = self.context_ids[: test.depth] + self.next_ids[:own]
        given[0] = self.feed.ids[0]  # a BOS where there is one
        request = self._submit(self._unseen(given, test), self.next_ids[own : own + test.gen + 1])
        chunk = engine.prefill_chunk
        engine.prefill_chunk = 0
        engine.step()  # admits it
        while request.computed < test.depth and test.prompt:
            engine.prefill_chunk = min(chunk, test.depth - request.computed)
            self._step(request)
        engine.prefill_chunk = chunk
        if not test.prompt:
            self._until(request, 1)
        return request

    def _finish(self, request: Request, test: Test) -> int:
        """Finish a request. Return the nanoseconds of the timed part."""
        begin = time.perf_counter_ns()
        self._until(request, test.gen + 1)
        return time.perf_counter_ns() - begin

    def _until(self, request: Request, tokens: int) -> None:
        while len(request.ids) - request.n_prompt < tokens:
            self._step(request)

    def _step(self, request: Request) -> None:
        assert request.finish_reason is None, "a script ends with the last token asked for"
        self.engine.step()
        if request.error is not None:
            raise request.error

    def _submit(self, ids: list[int], answer: list[int]) -> Request:
        params = SamplingParams(max_tokens=len(answer), temperature=0)
        request = request_for(self.pack.spec, self.engine.context, None, ids, params)
        request.sampler = Script(self.pack.spec, answer)
        return self.engine.queue(request)

    def _unseen(self, ids: list[int], test: Test) -> list[int]:
        """Change the prompt's first token (but not a BOS) until no part of the prompt is in the cache."""
        at = 1 if test.depth == 0 and test.prompt > 1 else test.depth
        while test.prompt:
            table = self.engine.kv.open(ids)
            cached = table.sealed * BLOCK
            self.engine.kv.close(table)
            if cached <= test.depth:
                break
            ids[at] = (ids[at] + 1) % self.pack.spec.vocab_size
        return ids


# ---- measuring


def rows(bench: Bench, repetitions: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each test when it is done. Tests and measurements of memory speed alternate.

    After Ctrl-C the row of an unfinished test is the last one, if it has any runs.
    """
    bench.warm_up()
    shared = LLAMA_BENCH | facts_of(bench) | {"load_s": bench.load_s}
    for test in bench.tests:
        test_time = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        what = f"{test.name}, {test.threads} thread{'s' * (test.threads > 1)}"
        samples: list[Sample] = []
        roofs: list[float | None] = []
        python_share, interrupted = None, None
        try:
            roofs.append(bench.roof(test.threads))
            for i in range(repetitions):
                bench.progress(what, i, repetitions, " runs")
                samples.append(bench.sample(test))
                roofs.append(bench.roof(test.threads))
            python_share = bench.python_share(test)
        except KeyboardInterrupt as e:
            interrupted = e
        bench.progress(what, repetitions, repetitions, " runs")
        if samples:
            row = shared | timings(test, samples) | traffic(bench, test, samples, roofs)
            peak = hardware.peak_rss_bytes()
            yield row | {"peak_rss_bytes": peak, "python_share": python_share, "test_time": test_time}
        if interrupted is not None:
            raise interrupted


def timings(test: Test, samples: Sequence[Sample]) -> dict[str, Any]:
    ns = [s.ns for s in samples]
    speeds = [1e9 * (test.prompt + test.gen) / s.ns for s in samples]
    several = len(samples) > 1
    return {
        "n_threads": test.threads,
        "n_prompt": test.prompt,
        "n_gen": test.gen,
        "n_depth": test.depth,
        "avg_ns": round(statistics.fmean(ns)),
        "stddev_ns": round(statistics.stdev(ns)) if several else 0,
        "avg_ts": statistics.fmean(speeds),
        "stddev_ts": statistics.stdev(speeds) if several else 0.0,
        "samples_ns": ns,
        "samples_ts": speeds,
        "test": test.name,
        "median_ns": round(statistics.median(ns)),
        "median_ts": statistics.median(speeds),
        "first_token_s": statistics.median(s.first_token_s for s in samples) if test.prompt else None,
    }


def traffic(
    bench: Bench, test: Test, samples: Sequence[Sample], roofs: Sequence[float | None]
) -> dict[str, Any]:
    """Return bytes and their speed, for tests that only generate: tokens of a prompt share reads."""
    last, found = samples[-1].figures, [r for r in roofs if r is not None]
    bytes_per_token = None if test.prompt else last.bytes_per_token  # the same tokens in every sample
    speeds = [bytes_per_token * test.gen / s.ns for s in samples] if bytes_per_token else []
    beside = zip(speeds, roofs, roofs[1:], strict=False)  # an interrupted test has no last roof
    shares = [2 * speed / (before + after) for speed, before, after in beside if before and after]
    share = statistics.median(shares) if shares else None
    from_cache = hardware.from_cache(bench.pack.weights_bytes, hardware.cache_bytes(), share)
    bounded = bool(shares) and not from_cache
    return {
        "bytes_per_token": bytes_per_token,
        "gb_per_s": statistics.median(speeds) if speeds else None,
        "roof_gb_per_s": statistics.median(found) if found else None,
        "roof_share": share if bounded else None,
        "roof_share_min": min(shares) if bounded else None,
        "roof_share_max": max(shares) if bounded else None,
        "from_cache": from_cache,
        "active_fraction": last.active_fraction,
        "rows_fraction": last.rows_fraction,
        "predicted_fraction": last.predicted_fraction,
        **disk_figures(test, samples),
    }


def disk_figures(test: Test, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return medians over the runs: a run's reads depend on what the run before left in memory."""
    every = [{"token_ms_p99": s.figures.token_ms_p99, **of_disk(s.figures, test.threads)} for s in samples]
    known = {k: [f[k] for f in every if f[k] is not None and not test.prompt] for k in every[0]}
    return {k: statistics.median(found) if found else None for k, found in known.items()}


# llama-bench's keys in its order, with the values that hold always here, or without a GPU.
LLAMA_BENCH: dict[str, Any] = {
    "build_commit": __version__, "build_number": 0, "cpu_info": None, "gpu_info": "", "backends": "CPU",
    "model_filename": None, "model_type": None, "model_size": None, "model_n_params": None, "n_batch": None,
    "n_ubatch": None, "n_threads": None, "cpu_mask": "0x0", "cpu_strict": False, "poll": 0, "type_k": "f16",
    "type_v": "f16", "n_gpu_layers": 0, "n_cpu_moe": 0, "split_mode": "none", "main_gpu": 0,
    "no_kv_offload": False, "flash_attn": 0, "devices": "none", "tensor_split": "0.00",
    "tensor_buft_overrides": "none", "load_mode": "none", "lazy_mode": "off", "embeddings": False,
    "no_op_offload": 0, "no_host": False, "repack": False, "fit_target": 0, "fit_min_ctx": 0,
    "n_prompt": None, "n_gen": None, "n_depth": None, "test_time": None, "avg_ns": None, "stddev_ns": None,
    "avg_ts": None, "stddev_ts": None, "samples_ns": None, "samples_ts": None,
}  # fmt: skip


def facts_of(bench: Bench) -> dict[str, Any]:
    """Return the keys that are the same in every row."""
    pack, session, plan = bench.pack, bench.session, bench.session.plan
    parameters = sum(part["parameters"] for part in parts_of(pack).values())
    return {
        "cpu_info": hardware.cores().name or "",
        "model_filename": str(pack.path),
        "model_type": f"{pack.spec.architecture} {_short(parameters)} {_formats(pack.tensors.values())}",
        "model_size": sum(t.bytes for t in pack.tensors.values()),
        "model_n_params": parameters,
        "n_batch": bench.engine.prefill_chunk,
        "n_ubatch": bench.engine.prefill_chunk,
        "type_k": session.options.cache_type_k,
        "type_v": session.options.cache_type_v,
        "tokens": bench.feed.name,
        "planted": planting(pack.source) if isinstance(pack, Pack) else None,
        "sparsity": bench.engine.sparsity,
        "isa": hardware.isa().chosen,
        "memory_bytes": session.memory_bytes,
        "disk": None if session.store is None else session.store.how,
        "vram_bytes": None if plan is None else plan.used("gpu"),
        "disabled": ",".join(session.options.disable),
        "read_budget_mb": session.options.read_budget,
    } | _gpu_facts(session)


def _formats(tensors: Iterable[TensorInfo]) -> str:
    """Name the formats of a model's matrices, the one of most bytes first; none that is below 1 %."""
    found = Counter[str]()
    for t in tensors:
        for format in (t.format, t.down_format or t.format):  # a bundle's two rows, half of its bytes each
            found[format] += t.bytes if len(t.shape) > 1 and format != "i32" else 0
    named = [f.upper() for f, nbytes in found.most_common() if 100 * nbytes >= found.total()]
    return "+".join(named)


def _gpu_facts(session: Session) -> dict[str, Any]:
    """Return llama-bench's keys about a GPU. We count a layer if its attention is on the GPU."""
    if session.gpus is None:
        return {}
    device = session.gpus.opened[0].device
    layers = sum(x.attention != CPU for x in session.placement.layers)
    return {
        "gpu_info": device.name,
        "backends": "CUDA" if device.torch.type == "cuda" else "CPU",
        "n_gpu_layers": layers,
        "main_gpu": device.torch.index or 0,
        "no_kv_offload": layers == 0,
        "devices": "auto",
    }


def _short(count: int) -> str:
    """Shorten a number as names of models do: 6738415616 becomes 6.7B."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
