"""`Session`, the one way from a model to an engine: places the weights, reads them, owns the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from thermocline.engine.engine import Engine, EngineSettings
from thermocline.errors import UsageError
from thermocline.machine import hardware
from thermocline.pack.checksums import open_checksums, verify_once
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import Predictors, measured_on, predictors_for
from thermocline.plan.budget import (
    HERE_BYTES,
    Decision,
    Needs,
    all_in_ram,
    check_read_budget,
    without_gpu,
)
from thermocline.session import kept_prompts, store, weights
from thermocline.session.store import Opened
from thermocline.session.weights import BegunLoad

if TYPE_CHECKING:
    from thermocline.engine.kv_cache import Storage
    from thermocline.engine.prompt_cache.cache import PromptCacheSettings
    from thermocline.ops.interface import OpaqueOps, Weights
    from thermocline.pack.stored_model import StoredModel
    from thermocline.plan.disk.disk_split import Arrangement
    from thermocline.plan.placement import Placement
    from thermocline.plan.planner import Plan
    from thermocline.session.expert_store import ReadBudget
    from thermocline.session.gpu_tier import Gpus
    from thermocline.session.options import EngineOptions
    from thermocline.session.store import OnDisk
    from thermocline.session.weights import LoadedWeights
    from thermocline.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]  # what is done, such as "loading"; bytes done, bytes in all


def silent(what: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


class Session:
    """A model, where its weights lie, and once they are read the engine over them. Close it.

    Opening decides the placement. `begin` lets the weights be read while other things are done; `load` waits
    for them.
    """

    def __init__(
        self,
        pack: StoredModel,
        options: EngineOptions,
        decision: Decision,
        *,
        predictors: Predictors | None = None,
        gpus: Gpus | None = None,
        progress: Progress = silent,
        hints: bool = True,
    ) -> None:
        self.pack, self.options, self.decision = pack, options, decision
        self.threads = threads_of(options, gpu=gpus is not None)
        self.weights_bytes = weights.memory_bytes(pack, predictors, decision.placement.tables)
        self._predictors, self._gpus, self._progress = predictors, gpus, progress
        self._hints = hints
        self._begun: BegunLoad | None = None
        self._opened: Opened | None = None
        self._engine: Engine | None = None
        self._closed = False

    @classmethod
    def open(
        cls,
        pack: StoredModel,
        options: EngineOptions,
        *,
        progress: Progress = silent,
        beside: int = 0,
        tried: int = 0,
        fits: bool = False,
        hints: bool = True,
    ) -> Session:
        """Choose where the weights go; read none. `beside`: bytes of the budget that the caller takes itself.

        `tried`: bytes of predictors that `with_predictors` will be given, where a GPU may have them.
        `fits`: all weights go to RAM, since the caller made sure. `hints`: say which command makes it faster,
        unless the caller is that command.

        Raises UsageError, OutOfBudget, Unsupported and DeviceFailure, before a weight is read.
        """
        options.cache.check(pack.spec.head_dim, pack.spec.latent is not None)
        if options.read_budget is not None:
            check_read_budget(pack.spec, options.read_budget)
        predictors = predictors_for(pack, options.sparsity)
        if predictors is not None and (measured := measured_on(predictors.report)):
            log.info(measured)
        needs, gpus = replace(needs_of(options, beside), tried=tried), None
        if fits:
            decision = all_in_ram(pack, predictors, needs)
        else:
            decision, gpus = _chosen(pack, predictors, options, needs)
        return cls(pack, options, decision, predictors=predictors, gpus=gpus, progress=progress, hints=hints)

    # ---- what was decided

    @property
    def placement(self) -> Placement:
        return self.decision.placement

    @property
    def plan(self) -> Plan | None:
        """Return the plan and its prediction, where a GPU has a part."""
        return self.decision.plan

    @property
    def arrangement(self) -> Arrangement | None:
        """The shares of RAM that neurons have; None where none are on disk."""
        return self.decision.arrangement

    @property
    def from_disk(self) -> bool:
        """Whether weights of FFNs are read from disk when a token needs them."""
        return self.placement.from_disk

    @property
    def context(self) -> int:
        """Tokens of one request."""
        return self.options.context or self.placement.context

    @property
    def memory_bytes(self) -> int:
        """All the RAM that is ever taken."""
        return self.placement.ram_bytes

    @property
    def gpus(self) -> Gpus | None:
        return self._gpus

    # ---- what is read

    @property
    def loaded(self) -> LoadedWeights[OpaqueOps]:
        """The weights, and the ops over them; read at the first use."""
        return self._open().loaded

    def with_predictors(self, predictors: Predictors) -> Weights:
        """Return the weights with these predictors in place of their own, to be bound anew."""
        opened = self._open()
        if self._gpus is None:
            return weights.with_predictors(opened.loaded.weights, predictors)
        assert self._gpus.tries, "the session was opened with room for them"
        from thermocline.session import gpu_loading

        return gpu_loading.tried(opened, self.decision, self._gpus, predictors, self.pack.spec)

    @property
    def store(self) -> OnDisk | None:
        """Return what comes from disk; None before the weights are read, and where all is in memory."""
        return None if self._opened is None else self._opened.store

    @property
    def storage(self) -> Storage:
        """The allocator of keys and values, where the layers are. Reads the weights."""
        return self._open().storage

    @property
    def read_budget(self) -> ReadBudget | None:
        """The bound on reads of experts; None where there is none, or nothing to bound. Reads the weights."""
        return self._open().read_budget

    def begin(self) -> None:
        """Begin to read the weights, where all of them go to RAM. What is wrong with them, `load` says.

        Raises OutOfBudget.
        """
        if self._opened is None and self._begun is None and self._gpus is None and not self.from_disk:
            self._begun = self._begin()

    def _begin(self) -> BegunLoad:
        return BegunLoad.of(self.pack, weights.new_ops(self.threads), self.placement.tables)

    def load(self, tokenizer: Tokenizer | None = None) -> Engine:
        """Return the engine; read the weights where that was not done yet. `tokenizer`: for texts."""
        if self._engine is None:
            opened, o = self._open(), self.options
            budget = opened.read_budget
            self._engine = Engine(
                self.pack.spec,
                opened.loaded.weights,
                opened.loaded.ops,
                EngineSettings(
                    self.context,
                    o.max_batch,
                    o.sparsity,
                    kv_tokens=self.placement.kv_tokens,
                    cache=o.cache,
                    begin_step=None if budget is None else budget.begin_step,
                    prompts=self._prompts(opened),
                ),
                tokenizer=tokenizer,
                storage=opened.storage,
                disk=None if opened.store is None else opened.store.counts,
            )
        return self._engine

    def _prompts(self, opened: Opened) -> PromptCacheSettings:
        if self._gpus is None:
            return kept_prompts.prompts(self.pack, self.context, self.options)
        from thermocline.session import gpu_loading

        by = gpu_loading.computed_by(self.placement, self._gpus)
        return kept_prompts.prompts(self.pack, self.context, self.options, by, opened.places)

    @property
    def engine(self) -> Engine | None:
        """The engine; None before `load`."""
        return self._engine

    def read_gbs(self, threads: int, seconds: float = hardware.ROOF_SECONDS) -> float | None:
        """Measure GB/s of reading the weights over and over: the roof of a token's speed.

        None before they are read, and where a GPU has a part of them.
        """
        return None if self._opened is None else self._opened.loaded.read_gbs(threads, seconds)

    def _open(self) -> Opened:
        if self._closed:
            raise UsageError("this session is closed")
        if self._opened is None:
            try:
                self._opened = self._read()
            except BaseException:
                if self._gpus is not None:
                    self._gpus.release()
                raise
            self._close_predictors()  # they are copied
            self._report(self._opened)
        return self._opened

    def _read(self) -> Opened:
        """All weights in RAM, or some of FFNs on disk, or a part on GPUs."""
        loading, a = partial(self._progress, "loading"), self.arrangement
        predictors, threads = self._predictors, self.threads
        records = None
        checking = partial(self._progress, "checksumming")
        if a is not None:
            assert isinstance(self.pack, Pack), "neurons on disk are records of a pack"
            records = open_checksums(self.pack, checking)
        elif self.from_disk and isinstance(self.pack, Pack):
            verify_once(self.pack, checking)
        if self._gpus is not None:
            from thermocline.session import gpu_loading

            return gpu_loading.opened(
                self.pack, self.decision, self._gpus, predictors, records,
                threads=threads, max_batch=self.options.max_batch, progress=loading
            )  # fmt: skip
        disable = self.options.disable
        if (split := self.decision.experts) is not None:
            there, experts = store.load_experts(
                self.pack, split, threads=threads, predictors=predictors, disable=disable, progress=loading
            )
            budget = store.read_budget(experts, self.options.read_budget)
            return Opened(there.opaque(), experts, read_budget=budget)
        if (rows := self.decision.rows) is not None:
            there, stream = store.load_rows(self.pack, rows, threads=threads, progress=loading)
            return Opened(there.opaque(), stream)
        if a is None or records is None or not isinstance(self.pack, Pack):
            begun, self._begun = self._begun or self._begin(), None
            return Opened(begun.finish(predictors, loading).opaque())
        made, on_disk = store.load(
            self.pack, a, records, threads=threads, predictors=predictors, disable=disable, progress=loading
        )
        return Opened(made.opaque(), on_disk)

    def _report(self, opened: Opened) -> None:
        a, d, o = self.arrangement, self.decision, self.options
        if o.read_budget is not None:
            log.warning(read_budget_line(o.read_budget, opened.store is not None))
        if opened.store is None:
            return
        shares = {"neurons": a, "experts": d.experts, "FFNs' rows": d.rows}
        what, share = next((what, x.share) for what, x in shares.items() if x is not None)
        log.warning(
            f"{self.pack.path} is larger than its memory: there is room for {share:.0%} of its {what}, "
            f"the others come from disk when they are needed ({opened.store.how})"
        )
        if self._hints and a is not None and not a.contents.hotness.ordered:
            log.warning(
                "they are in no order of hotness: "
                f"`thermocline profile {self.pack.path}` makes this much faster"
            )
        if (batch := o.max_batch) > 1:
            log.info(
                f"up to {batch} answers are computed together, as long as all of them fit in "
                f"{self.placement.kv_tokens} positions of keys and values "
                f"(full contexts: {self.placement.kv_tokens // self.context}); more wait"
            )

    # ---- the end

    def unload(self) -> None:
        """Free the weights and the cache; GPUs stay open."""
        if self._gpus is not None:
            self._gpus.release()  # a step that was given up may still be computed with what goes now
        if self._engine is not None:
            self._engine.close()
        self._engine = self._opened = self._begun = None

    def close(self) -> None:
        """Free all that is held. Requests of the engine have to be over."""
        self.unload()
        self._close_predictors()
        self._closed = True
        if self._gpus is not None:
            self._gpus.close()

    def _close_predictors(self) -> None:
        if self._predictors is not None:
            self._predictors.close()
            self._predictors = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- choosing


def read_budget_line(mb: float, from_disk: bool) -> str:
    if not from_disk:
        return f"--read-budget {mb:g}: all weights are in memory, so nothing is left out"
    return (
        f"--read-budget {mb:g}: answers are not exact: experts that are not in memory are left out where a "
        f"token would read more than {mb:g} MB"
    )


def threads_of(options: EngineOptions, *, gpu: bool = False) -> int:
    if options.threads is not None:
        return options.threads
    return hardware.threads_beside_gpu() if gpu else hardware.default_threads()


def memory_needed(pack: StoredModel, options: EngineOptions, beside: int) -> int:
    """Return the bytes of RAM that a session takes if all of `options.ram` but `beside` is free for it.

    With a GPU, all of that. Raises UsageError, OutOfBudget and Unsupported, as `Session.open` does.
    """
    allowed = None if options.ram is None else int(options.ram * 2**30)
    if options.gpu != "off":
        return 0 if allowed is None else max(0, allowed - beside)
    needs = replace(needs_of(options, beside), budget=allowed, limit="allowed")
    predictors = predictors_for(pack, options.sparsity)
    try:
        return without_gpu(pack, predictors, needs).placement.ram_bytes - beside
    finally:
        if predictors is not None:
            predictors.close()


def needs_of(options: EngineOptions, beside: int = 0) -> Needs:
    """Return what a session asks of RAM: of what is free, or allowed where that is less."""
    budget, limit = budget_for(options.ram)
    return Needs(
        options.sparsity,
        options.context,
        options.max_batch,
        threads_of(options),
        budget,
        limit,
        options.kv_tokens,
        options.cache,
        beside,
        options.kept,
    )


def budget_for(ram: float | None) -> tuple[int | None, str]:
    """(bytes that may be taken, None: nobody knows; whether they are what is "free" or what is "allowed").

    A session's needs have Python and what else it runs in, which this process has taken already. Of other
    sessions' weights nothing is free.
    """
    free = hardware.available_bytes()
    if free is not None:
        free += min(hardware.own_bytes(), HERE_BYTES)
    allowed = None if ram is None else int(ram * 2**30)
    return (
        min((n, why) for n, why in ((free, "free"), (allowed, "allowed")) if n is not None)
        if (free is not None or allowed is not None)
        else (None, "free")
    )


def _chosen(
    pack: StoredModel, predictors: Predictors | None, options: EngineOptions, needs: Needs
) -> tuple[Decision, Gpus | None]:
    """On a GPU what helps there, else as `without_gpu` has it."""
    if options.gpu != "off":
        from thermocline.session import gpu_tier

        beside = replace(needs, threads=threads_of(options, gpu=True))
        divided = gpu_tier.chosen(pack, beside, options.gpu, options.vram)
        if divided is not None and options.read_budget is not None and divided[0].placement.from_disk:
            divided[1].close()
            raise UsageError(
                f"--read-budget {options.read_budget:g}: beside a GPU reads of experts are not bounded; "
                "leave it out, or give --gpu off"
            )
        if divided is not None:
            return divided
    decision = without_gpu(pack, predictors, needs)
    if options.disable and not decision.placement.from_disk:
        raise UsageError(
            f"--disable {','.join(options.disable)}: all weights are in memory, so there is nothing to do "
            "without; give less memory (--ram)"
        )
    if "bundle" in options.disable and decision.mixture is not None:
        raise UsageError("--disable bundle: experts on disk have none; leave it out")
    if options.disable and decision.dense is not None:
        raise UsageError(
            f"--disable {','.join(options.disable)}: FFNs come from disk in one stream, which has no such "
            "part; leave it out"
        )
    return decision, None
