"""Skipping zero neurons changes no bit of the answer, and on the bundled model skips most of the work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny

from thermocline import LLM, Completion, SamplingParams
from thermocline.convert.importer import pack
from thermocline.engine.engine import Engine, EngineSettings
from thermocline.model import quant
from thermocline.pack.pack import Pack
from thermocline.session.weights import load

PROMPTS = (
    "Once upon a time",
    "The little dog",
    "One day, a girl named Lucy",
    "In the morning the old man",
    "There was a big red ball",
    "Mum said",
    "It was a dark and stormy night",
    '"Where are you going?" asked',
    "The king had three sons.",
    "Sam and Mia like to play",
    "On the hill there stood a house",
    "A bird flew over the sea",
    "The teacher smiled and",
    "My dear Watson,",
    "Far away, in a cold country,",
    "He opened the door slowly",
    "They were very hungry, so",
    "The first rule is",
    "When winter came",
    "The end of the story",
)
TOKENS = 256
QUICK = 4  # of the prompts, that the tests without the mark `slow` answer
MAX_ROWS = 0.15  # of up and down rows, that `exact` computes on the bundled model


def greedy(llm: LLM, prompts: tuple[str, ...] = PROMPTS) -> list[Completion]:
    """One prompt at a time: what is skipped is what this one token does not need."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    return [llm.generate(prompt, params) for prompt in prompts]


def rows(answer: Completion) -> float:
    """Of the up and down rows a dense pass reads, those that were read."""
    fraction = answer.figures.rows_fraction
    assert fraction is not None
    return fraction


def assert_the_same_answers(exact: list[Completion], off: list[Completion]) -> None:
    for a, b in zip(exact, off, strict=True):
        assert a.token_ids == b.token_ids and len(a.token_ids) == TOKENS
        assert a.figures.logits_hash == b.figures.logits_hash
        assert a.figures.active_fraction == b.figures.active_fraction
        assert rows(b) == 1.0
        # An up product that cancels to zero leaves a neuron read but not active: a few in a million.
        assert 0 <= rows(a) - (a.figures.active_fraction or 0.0) < 1e-4


@pytest.fixture(scope="module", params=[QUICK, pytest.param(len(PROMPTS), marks=pytest.mark.slow)])
def bundled(request: pytest.FixtureRequest) -> tuple[list[Completion], list[Completion]]:
    """Without its package data this fails: such an install cannot run the README's first command."""
    answers = []
    for sparsity in ("exact", "off"):
        with LLM(threads=2, sparsity=sparsity) as llm:
            answers.append(greedy(llm, PROMPTS[: request.param]))
    return answers[0], answers[1]


def test_exact_changes_no_bit_on_the_bundled_model(
    bundled: tuple[list[Completion], list[Completion]],
) -> None:
    assert_the_same_answers(*bundled)


def test_exact_computes_few_rows_of_the_bundled_model(
    bundled: tuple[list[Completion], list[Completion]],
) -> None:
    assert np.mean([rows(a) for a in bundled[0]]) <= MAX_ROWS


@pytest.mark.parametrize("format", [f.name for f in quant.FORMATS.values() if f.block <= 32])
@pytest.mark.parametrize("prompts", [1, pytest.param(len(PROMPTS), marks=pytest.mark.slow)])
def test_exact_changes_no_bit_on_a_random_relu_model(
    tiny_hf: Path, tmp_path: Path, prompts: int, format: str
) -> None:
    pack(tiny_hf, tmp_path / "pack", format)
    answers = []
    for sparsity in ("exact", "off"):
        with LLM(tmp_path / "pack", context=512, threads=2, sparsity=sparsity) as llm:
            answers.append(greedy(llm, PROMPTS[:prompts]))
    assert_the_same_answers(*answers)
    assert all(0.3 < rows(a) < 0.7 for a in answers[0]), "half of random gates are negative"


def test_exact_in_a_batch_reads_the_union_and_changes_no_bit(tiny_pack: Path) -> None:
    """Eight answers share each step's rows: more are read, and each answer stays what it was alone."""
    made = Pack.open(tiny_pack)
    got = load(made, threads=2)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [[tiny.BYTES, *prompt.encode()] for prompt in PROMPTS[:8]]

    def run(max_batch: int, sparsity: str) -> list[Completion]:
        settings = EngineSettings(context=256, max_batch=max_batch, sparsity=sparsity, prefill_chunk=50)
        engine = Engine(made.spec, got.weights, got.ops, settings)
        requests = [engine.submit(ids, params) for ids in prompts]
        while engine.step():
            pass
        return [r.completion() for r in requests]

    alone = run(1, "exact")
    for together in (run(8, "exact"), run(8, "off")):
        for a, b in zip(alone, together, strict=True):
            assert (a.token_ids, a.figures.logits_hash) == (b.token_ids, b.figures.logits_hash)
            assert rows(a) < rows(b)
