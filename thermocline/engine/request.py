"""One request: its checks, its state while it is computed, and its results (text, tokens, figures)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from thermocline.engine.kv_cache import BlockTable
from thermocline.engine.pool import Pool
from thermocline.engine.sampler import Sampler, SamplingParams, TokenLogprobs, check_finite
from thermocline.errors import ThermoclineError, UsageError
from thermocline.files.bounded import Json
from thermocline.model.spec import ModelSpec
from thermocline.ops.interface import F32, DiskCounts, FFNStats
from thermocline.text.grammar import Constraint
from thermocline.text.tokenizer import Detokenizer, Tokenizer

if TYPE_CHECKING:
    from thermocline.engine.prompt_cache.cache import Restore

# ---- results of a request


@dataclass(frozen=True)
class Figures:
    """Figures of one request. Decode figures are None if nothing was decoded (fewer than two tokens)."""

    prompt_tokens: int
    cached_tokens: int  # tokens of the prompt whose keys and values were cached
    tokens: int
    first_token_s: float | None  # from submission
    prompt_tokens_per_s: float | None  # the prompt's uncached tokens over the time to the first token
    tokens_per_s: float | None  # tokens after the first, over their time
    active_fraction: float | None  # share of neurons that were not zero, while decoding
    rows_fraction: float | None  # share of up and down rows that were read, while decoding
    predicted_fraction: float | None  # share of gate rows that were read, while decoding
    bytes_per_token: (
        int | None
    )  # weights and KV read from memory per decoded token (a batch shares its weights)
    logits_hash: str  # over the logits of every token: equal hashes, equal runs
    token_ms_p99: float | None = None  # of the tokens after the first; their mean is 1000 / tokens_per_s
    disk: DiskCounts | None = None  # while decoding, shared by a batch; None: all neurons are in memory


@dataclass(frozen=True)
class Completion:
    """The answer to a request."""

    text: str  # up to the stop string or end-of-text token
    token_ids: list[int]  # all sampled tokens, including an end-of-text token
    finish_reason: str | None  # "stop", "length" or "cancelled"; None while it runs
    seed: int  # repeats this completion
    logprobs: list[TokenLogprobs] | None
    figures: Figures
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt's tokens after the first, as asked for

    @property
    def mean_logprob(self) -> float:
        """Return the mean log probability of the tokens; -inf if there are none, or it was not requested."""
        return sum(t.logprob for t in self.logprobs) / len(self.logprobs) if self.logprobs else -math.inf


@dataclass(frozen=True)
class Chunk:
    """One token of an answer.

    The text is empty while a character is incomplete or a stop string is possible; a later chunk then has it.
    """

    text: str
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None  # on the last one


# ---- one request


@dataclass(frozen=True)
class PoolingParams:
    """A prompt that is read and not continued. Its answer is a vector.

    logits_of  tokens whose logits behind the prompt are the vector; (): the model's own, which pools
    second     where the second text of a pair begins; 0: there is one text
    """

    logits_of: tuple[int, ...] = ()
    second: int = 0


Asked = SamplingParams | PoolingParams


class StopMatcher:
    """Passes text up to the first stop string, and holds back an end that may become one."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held, self._looks = "", True
        self.met: str | None = None  # the stop string that ended the answer

    def push(self, text: str) -> tuple[str, bool]:
        """Add text. Return (text that is certainly part of the answer, whether a stop string ended it)."""
        if not (self._stop and self._looks):
            return text, False
        text = self._held + text
        found = [(at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            at, self.met = min(found, key=lambda place: place[0])
            self._held = ""
            return text[:at], True
        keep = len(text) - max(overlap(text, s) for s in self._stop)
        self._held = text[keep:]
        return text[:keep], False

    def pass_mark(self, looks: bool) -> str:
        """Return what was held back before a mark. `looks`: a stop string may be behind the mark."""
        self._looks = looks
        return self.flush()

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))


