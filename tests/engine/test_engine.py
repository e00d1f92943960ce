"""The engine: company, chunks and the cache change no token; nothing leaks; the figures add up."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from toy import EOS, GREEDY, SPEC, VOCAB, WEIGHTS, Letters, embedding, random_weights

from thermocline import _native
from thermocline.engine.engine import Engine, EngineSettings
from thermocline.engine.kv_cache import BLOCK, bytes_for
from thermocline.engine.request import Request, StopMatcher
from thermocline.engine.sampler import Sampler, SamplingParams, TokenLogprobs
from thermocline.engine.traffic import Traffic
from thermocline.errors import NumericalError, ThermoclineError, UsageError
from thermocline.model import quant
from thermocline.model.spec import ModelSpec
from thermocline.ops import reference
from thermocline.ops.cpu import CpuOps
from thermocline.ops.interface import FFN, Layer, Linear, Weights


def prompt(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, EOS, n).tolist()  # type: ignore[no-any-return]


def run(e: Engine, *requests: Request) -> list[list[int]]:
    while e.step():
        e.check_integrity()
    e.check_integrity()
    assert all(r.finish_reason for r in requests)
    return [r.token_ids for r in requests]


Answer = tuple[list[int], str]


@dataclass(frozen=True)
class Lab:
    """One table of ops and the test model's weights for it."""

    ops: Any
    weights: Weights
    bit_exact: bool  # promises the same bits whatever the batch; numpy's matmul promises only the same tokens
    spec: ModelSpec = SPEC

    def engine(self, spec: ModelSpec | None = None, **changes: Any) -> Engine:
        own = {f.name: changes.pop(f.name) for f in dataclasses.fields(EngineSettings) if f.name in changes}
        settings = EngineSettings(**{"context": 256, **own})
        return Engine(
            spec or self.spec, self.weights, self.ops, settings, **{"tokenizer": Letters(), **changes}
        )

    def answer(self, request: Request) -> Answer:
        return request.token_ids, request.completion().figures.logits_hash if self.bit_exact else ""

    def alone(self, ids: list[int], params: SamplingParams = GREEDY, **changes: Any) -> Answer:
        e = self.engine(**changes)
        request = e.submit(ids, params)
        run(e, request)
        return self.answer(request)

    def answers(self, e: Engine, *requests: Request) -> list[Answer]:
        run(e, *requests)
        return [self.answer(r) for r in requests]


REFERENCE = Lab(reference, WEIGHTS, bit_exact=False)
engine = REFERENCE.engine


# Rows of a tiny model are no whole number of larger blocks.
SMALL_BLOCKS = [f.name for f in quant.FORMATS.values() if f.block <= 32]


def native_lab(format: str = "f32", spec: ModelSpec = SPEC, w: Weights = WEIGHTS, threads: int = 2) -> Lab:
    """The same weights in arenas, for `ops.cpu`."""

    def matrix(x: Any) -> Any:
        whole = x.shape[1] % quant.FORMATS[format].block == 0
        fmt = quant.FORMATS[format if whole else "f16"]  # as a pack has it
        data = quant.encode(fmt.name, x)
        arena = _native.Arena(data.size)  # held by the matrix
        arena.write(0, data.reshape(-1))
        return _native.Matrix(arena, 0, fmt.id, x.shape[0], x.shape[1], data.shape[1])

    def linear(x: Linear) -> Linear:
        return Linear(matrix(x.weight), x.bias)

    def ffn(f: FFN) -> FFN:
        p = f.part
        return FFN.whole(linear(p.gate), matrix(p.up), matrix(p.down), f.down_bias, f.bundles)

    layers = (
        Layer(x.attn_norm, linear(x.qkv), linear(x.attn_out), x.ffn_norm, (ffn(x.experts[0]),))
        for x in w.layers
        if x.qkv is not None and x.attn_out is not None
    )
    weights = Weights(matrix(w.embed), None, tuple(layers), w.out_norm, linear(w.head))
    return Lab(CpuOps(threads), weights, True, spec)


@pytest.fixture(params=["reference", "native"])
def lab(request: pytest.FixtureRequest) -> Lab:
    return REFERENCE if request.param == "reference" else native_lab()


# ---- what is computed together changes nothing


