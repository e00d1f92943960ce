"""Requests in, tokens out: continuous batching over one forward pass, and each run's figures.

Owns scheduling. `llm.py` is the public way in.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import eq
from typing import TYPE_CHECKING

import numpy as np

from thermocline.engine.decoder import NO_STATES, begin, bind, for_context, forward, state_pool
from thermocline.engine.kv_cache import PLAIN, BlockTable, CacheTypes, KVCache, Storage, block_counts, in_ram
from thermocline.engine.live_activity import ActivityMeter
from thermocline.engine.prefill_budget import PrefillBudget, chunk_for
from thermocline.engine.prompt_cache.cache import (
    NO_PROMPTS,
    PromptCache,
    PromptCacheCounts,
    PromptCacheSettings,
)
from thermocline.engine.request import Chunk, PoolingParams, Request, reading_for, request_for
from thermocline.engine.sampler import SamplingParams, TokenLogprobs
from thermocline.engine.traffic import Traffic
from thermocline.errors import BadFile, DeviceFailure, IOFailure, ThermoclineError
from thermocline.model.spec import ModelSpec
from thermocline.ops.interface import (
    F32,
    A,
    Batch,
    ChoosingStep,
    ChosenToken,
    DiskCounts,
    F,
    FFNStats,
    H,
    L,
    M,
    Ops,
    P,
    S,
    Weights,
    opaque,
)
from thermocline.ops.reference import logits_digest

if TYPE_CHECKING:
    from thermocline.text.grammar import Constraint
    from thermocline.text.tokenizer import Tokenizer


def _bug(error: Exception) -> ThermoclineError:
    """Without its message, which may quote a text; its traceback goes along."""
    made = ThermoclineError(f"a bug ended this request: {type(error).__name__}")
    made.__cause__ = error
    return made


@dataclass(frozen=True)
class StepSpan:
    """Positions [start, stop) of one request: its share of a step."""

    request: Request
    start: int
    stop: int

    @property
    def wanted(self) -> int:
        """Return how many of its last positions need logits, or hidden states: all where a prompt is scored.

        Also where all of its tokens are pooled.
        """
        if self.request.whole and self.start < self.request.n_prompt:
            return self.stop - self.start
        return int(self.stop == len(self.request.ids))


@dataclass(frozen=True)
class BegunStep:
    """A step of answers that is queued."""

    spans: list[StepSpan]
    step: ChoosingStep
    stats: FFNStats

    def of(self, spans: list[StepSpan]) -> bool:
        """Return whether these are the requests and positions that it computes."""
        pairs = itertools.zip_longest(self.spans, spans)
        return all(a and b and a.request is b.request and a.start == b.start for a, b in pairs)


# ---- the engine


@dataclass(frozen=True)
class Counts:
    """The engine at a glance. Blocks are those of keys and values; tokens are counted since it was made."""

    running: int  # requests
    slots: int  # that can run together
    waiting: int
    kv_blocks: int
    kv_free: int  # held by nobody and naming no text
    kv_cached: int  # held by nobody, but found by a prompt that begins alike
    prompt_tokens: int  # computed
    cached_tokens: int  # of prompts, found
    tokens: int  # sampled
    states: int = 0  # slots for the states of recurrent layers, none where there are no such layers
    states_free: int = 0
    states_cached: int = 0
    disk: PromptCacheCounts | None = None  # of the prompt cache on disk, or beside a GPU, if there is one


@dataclass(frozen=True)
class EngineSettings:
    """How much an engine computes together, and how sparsely.

    `kv_tokens`: positions the cache holds for all requests; None: `max_batch` full contexts.
    """

    context: int  # tokens of one request
    max_batch: int = 8  # requests that run together
    sparsity: str = "exact"
    prefill_chunk: int | None = None  # None: `chunk_for` the model
    kv_tokens: int | None = None
    cache: CacheTypes = PLAIN  # of keys and values
    # Told before each step how many tokens of answers it computes; 0: of prompts.
    begin_step: Callable[[int], None] | None = None
    prompts: PromptCacheSettings = NO_PROMPTS  # what is kept of finished requests


class Engine:
    """Continuous batching. One thread at a time submits, steps and cancels (`LLM` holds a lock).

    A request is admitted when the cache has room for all it may need: a running one never waits for memory.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        ops: Ops[H, S, A, F, M, P, L],
        settings: EngineSettings,
        *,
        tokenizer: Tokenizer | None = None,
        disk: Callable[[], DiskCounts] | None = None,
        storage: Storage = in_ram,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make an engine over weights that are read. `disk`: counts its reads, if it has some neurons.

        `storage`: as `KVCache`'s. `clock`: seconds; no answer depends on it.
        """
        context, max_batch = settings.context, settings.max_batch
        chunk = chunk_for(spec, context) if settings.prefill_chunk is None else settings.prefill_chunk
        assert chunk >= context or not spec.bidirectional, "an encoder reads a text at once"
        kv_tokens = context * max_batch if settings.kv_tokens is None else settings.kv_tokens
        assert kv_tokens >= context, "one request must always fit"
        self.spec, self.ops = spec, opaque(ops)
        self.model = bind(for_context(spec, context), weights, ops)
        self.context, self.max_batch, self.prefill_chunk = context, max_batch, chunk
        self.sparsity, self._begin_step = settings.sparsity, settings.begin_step
        self.tokenizer = tokenizer
        blocks, window_blocks = block_counts(spec, kv_tokens, context, chunk)
        prompts = settings.prompts
        kept, stores = prompts.text, prompts.files or prompts.copies
        sizes = blocks + kept.blocks, window_blocks + kept.window_blocks
        self.kv = KVCache(spec, *sizes, chunk=chunk, types=settings.cache, storage=storage)
        if spec.recurrent is not None:
            self.kv.keep_states(state_pool(self.model, self.ops, max_batch, kept.states))
        self.prompt_cache = None if stores is None else PromptCache(self.kv, prompts)
        self.traffic = Traffic.of(spec, weights, settings.cache)
        self._disk, self._clock = disk, clock
        self.pace = PrefillBudget()
        self._prompt_tokens = self._cached_tokens = self._tokens = 0
        self.watch: ActivityMeter | None = None  # gets what answers' steps did, while there is one
        self.stats = FFNStats()  # the present step's: they grow with each layer, where the ops know it
        self.computing = False  # in `forward`: an exception there costs the step and nothing else
        self._ahead: BegunStep | None = None  # of those who answer, after the tokens that come next
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, constraint: Constraint | None = None
    ) -> Request:
        """Queue a prompt of token ids. Its chunks appear in `request.chunks` as `step` is called.

        `constraint`: of `params.grammar`.
        """
        return self.queue(request_for(self.spec, self.context, self.tokenizer, prompt, params, constraint))

    def read(self, prompt: Sequence[int], pooling: PoolingParams) -> Request:
        """Queue a prompt whose vector is wanted: `request.vector`."""
        return self.queue(reading_for(self.spec, self.context, self.tokenizer, prompt, pooling))

    def queue(self, request: Request) -> Request:
        request.submitted_s = self._clock()
        request.names = [] if self._uncached(request) else list(self.kv.names(request.ids))
        self.waiting.append(request)
        return request

    def step(self) -> bool:
        """One turn: schedule, forward, sample, emit; first a token for each answer, then a chunk of prompts.

        They go through `forward` apart: an answer does not read a long prompt's neurons. Beside answers the
        chunk is as short as keeps their tokens coming (`PrefillBudget`). False when nothing is left to do.
        """
        self._admit()
        self._take_restored()
        computed = False
        for schedule in (self._answer_spans, self._prompt_spans):
            spans = schedule()
            if not spans:
                continue
            computed = True
            try:
                self._run(spans)
            except (BadFile, IOFailure) as error:  # of the disk; those whose neurons it has go on
                for span in spans:
                    self._run_alone(span, error if len(spans) == 1 else None)
        if self.prompt_cache is not None and self.prompt_cache.busy:
            if not computed:
                self.prompt_cache.wait()
            return True
        return bool(self.waiting or self.running)

    def _run(self, spans: list[StepSpan]) -> None:
        begin, answering = self._clock(), self._answering()
        before = self._disk() if self._disk is not None else None
        found, stats = self._compute(spans)
        read_bytes = self._account(spans, stats, before)
        prompts = sum(s.stop - s.start for s in spans if s.start < s.request.n_prompt)
        self._prompt_tokens += prompts
        for span, rows in zip(spans, found, strict=True):
            if span.wanted:
                self._emit(span, rows)
        if not prompts:
            self.pace.answered(seconds := self._clock() - begin)
            if self.watch is not None:
                disk = None if self._disk is None or before is None else self._disk().since(before)
                self.watch.add(stats, tokens=len(spans), seconds=seconds, bytes=read_bytes, disk=disk)
        elif answering:
            self.pace.prompted(self._clock() - begin, prompts)

    def _run_alone(self, span: StepSpan, error: ThermoclineError | None) -> None:
        """A step that failed, for one of its requests; `error`: it has been tried."""
        try:
            if error is None:
                self._run([span])
                return
        except (BadFile, IOFailure) as e:
            error = e
        span.request.error = error
        self._finish(span.request, "cancelled")

    def cancel(self, request: Request) -> None:
        """Stop a request wherever it is and free what it holds. Nothing happens to one that has finished."""
        if request.finish_reason is None:
            self._finish(request, "cancelled")

    def counts(self) -> Counts:
        """For metrics: cheap, and from any thread (each number is right, if perhaps not of one moment)."""
        pools = self.kv.pools
        available, cached = sum(p.available for p in pools), sum(p.cached for p in pools)
        states = self.kv.states
        return Counts(
            running=len(self.running),
            slots=self.max_batch,
            waiting=len(self.waiting),
            kv_blocks=sum(p.n_blocks for p in pools),
            kv_free=available - cached,
            kv_cached=cached,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            tokens=self._tokens,
            states=0 if states is None else states.n_slots,
            states_free=0 if states is None else states.available - states.cached,
            states_cached=0 if states is None else states.cached,
            disk=None if self.prompt_cache is None else replace(self.prompt_cache.counts),
        )

    def close(self) -> None:
        """Write what the prompt cache has still to write, and end its threads. Requests have to be over."""
        if self.prompt_cache is not None:
            self.prompt_cache.close()

    def check_integrity(self) -> None:
        """When idle, nothing is held."""
        self.kv.check_integrity()
        if not self.running and (self.prompt_cache is None or not self.prompt_cache.busy):
            assert self.kv.used == 0, f"{self.kv.used} KV blocks leaked"
            assert self.kv.states is None or not self.kv.states.used, "states leaked"

    # -- schedule

    def _uncached(self, request: Request) -> bool:
        """Return whether nothing of a prompt is found: an encoder's keys depend on what comes after them."""
        return request.whole or self.spec.bidirectional

    def _admit(self) -> None:
        """First come, first served: nobody overtakes a long request for which there is no room yet."""
        held = 0  # states of cancelled requests, which readers may still write to
        if self.kv.states is not None and self.prompt_cache is not None:
            held = self.prompt_cache.abandoned
        while self.waiting and len(self.running) + held < self.max_batch:
            request = self.waiting[0]
            table = self.kv.open([] if self._uncached(request) else request.ids)
            if not self.kv.grow(table, request.positions):
                self.kv.close(table)
                return
            self.running.append(self.waiting.popleft())
            request.table = table
            self._take_cached(request)

    def _prompt_spans(self) -> list[StepSpan]:
        """First come, first served; but a prompt does not begin while another computes blocks it can take.

        What it leaves of the step is for those after it. A step has memory for a row of logits for each
        request: a scored prompt takes those left over, a few tokens at a time, so that nobody waits for it.
        """
        room = self.pace.chunk(self.prefill_chunk) if self._answering() else self.prefill_chunk
        spans, spare = [], self.max_batch - len(self.running)
        coming = set[bytes]()  # blocks that prompts before this one are still to compute
        for i, r in enumerate(self.running):
            if r.computed >= r.n_prompt or not room:
                continue
            if self.spec.bidirectional and r.n_prompt > room:
                break  # it comes whole in the next step, before those after it
            awaited = next((i for i, name in enumerate(self._takeable(r)) if name in coming), None)
            if awaited is not None:
                coming.update(r.names[awaited:])
                continue
            ready = r.begun or self._begin(r)
            coming.update(r.names[r.computed // self.kv.block :])
            if not ready:
                continue
            stop = min(r.n_prompt, r.computed + (min(room, 1 + spare) if r.scored else room))
            stop = self._stop(r, stop, self.running[i + 1 :])
            spans.append(StepSpan(r, r.computed, stop))
            room -= stop - r.computed
            spare -= spans[-1].wanted - 1 if r.scored else 0
        return spans

    def _takeable(self, request: Request) -> list[bytes]:
        """The blocks that others may compute for it: none of its last token, whose logits are wanted."""
        return [] if request.begun else request.names[: (request.n_prompt - 1) // self.kv.block]

    def _begin(self, request: Request) -> bool:
        """Start a prompt. First take the prefix blocks that other requests computed since it was queued.

        Return False while more of them are read from a store.
        """
        if request.restore is not None:
            return False
        if request.names:
            self.kv.look_again(request.table, request.ids, request.positions)
            self._take_cached(request)
            if self.prompt_cache is not None:
                names = self._takeable(request)
                found = self.prompt_cache.begin(request.table, request.ids, names, request.positions)
                request.restore = found
                if found is not None:
                    return False
        request.begun_s = self._clock()
        return True

    def _take_restored(self) -> None:
        """Let requests go on whose prefixes were read from a store; or wait, if there is no room any more."""
        stored = self.prompt_cache
        if stored is None:
            return
        stored.give_back()
        for r in list(self.running):
            if r.restore is not None and stored.over(r.restore):
                room = stored.settle(r.restore)
                r.restore = None
                if room:
                    self._take_cached(r)
                else:
                    self.running.remove(r)
                    self.waiting.appendleft(r)

    def _take_cached(self, request: Request) -> None:
        found = request.table.sealed * self.kv.block
        self._cached_tokens += found - request.cached
        request.computed = request.cached = found

    def _stop(self, request: Request, stop: int, others: list[Request]) -> int:
        """Return the position where a chunk that could go to `stop` ends.

        A prompt's last chunk stops at the last position that others wait for: they come along in the next
        step then. Once it answers, they would come in short chunks beside it. Where layers are recurrent, a
        prompt can be taken only where a state was kept, at a chunk's end. So each chunk stops at the first
        position that others wait for, at the last one that a later prompt can take, or else where a block
        ends.
        """
        ends = self._awaited(request, others)
        if self.kv.states is None:
            return max(ends, default=stop) if stop == request.n_prompt else stop
        block = self.kv.block
        ends.append((request.n_prompt - 1) // block * block)
        ends.append(self.kv.states.next_checkpoint(request.computed))
        if stop < request.n_prompt:
            ends.append(stop // block * block)
        return min((end for end in ends if request.computed < end <= stop), default=stop)

    def _awaited(self, request: Request, others: list[Request]) -> list[int]:
        """Return the ends of what others wait for, of the blocks that the request is still to compute."""
        ends = []
        for r in others:  # a block's name is that of all before it, too: equal ones come first
            shared = sum(map(eq, request.names, self._takeable(r))) * self.kv.block
            if shared > max(request.computed, r.computed):
                ends.append(shared)
        return ends

    def _answering(self) -> bool:
        return any(r.computed >= r.n_prompt for r in self.running)

    def _answer_spans(self) -> list[StepSpan]:
        return [StepSpan(r, r.computed, r.computed + 1) for r in self.running if r.computed >= r.n_prompt]

    # -- forward

    def _compute(self, spans: list[StepSpan]) -> tuple[Sequence[F32 | ChosenToken], FFNStats]:
        """Return each span's logits, or the token that was chosen where they are; and the step's work."""
        self.computing = True
        try:
            found, stats = self._chosen(spans) or self._forward(spans)
        finally:
            self.computing = False
        for s in spans:
            s.request.computed = s.stop
            self.kv.seal(s.request.table, s.request.ids, s.stop, s.request.n_prompt)
        return found, stats

    def _chosen(self, spans: list[StepSpan]) -> tuple[Sequence[ChosenToken], FFNStats] | None:
        """Compute a step whose tokens the ops choose, and begin the next one before they are looked at.

        None: nothing is done yet. A step that was begun and is not the next one is given up: nobody asks it
        for its tokens, so it never was.
        """
        ahead, self._ahead = self._ahead, None
        now = ahead if ahead is not None and ahead.of(spans) else self._begun(spans)
        if now is None:
            return None
        self.stats = now.stats
        if self._goes_on(spans):
            with contextlib.suppress(DeviceFailure):  # if it stays, the step meets it in its turn
                self._ahead = self._begun([StepSpan(s.request, s.stop, s.stop + 1) for s in spans], now.step)
        return now.step.choices(), now.stats

    def _begun(self, spans: list[StepSpan], after: ChoosingStep | None = None) -> BegunStep | None:
        """Begin a step of answers, if its tokens can be chosen where their logits are."""
        if self.model.chooser is None or any(s.start < s.request.n_prompt for s in spans):
            return None
        if self._disk is not None or self._begin_step is not None:
            return None  # what is read from disk is decided before each step
        draws = [draw for s in spans if (draw := s.request.sampler.draw(later=int(after is not None)))]
        if len(draws) < len(spans):
            return None
        stats = FFNStats() if self.watch is None else self.watch.counting()
        states = NO_STATES if self.kv.states is None else self.kv.states.layers
        batch = self._batch(spans, after)
        step = begin(
            self.model, self.kv, batch, draws, self.ops, sparsity=self.sparsity, stats=stats, states=states
        )
        return BegunStep(spans, step, stats)

    def _goes_on(self, spans: list[StepSpan]) -> bool:
        """Return whether the next step is of the same answers, unless a token to come ends one."""
        alone = len(spans) == len(self.running)  # no prompt comes between
        short = any(len(s.request.ids) + 1 - s.request.n_prompt >= s.request.limit for s in spans)
        states = self.kv.states
        room = states is None or states.spares(len(spans))
        return alone and not short and room and self.prefill_chunk > 1  # as windows reserve blocks

    def _forward(self, spans: list[StepSpan]) -> tuple[Sequence[F32], FFNStats]:
        self.stats = stats = FFNStats() if self.watch is None else self.watch.counting()
        batch = self._batch(spans)
        prompts = any(
            s.start < s.request.n_prompt for s in spans
        )  # even their last few tokens are not guessed
        sparsity = "exact" if prompts and self.sparsity == "predict" else self.sparsity
        if self._begin_step is not None:
            self._begin_step(0 if prompts else len(spans))
        states = NO_STATES if self.kv.states is None else self.kv.states.layers
        logits = forward(self.model, self.kv, batch, self.ops, sparsity=sparsity, stats=stats, states=states)
        ends = itertools.accumulate(s.wanted for s in spans)
        return [logits[end - s.wanted : end] for s, end in zip(spans, ends, strict=True)], stats

    def _batch(self, spans: list[StepSpan], after: ChoosingStep | None = None) -> Batch:
        """Return the step's tokens, in few numpy calls: between kernels each takes 3 to 5 microseconds."""
        held = [s.request.table for s in spans]
        tables = self.kv.tables(held, [s.stop for s in spans])
        slots = self.kv.state_slots if after is None else self.kv.later_slots
        state_from, state_to = slots(held)
        ids: list[int] = []
        positions: list[int] = []
        sequence: list[int] = []
        wanted: list[int] = []
        ends: list[int] | None = [] if self.spec.bidirectional else None
        types: list[int] = []
        paired = self.spec.token_types > 1 and any(
            s.request.pooling and s.request.pooling.second for s in spans
        )
        for i, s in enumerate(spans):
            ids += s.request.ids[s.start : s.stop] if after is None else [0]
            positions += range(s.start, s.stop)
            sequence += [i] * (s.stop - s.start)
            first = len(ids) - (s.stop - s.start)
            wanted += [first] if self.spec.pooling == "cls" else range(len(ids) - s.wanted, len(ids))
            if ends is not None:
                ends += [s.stop] * (s.stop - s.start)
            if paired and s.request.pooling is not None:
                second = s.request.pooling.second or s.stop
                types += (int(p >= second) for p in range(s.start, s.stop))
        return Batch(
            ids=np.array(ids, np.int32),
            positions=np.array(positions, np.int32),
            sequence=np.array(sequence, np.int32),
            block_table=tables[0],
            logit_rows=np.array(wanted, np.int32),
            window_table=tables[-1],
            state_from=state_from,
            state_to=state_to,
            ends=None if ends is None else np.array(ends, np.int32),
            types=np.array(types, np.int32) if paired else None,
            after=after,
        )

    def _account(self, spans: list[StepSpan], stats: FFNStats, before: DiskCounts | None) -> float:
        """Each answer carries its share of the step: the same neurons served them all. -> bytes read."""
        t = self.traffic
        disk = self._disk() if self._disk is not None else None
        weights = t.fixed_bytes + stats.predicted * t.gate_bytes + stats.rows * t.row_bytes
        read_bytes = weights = weights + stats.predictor_bytes
        for s in spans:
            if s.start < s.request.n_prompt:
                continue
            s.request.decode += stats
            if before is not None and disk is not None:
                known = s.request.disk or DiskCounts()
                shares = ((b - a) // len(spans) for a, b in zip(before, disk, strict=True))
                s.request.disk = DiskCounts(*(k + n for k, n in zip(known, shares, strict=True)))
            near = min(s.stop, self.spec.sliding_window or s.stop)
            read = s.stop + self.spec.windowed * (near - s.stop)
            own = read * t.position_bytes + t.state_bytes
            s.request.decode_bytes += weights / len(spans) + own
            read_bytes += own
        return read_bytes

    # -- sample, emit

    def _emit(self, span: StepSpan, found: F32 | ChosenToken) -> None:
        """Sample and emit for one request alone: an error, a bug's too, ends this request and no other."""
        request = span.request
        try:
            if request.scored and span.start < request.n_prompt and not isinstance(found, ChosenToken):
                request.score(span.start, found)
            if request.pooling is not None and not isinstance(found, ChosenToken):
                request.read(found)
            last = found if isinstance(found, ChosenToken) else found[-1]
            reason = self._answer(request, last) if span.stop == len(request.ids) else None
        except Exception as error:
            request.error = error if isinstance(error, ThermoclineError) else _bug(error)
            reason = "cancelled"
        if reason is not None:
            self._finish(request, reason)

    def _answer(self, request: Request, found: F32 | ChosenToken) -> str | None:
        """Sample the request's next token, if it wants one. -> why the request ends here, if it does."""
        if request.limit == 0:
            request.first_s = self._clock()
            return "length"
        if isinstance(found, ChosenToken):
            token, digest = request.sampler.accept(found), found.digest
        else:
            token, digest = request.sampler.sample(found), logits_digest(found)
        self._tokens += 1
        request.digest = zlib.crc32(digest.to_bytes(4, "little"), request.digest)
        now = self._clock()
        if len(request.ids) == request.n_prompt:
            request.first_s = now
        else:
            request.token_s.append(now - request.last_s)
        request.last_s = now
        request.ids.append(token)
        logprobs, asked = None, request.params.logprobs
        if asked is not None:
            assert not isinstance(found, ChosenToken), "its logits are wanted"
            logprobs = TokenLogprobs.of(found, token, asked)
            request.logprobs.append(logprobs)
        text, reason = self._text_of(request, token)
        request.text.append(text)
        request.chunks.append(Chunk(text, token, logprobs, reason))
        return reason

    def _text_of(self, request: Request, token: int) -> tuple[str, str | None]:
        """(text that can be shown now, why the request ends here if it does)."""
        reason = "length" if len(request.ids) - request.n_prompt >= request.limit else None
        text = ""
        if token in self.spec.eos_ids or token in request.params.stop_ids:
            reason = "stop"
        elif request.detokenizer is not None:
            text = request.detokenizer.push(token)
        if request.sampler.complete:
            reason = "stop"
        if reason is not None and request.detokenizer is not None:
            text += request.detokenizer.flush()
        text, stopped = request.matcher.push(text)
        if stopped:
            return text, "stop"
        if reason is not None:
            return text + request.matcher.flush(), reason
        looks = request.params.marks.get(token)
        return (text if looks is None else text + request.matcher.pass_mark(looks)), None

    def _finish(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        if self.prompt_cache is not None and request.restore is not None:
            self.prompt_cache.abandon(request.restore)
            request.restore, request.table = None, BlockTable()
        elif self.prompt_cache is not None:
            self.prompt_cache.used(request.names[: request.table.sealed], request.table.begun_ns)
        self.kv.close(request.table)