@dataclass
class Request:
    """The state of one request. Keys and values of all positions p < computed are in the cache."""

    params: SamplingParams
    sampler: Sampler
    ids: list[int]  # the prompt's tokens, then the sampled ones
    n_prompt: int
    limit: int  # the most tokens to generate: max_tokens, or as many as fit in the context
    detokenizer: Detokenizer | None
    matcher: StopMatcher
    table: BlockTable = field(default_factory=BlockTable)
    names: list[bytes] = field(default_factory=list)  # of the prompt's full blocks; empty if it is scored
    restore: Restore | None = None  # of its prefix, while that is read from disk
    computed: int = 0
    cached: int = 0
    chunks: deque[Chunk] = field(default_factory=deque)  # not fetched yet
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooling: PoolingParams | None = None
    pool: Pool | None = None  # of a model that embeds
    vector: F32 | None = None  # what was read, once it is there
    finish_reason: str | None = None
    error: ThermoclineError | None = None  # the reason why it cannot continue; readers of chunks raise it
    submitted_s: float = 0.0
    begun_s: float = 0.0  # the time at which the first uncached token of the prompt was computed
    first_s: float = 0.0
    last_s: float = 0.0
    decode: FFNStats = field(default_factory=FFNStats)
    decode_bytes: float = 0.0
    token_s: list[float] = field(default_factory=list)  # seconds of each token after the first
    disk: DiskCounts | None = None
    digest: int = 0

    @property
    def token_ids(self) -> list[int]:
        return self.ids[self.n_prompt :]

    @property
    def positions(self) -> int:
        """Return the positions that it may need. The last token is never fed back."""
        return self.n_prompt + max(self.limit, 1) - 1

    @property
    def begun(self) -> bool:
        """Return whether any position was computed that was not in the cache."""
        return self.computed > self.cached

    @property
    def scored(self) -> bool:
        """Return whether the prompt's probabilities are requested. All of the prompt is then computed."""
        return self.params.prompt_logprobs is not None

    @property
    def whole(self) -> bool:
        """Return whether all of the prompt is computed and wanted, whatever of it is cached."""
        return self.scored or (self.pool is not None and self.pool.whole)

    def read(self, rows: F32) -> None:
        """Take in the rows of a step that were wanted of a prompt. Raises NumericalError."""
        if self.pool is not None:
            self.pool.add(rows)
            self.vector = self.pool.vector() if self.pool.tokens == self.n_prompt else None
        elif self.pooling is not None:
            check_finite(rows[-1])
            self.vector = rows[-1][list(self.pooling.logits_of)]

    def score(self, start: int, logits: F32) -> None:
        """Score the prompt's tokens with the logits of positions from `start` on. Raises NumericalError."""
        for token, row in zip(self.ids[start + 1 : self.n_prompt], logits, strict=False):
            check_finite(row)
            self.prompt_logprobs.append(TokenLogprobs.of(row, token, self.params.prompt_logprobs or 0))

    def completion(self) -> Completion:
        """Return the answer so far, which is final once there is a finish_reason."""
        logprobs = None if self.params.logprobs is None else list(self.logprobs)
        return Completion(
            "".join(self.text),
            self.token_ids,
            self.finish_reason,
            self.sampler.seed,
            logprobs,
            self.figures(),
            list(self.prompt_logprobs) if self.scored else None,
        )

    def figures(self) -> Figures:
        n, d = len(self.ids) - self.n_prompt, self.decode
        decoded = n - 1 if n > 1 else None
        return Figures(
            prompt_tokens=self.n_prompt,
            cached_tokens=self.cached,
            tokens=n,
            first_token_s=self.first_s - self.submitted_s if n else None,
            prompt_tokens_per_s=_ratio(self.n_prompt - self.cached, self.first_s - self.begun_s),
            tokens_per_s=_ratio(decoded, self.last_s - self.first_s),
            active_fraction=_ratio(d.active, d.neurons) if decoded else None,
            rows_fraction=_ratio(d.rows, d.rows_dense) if decoded else None,
            predicted_fraction=_ratio(d.predicted, d.gates_dense) if decoded else None,
            bytes_per_token=round(self.decode_bytes / decoded) if decoded else None,
            logits_hash=f"{self.digest:08x}",
            token_ms_p99=1e3 * percentile(self.token_s, 0.99) if self.token_s else None,
            disk=self.disk if decoded else None,
        )


def reading_for(
    spec: ModelSpec, context: int, tokenizer: Tokenizer | None, prompt: Sequence[int], pooling: PoolingParams
) -> Request:
    """Make a request for a vector, as `request_for` makes one for text. Raises UsageError."""
    if pooling.logits_of:
        check_writes(spec)
    elif not spec.classifies:
        check_embeds(spec)
    if any(not 0 <= i < spec.vocab_size for i in pooling.logits_of):
        raise UsageError(
            f"logits of tokens {pooling.logits_of} are asked for; they are 0 to {spec.vocab_size - 1}"
        )
    made = _request(spec, context, tokenizer, prompt, SamplingParams(max_tokens=0, seed=0), None)
    pool = Pool(spec, made.n_prompt) if spec.embeds else None
    return replace(made, pooling=pooling, pool=pool)