PROMPTS = [prompt(seed, n) for seed, n in enumerate((1, 5, 31, 32, 33, 64, 70, 100))]


def test_tokens_are_the_same_alone_and_in_a_batch(lab: Lab) -> None:
    e = lab.engine(max_batch=len(PROMPTS))
    mixed = lab.answers(e, *(e.submit(p, GREEDY) for p in PROMPTS))
    assert mixed == [lab.alone(p) for p in PROMPTS]


def test_tokens_are_the_same_when_requests_come_and_go(lab: Lab) -> None:
    e, requests = lab.engine(max_batch=3), []
    params = [SamplingParams(temperature=0, max_tokens=3 + 3 * i) for i in range(len(PROMPTS))]
    for i, p in enumerate(PROMPTS):
        requests.append(e.submit(p, params[i]))
        for _ in range(i):
            e.step()
    assert lab.answers(e, *requests) == [lab.alone(p, x) for p, x in zip(PROMPTS, params, strict=True)]


@pytest.mark.parametrize("chunk", [1, 7, 32, 33, 256])
def test_prefill_in_chunks_does_not_change_tokens(lab: Lab, chunk: int) -> None:
    assert lab.alone(PROMPTS[-1], prefill_chunk=chunk) == lab.alone(PROMPTS[-1], prefill_chunk=4096)


def test_prefix_reuse_does_not_change_tokens(lab: Lab) -> None:
    e, ids = lab.engine(), PROMPTS[-1]
    first = e.submit(ids, GREEDY)
    run(e, first)
    again, longer = e.submit(ids, GREEDY), e.submit([*ids, 3, 4], GREEDY)
    assert lab.answers(e, again, longer) == [lab.answer(first), lab.alone([*ids, 3, 4])]
    assert first.cached == 0 and again.cached == longer.cached == 96
    assert again.completion().figures.cached_tokens == 96


def test_an_answer_is_reused_as_the_start_of_the_next_prompt(lab: Lab) -> None:
    e = lab.engine()
    first = e.submit(PROMPTS[3], SamplingParams(temperature=0, max_tokens=40))
    run(e, first)
    second = e.submit([*first.ids, 5], GREEDY)
    assert lab.answers(e, second) == [lab.alone([*first.ids, 5])]
    assert second.cached == len(first.ids) // BLOCK * BLOCK


def test_skipping_neurons_does_not_change_tokens(lab: Lab) -> None:
    assert lab.alone(PROMPTS[2], sparsity="exact") == lab.alone(PROMPTS[2], sparsity="off")


@pytest.mark.parametrize("activation", ["relu", "silu"])  # bundles of neurons; a dense FFN
@pytest.mark.parametrize("format", SMALL_BLOCKS)
def test_nothing_changes_a_bit_in_any_format_and_layout(format: str, activation: str) -> None:
    """Company, chunks, threads, skipping, a reused prefix: the logits are those of one token at a time."""
    spec = dataclasses.replace(SPEC, activation=activation)
    w = random_weights(spec)
    lab, ids = native_lab(format, spec, w, threads=1), PROMPTS[-1]
    alone = [lab.alone(p, prefill_chunk=1, sparsity="off") for p in PROMPTS]
    assert len({tuple(tokens) for tokens, _ in alone}) == len(PROMPTS), "answers all alike prove nothing"
    for threads, chunk, sparsity in ((1, 256, "exact"), (2, 7, "exact"), (3, 33, "off")):
        other = native_lab(format, spec, w, threads)
        e = other.engine(max_batch=len(PROMPTS), prefill_chunk=chunk, sparsity=sparsity)
        assert other.answers(e, *(e.submit(p, GREEDY) for p in PROMPTS)) == alone, (threads, chunk, sparsity)
        again = e.submit(ids, GREEDY)
        assert other.answers(e, again) == alone[-1:] and again.cached == 96


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("format", [f for f in SMALL_BLOCKS if f != "mxfp4"])  # which has no NaN of weights
def test_a_token_that_is_no_number_fails_its_own_request_alone(format: str, activation: str) -> None:
    spec = dataclasses.replace(SPEC, activation=activation)
    w, bad = random_weights(spec), PROMPTS[1][2]
    assert bad not in PROMPTS[4]
    embedding(w)[bad, 5] = np.nan
    lab = native_lab(format, spec, w)
    few = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logit_bias={bad: -1000.0})
    expected = lab.alone(PROMPTS[4], few)
    e = lab.engine()
    broken, sound = e.submit(PROMPTS[1], few), e.submit(PROMPTS[4], few)
    assert lab.answers(e, broken, sound)[1] == expected and sound.error is None
    assert isinstance(broken.error, NumericalError)


@pytest.mark.parametrize("window", [1, 8, 40])
def test_a_sliding_window_survives_batching(lab: Lab, window: int) -> None:
    spec = dataclasses.replace(SPEC, sliding_window=window)
    e = lab.engine(spec, prefill_chunk=16)
    together = lab.answers(e, *(e.submit(p, GREEDY) for p in PROMPTS[-3:]))
    assert together == [lab.alone(p, spec=spec, prefill_chunk=256) for p in PROMPTS[-3:]]


def test_same_seed_same_tokens_20_of_20_whatever_the_company(lab: Lab) -> None:
    params = SamplingParams(seed=11, max_tokens=16, temperature=1.5)
    expected = lab.alone(PROMPTS[2], params)
    for i in range(20):
        e = lab.engine()
        others = [e.submit(p, SamplingParams(seed=i, max_tokens=4 + i)) for p in PROMPTS[: i % 4]]
        mine = e.submit(PROMPTS[2], params)
        assert lab.answers(e, mine, *others)[0] == expected


def test_the_first_token_does_not_wait_for_the_second() -> None:
    e = engine()
    request = e.submit(PROMPTS[1], GREEDY)
    e.step()
    assert len(request.chunks) == 1


def test_the_reported_seed_repeats_the_run() -> None:
    e = engine()
    first = e.submit(PROMPTS[1], SamplingParams(max_tokens=16, temperature=1.5))
    run(e, first)
    params = SamplingParams(max_tokens=16, temperature=1.5, seed=first.completion().seed)
    assert REFERENCE.alone(PROMPTS[1], params)[0] == first.token_ids


def test_native_and_reference_ops_agree_on_greedy_tokens() -> None:
    native = native_lab()
    for ids in PROMPTS:
        assert native.alone(ids)[0] == REFERENCE.alone(ids)[0]


# ---- how a request ends


def text_of(params: SamplingParams, ids: list[int] = PROMPTS[1]) -> tuple[str, str | None]:
    e = engine()
    request = e.submit(ids, params)
    run(e, request)
    done = request.completion()
    assert done.text == "".join(c.text for c in request.chunks)
    assert [c.finish_reason for c in request.chunks][:-1] == [None] * (len(request.chunks) - 1)
    assert request.chunks[-1].finish_reason == done.finish_reason
    return done.text, done.finish_reason


FULL, _ = text_of(GREEDY)


def test_max_tokens_ends_with_length() -> None:
    assert len(FULL) == 24
    assert text_of(SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)) == (FULL[:7], "length")


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("at", [0, 1, 9])
def test_a_stop_string_split_over_tokens_is_never_emitted(at: int, length: int) -> None:
    stop = FULL[at : at + length]
    params = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, stop=("never", stop, FULL[at + length :] + "!")
    )
    assert text_of(params) == (FULL[: FULL.index(stop)], "stop")


def test_text_held_back_for_a_stop_string_that_does_not_come_is_emitted_at_the_end() -> None:
    assert text_of(
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=(FULL[-3:] + "!",))
    ) == (FULL, "length")


def test_an_eos_token_ends_the_text_and_is_not_part_of_it() -> None:
    params = SamplingParams(temperature=0, max_tokens=24, logit_bias={EOS: 1000.0})
    e = engine()
    request = e.submit(PROMPTS[1], params)
    assert run(e, request) == [[EOS]]
    assert request.completion().text == "" and request.finish_reason == "stop"


def test_ignore_eos_never_samples_one() -> None:
    params = SamplingParams(temperature=0, max_tokens=24, logit_bias={EOS: 1000.0}, ignore_eos=True)
    e = engine()
    request = e.submit(PROMPTS[1], params)
    assert EOS not in run(e, request)[0] and len(request.token_ids) == 24