def check_writes(spec: ModelSpec) -> None:
    """Raise UsageError for a model that gives no logits of a next token."""
    if spec.embeds:
        raise UsageError(_RANKS if spec.classifies else _WRITES)


def check_embeds(spec: ModelSpec) -> None:
    """Raise UsageError for a model that makes no vectors of texts."""
    if not spec.embeds:
        raise UsageError(_NO_VECTORS)
    if spec.classifies:
        raise UsageError(_RANKS)


_WRITES = (
    "this model embeds texts and writes none: POST /v1/embeddings, `LLM.embed` in Python; "
    "choose another model to generate"
)
_RANKS = (
    "this model ranks documents, and neither writes text nor embeds it: POST /v1/rerank, `LLM.rerank` in "
    "Python; choose another model"
)
_NO_VECTORS = (
    "this model writes text and has no pooling that makes vectors of texts; serve an embedding model, "
    "such as Qwen/Qwen3-Embedding-0.6B"
)


def request_for(
    spec: ModelSpec,
    context: int,
    tokenizer: Tokenizer | None,
    prompt: Sequence[int],
    params: SamplingParams,
    constraint: Constraint | None = None,
) -> Request:
    """Make a request for any engine of this model and context. A bad one is refused at once, without weights.

    `constraint` is that of `params.grammar`, for this request alone. Raises UsageError.
    """
    check_writes(spec)
    return _request(spec, context, tokenizer, prompt, params, constraint)


def _request(
    spec: ModelSpec,
    context: int,
    tokenizer: Tokenizer | None,
    prompt: Sequence[int],
    params: SamplingParams,
    constraint: Constraint | None,
) -> Request:
    ids = list(prompt)
    if not ids and spec.bos_id is not None:
        ids = [spec.bos_id]
    _check_prompt(spec, context, ids)
    if params.stop and tokenizer is None:
        raise UsageError("stop strings need a tokenizer, and this engine has none; use stop_ids")
    if (params.grammar is None) != (constraint is None):
        raise UsageError("a grammar needs its constraint, and a constraint its grammar; `LLM` makes them")
    banned = spec.eos_ids + params.stop_ids if params.ignore_eos else ()
    left = context - len(ids) + 1  # the last token is never fed back, so it needs no position
    return Request(
        params=params,
        sampler=Sampler(params, spec.vocab_size, ids, banned, constraint),
        ids=ids,
        n_prompt=len(ids),
        limit=left if params.max_tokens is None else min(params.max_tokens, left),
        detokenizer=_detokenizer(tokenizer, ids),
        matcher=StopMatcher(params.stop),
    )


def _check_prompt(spec: ModelSpec, context: int, ids: list[int]) -> None:
    if not ids:
        raise UsageError("the prompt is empty, and this model has no beginning-of-text token; give some text")
    if len(ids) > context:
        raise UsageError(
            f"the prompt has {len(ids)} tokens, the context holds {context} "
            f"(the model's limit is {spec.max_context}); shorten the prompt or raise the context"
        )
    if min(ids) < 0 or max(ids) >= spec.vocab_size:
        raise UsageError(
            f"the prompt has token ids from {min(ids)} to {max(ids)}; "
            f"the model's are 0 to {spec.vocab_size - 1}"
        )


def _detokenizer(tokenizer: Tokenizer | None, ids: list[int]) -> Detokenizer | None:
    if tokenizer is None:
        return None
    return Detokenizer(tokenizer, continuing=any(not tokenizer.is_special(i) for i in ids))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _ratio(part: float | None, whole: float) -> float | None:
    return None if part is None or whole <= 0 else part / whole


def disk_figures(f: Figures, threads: int) -> Json:
    """Return the disk's figures while decoding; None each if all neurons are in memory.

    A gate row on disk counts like a neuron.
    """
    keys = (
        "cache_hit_rate", "disk_bytes_per_token", "disk_reads_per_token", "disk_gb_per_s", "disk_wait_share",
        "disk_left_out_per_token"
    )  # fmt: skip
    if f.disk is None or not f.tokens_per_s:
        return dict.fromkeys(keys)
    d, tokens = f.disk, f.tokens - 1
    seconds = tokens / f.tokens_per_s
    waited, left_out = d.waited_ns / 1e9 / (threads * seconds), d.left_out / tokens
    figures = (d.hit_rate, d.bytes / tokens, d.reads / tokens, d.bytes / seconds / 1e9, waited, left_out)
    return dict(zip(keys, figures, strict=True))