@pytest.mark.parametrize("n", [100, 255, 256])
def test_a_full_context_ends_with_length(n: int) -> None:
    e = engine()
    request = e.submit(prompt(0, n), SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    run(e, request)
    assert request.finish_reason == "length"
    assert request.n_prompt + len(request.token_ids) == 257  # the last token needs no position of its own


def test_stop_matcher_never_lets_a_stop_string_through_however_it_is_split() -> None:
    text, stop = "abababcab", ("ababc", "xyz")
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        pieces, matcher, out, stopped = _split(text, cuts), StopMatcher(stop), "", False
        while pieces and not stopped:
            shown, stopped = matcher.push(pieces.popleft())
            out += shown
        assert out == "ab" and stopped


def _split(text: str, cuts: tuple[bool, ...]) -> deque[str]:
    pieces = deque([text[0]])
    for c, cut in zip(text[1:], cuts, strict=True):
        if cut:
            pieces.append(c)
        else:
            pieces[-1] += c
    return pieces


def test_stop_matcher_holds_back_no_more_than_it_must() -> None:
    matcher = StopMatcher(("</s>",))
    assert [matcher.push(c)[0] for c in "a<b</x"] == ["a", "", "<b", "", "", "</x"]


# ---- cancelling, and what goes wrong


def test_cancelled_request_frees_its_blocks() -> None:
    e = engine()
    running, other = e.submit(PROMPTS[-1], GREEDY), e.submit(PROMPTS[0], GREEDY)
    e.step()
    assert e.kv.used > 0
    e.cancel(running)
    e.cancel(running)
    run(e, other)
    assert running.finish_reason == "cancelled" and e.kv.used == 0
    assert REFERENCE.answer(other) == REFERENCE.alone(PROMPTS[0])


def test_a_waiting_request_can_be_cancelled() -> None:
    e = engine(max_batch=1)
    first, second = e.submit(PROMPTS[0], GREEDY), e.submit(PROMPTS[1], GREEDY)
    e.step()
    e.cancel(second)
    run(e, first)
    assert second.finish_reason == "cancelled" and second.token_ids == []


def test_a_cancelled_prompt_half_computed_leaves_only_whole_blocks_behind() -> None:
    e = engine(prefill_chunk=40)
    request = e.submit(PROMPTS[-1], GREEDY)
    e.step()
    e.cancel(request)
    again = e.submit(PROMPTS[-1], GREEDY)
    assert REFERENCE.answers(e, again) == [REFERENCE.alone(PROMPTS[-1])]
    assert again.cached == 32


def test_requests_wait_for_memory_and_all_finish() -> None:
    e = engine(context=128, kv_tokens=128)
    params = SamplingParams(temperature=0, max_tokens=20)
    answers = REFERENCE.answers(e, *(e.submit(p, params) for p in PROMPTS * 2))
    assert answers == [REFERENCE.alone(p, params) for p in PROMPTS * 2]


def test_damaged_weights_fail_their_request_with_a_numerical_error_and_free_it() -> None:
    e = engine()
    embed = embedding(WEIGHTS).copy()
    embed[5] = np.nan
    weights = Weights(embed, None, WEIGHTS.layers, WEIGHTS.out_norm, WEIGHTS.head)
    e.model = dataclasses.replace(e.model, weights=weights)
    bad, good = e.submit([5], GREEDY), e.submit([4], SamplingParams(temperature=0, max_tokens=1))
    run(e, bad, good)
    assert isinstance(bad.error, NumericalError) and good.error is None


def a_bug(*_: Any) -> Any:
    return [][0]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("sampler", "sample"),
        ("sampler.__class__", "complete"),
        ("detokenizer", "push"),
        ("detokenizer", "flush"),
        ("matcher", "push"),
        ("matcher", "flush"),
        ("TokenLogprobs", "of"),
    ],
)
def test_a_bug_in_what_is_one_requests_own_ends_that_request_alone(
    owner: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = engine()
    bad, good = (e.submit([4], SamplingParams(temperature=0, max_tokens=2, logprobs=i)) for i in (0, None))
    match owner:
        case "TokenLogprobs":  # which the other one did not ask for
            monkeypatch.setattr(TokenLogprobs, name, a_bug)
        case "sampler.__class__":

            class Buggy(Sampler):
                complete = property(a_bug)

            bad.sampler.__class__ = Buggy
        case _:
            setattr(getattr(bad, owner), name, a_bug)
    run(e, bad, good)
    assert type(bad.error) is ThermoclineError and "IndexError" in str(bad.error)
    assert bad.finish_reason == "cancelled" and e.kv.used == 0
    assert good.error is None and len(good.token_ids) == 2


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    with pytest.raises(UsageError, match=r"has 65 tokens, the context holds 64"):
        engine(context=64).submit([1] * 65, GREEDY)


def test_an_empty_prompt_becomes_the_beginning_of_text_token() -> None:
    assert REFERENCE.alone([]) == REFERENCE.alone([0])


def test_an_empty_prompt_without_one_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        engine(dataclasses.replace(SPEC, bos_id=None)).submit([], GREEDY)


@pytest.mark.parametrize("bad", [-1, VOCAB])
def test_a_token_the_model_lacks_is_refused(bad: int) -> None:
    with pytest.raises(UsageError, match="0 to 96"):
        engine().submit([1, bad], GREEDY)


# ---- figures


def test_figures_count_what_was_done() -> None:
    e = engine()
    request = e.submit(PROMPTS[3], GREEDY)
    run(e, request)
    f = request.completion().figures
    assert (f.prompt_tokens, f.cached_tokens, f.tokens) == (32, 0, 24)
    assert f.first_token_s and f.prompt_tokens_per_s and f.tokens_per_s
    assert f.active_fraction is not None and 0.2 < f.active_fraction < 0.8
    assert f.rows_fraction is not None and f.active_fraction <= f.rows_fraction < 1


def test_bytes_per_token_is_the_sum_of_what_is_read() -> None:
    e = engine(sparsity="off")
    request = e.submit(PROMPTS[0], SamplingParams(temperature=0, max_tokens=3))
    run(e, request)
    matrices = SPEC.n_layers * (SPEC.qkv_rows + SPEC.dim + 3 * SPEC.ffn_dim) * SPEC.dim + VOCAB * SPEC.dim
    norms = (2 * SPEC.n_layers + 1) * SPEC.dim
    positions = (2 + 3) / 2  # of the second and the third token
    expected = 4 * (matrices + norms) + positions * bytes_for(SPEC, 1)
    assert request.completion().figures.bytes_per_token == expected


def test_skipped_rows_are_not_counted_as_read() -> None:
    figures = []
    for sparsity in ("exact", "off"):
        e = engine(sparsity=sparsity)
        request = e.submit(PROMPTS[1], GREEDY)
        run(e, request)
        figures.append(request.completion().figures)
    skipped, dense = figures
    assert skipped.rows_fraction is not None and dense.rows_fraction == 1
    assert skipped.bytes_per_token is not None and dense.bytes_per_token is not None
    rows = SPEC.n_layers * SPEC.ffn_dim * 2  # up and down
    saved = (1 - skipped.rows_fraction) * rows * Traffic.of(SPEC, WEIGHTS).row_bytes
    assert dense.bytes_per_token - skipped.bytes_per_token == pytest.approx(saved, abs=1)
    assert skipped.active_fraction == pytest.approx(dense.active_fraction)


def test_a_single_token_has_no_decode_figures() -> None:
    e = engine()
    request = e.submit(PROMPTS[0], SamplingParams(temperature=0, max_tokens=1))
    run(e, request)
    f = request.completion().figures
    assert f.tokens_per_s is f.active_fraction is f.rows_fraction is f.bytes_per_token is None


def test_the_logits_hash_tells_equal_runs_from_others() -> None:
    hashes = []
    for ids in (PROMPTS[1], PROMPTS[1], PROMPTS[2]):
        e = engine()
        request = e.submit(ids, GREEDY)
        run(e, request)
        hashes.append(request.completion().figures.logits_hash)
    assert hashes[0] == hashes[1] != hashes[2]


def test_logprobs_come_with_each_token() -> None:
    e = engine()
    request = e.submit(PROMPTS[1], SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True))
    run(e, request)
    reports = request.completion().logprobs
    assert reports is not None and len(reports) == 4
    for report, token in zip(reports, request.token_ids, strict=True):
        assert (token, report.logprob) in report.top and len(report.top) == 3
    assert [c.logprobs for c in request.chunks] == reports
