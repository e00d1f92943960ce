"""A budget is divided to the byte, to whoever misses fewest reads for it, and never overdrawn."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thermocline import _native
from thermocline.convert.synthetic import read_shape
from thermocline.convert.synthetic_weights import activities
from thermocline.errors import OutOfBudget
from thermocline.llm import BUNDLED
from thermocline.model.tensors import expected_tensors, place
from thermocline.pack.pack import Pack
from thermocline.plan import hotness
from thermocline.plan.budget import without_gpu
from thermocline.plan.disk.cache_split import LEAST, NeuronRows, Share, fetch, split
from thermocline.plan.disk.disk_split import (
    Arrangement,
    Contents,
    arrange,
    least_bytes,
    resident,
)
from thermocline.plan.memory import GIB, Needs, contexts_for, gib_up, others_of, size_down, size_up

# ---- places


def rows(n: int, stride: int = 4608, active: float = 0.11) -> NeuronRows:
    return NeuronRows(stride, activities(n, active, 0.26))


def taken(all_rows: list[NeuronRows], shares: list[Share]) -> int:
    return sum(s.places * x.place_bytes + x.table_bytes for s, x in zip(shares, all_rows, strict=True))


each_room = given(
    sizes=st.lists(st.sampled_from([96, 1000, 4096, 11008]), min_size=1, max_size=6),
    strides=st.sampled_from([(512, 512), (2304, 4608), (8192, 16384)]),
    part=st.floats(0, 1.1),
)


@settings(max_examples=10, deadline=None)
@each_room
def test_places_fill_the_room_and_never_more(sizes: list[int], strides: tuple[int, int], part: float) -> None:
    fills_the_room(sizes, strides, part)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@each_room
def test_places_fill_twice_as_many_rooms_and_never_more(
    sizes: list[int], strides: tuple[int, int], part: float
) -> None:
    fills_the_room(sizes, strides, part)


def fills_the_room(sizes: list[int], strides: tuple[int, int], part: float) -> None:
    every = [rows(n, strides[i % 2], 0.05 + 0.03 * i) for i, n in enumerate(sizes)]
    room = int(part * sum(x.place_bytes * len(x.need) + x.table_bytes for x in every))
    shares = split(every, room)
    if shares is None:
        assert sum(x.least_bytes for x in every) > room
        return
    assert taken(every, shares) <= room
    if part < 1:  # what is left would not hold the next places that somebody wants
        assert room - taken(every, shares) < 32 * max(x.place_bytes for x in every)
    for x, s in zip(every, shares, strict=True):
        assert x.least <= s.places <= len(x.need) and (s.quota == 0) == (s.places == len(x.need))
        assert s.hot in (0, len(x.need))


def test_places_go_to_whom_they_save_most() -> None:
    lively, quiet = rows(4096, active=0.3), rows(4096, active=0.05)
    shares = split([lively, quiet], 4096 * lively.place_bytes)
    assert shares is not None and shares[0].places > 1.3 * shares[1].places
    margins = [x.need[s.places] for x, s in zip((lively, quiet), shares, strict=True)]
    assert margins[0] == pytest.approx(margins[1], rel=0.1), "the next place would save either as much"
    short, long = rows(4096, 2304), rows(4096, 16384)
    some = split([short, long], 1024 * long.place_bytes)
    assert some is not None and some[0].places > 2 * some[1].places, (
        "a byte saves more reads where rows are short"
    )


@pytest.mark.parametrize("stride", [4608, 16384, 40000])
@pytest.mark.parametrize(("ordered", "asked"), [(True, 1.0), (False, 1.0), (True, 0.25)])
def test_expected_reads_are_those_of_drawn_tokens(stride: int, ordered: bool, asked: float) -> None:
    """Neighbours are one read, with the gap between them, as slots.cpp reads. Of an expert's they all
    are asked for, or none is.
    """
    rng = np.random.default_rng(0)
    p = np.sort(rng.uniform(0, 0.3, 2000))[::-1]
    x, share, tokens = NeuronRows(stride, asked * p, asked), Share(0, 500), 400
    rows = reads = nbytes = 0
    places = np.arange(2000) if ordered else rng.permutation(2000)
    for _ in range(tokens):
        missed = np.sort(places[500:][rng.uniform(size=1500) < p[500:]])
        gaps = np.diff(missed) - 1
        near = gaps <= _native.limits().gap_bytes // stride
        rows += len(missed)
        reads += len(missed) - int(near.sum())
        nbytes += (len(missed) + int(gaps[near].sum())) * stride
    found = fetch(x, share, ordered=ordered)
    assert found.rows == pytest.approx(asked * rows / tokens, rel=0.03)
    assert found.reads == pytest.approx(asked * reads / tokens, rel=0.03)
    assert found.bytes == pytest.approx(asked * nbytes / tokens, rel=0.03)
    assert fetch(x, Share(2000, 0), ordered=ordered).rows == 0


# ---- the whole of a budget


def contents(
    sparsity: str = "exact", format: str = "q4_0", predictor_bytes: int | None = None, experts: int = 1
) -> Contents:
    """A ReGLU 7B of 8 layers, profiled; its neurons perhaps in experts, of which a token goes to two."""
    shape = dataclasses.replace(read_shape("llama-2-7b")[1], activation="relu", n_layers=8)
    each = shape.ffn_dim // experts
    spec = dataclasses.replace(shape, n_experts=experts, n_experts_active=min(2, experts), ffn_dim=each)
    tensors = place({n: t for n, t in expected_tensors(spec, format).items() if not t.optional})[0]
    heat = hotness.assumed(8, experts * spec.ffn_dim, 0.11, 0.26, experts, spec.routed(1))
    return Contents(spec, tensors, predictor_bytes, sparsity, dataclasses.replace(heat, ordered=True))


def others(c: Contents, context: int = 512) -> dict[str, int]:
    return others_of(c.spec, context=context, kv_tokens=context, max_batch=1, threads=2)


def arranged(c: Contents, gib: float) -> Arrangement:
    return arrange(c, int(gib * GIB), others(c))


@pytest.mark.parametrize("experts", [1, 8])
@pytest.mark.parametrize("sparsity", ["exact", "predict", "off"])
def test_every_budget_from_the_least_up_is_kept_and_used(sparsity: str, experts: int) -> None:
    c = contents(sparsity, predictor_bytes=40 << 20 if sparsity == "predict" else 0, experts=experts)
    least = least_bytes(c, others(c))
    assert c.predictor_bytes is not None
    whole = sum(t.bytes for t in c.tensors.values()) + sum(others(c).values()) + c.predictor_bytes
    places: list[int] = []
    for budget in np.linspace(least, 1.02 * whole, 12).astype(int):
        a = arrange(c, int(budget), others(c))
        assert a.bytes <= budget
        assert a.bytes > budget - 64 * 16384 or all(s.quota == 0 for s in a.bundles)
        places.append(sum(s.places for s in a.bundles))
    assert places[-1] > 0.9 * 8 * 11008 and places[0] == 8 * experts * LEAST
    with pytest.raises(OutOfBudget, match=r"use --ram [\d.]+"):
        arrange(c, least - 1, others(c))


def test_rows_of_an_expert_are_asked_for_together() -> None:
    c, n = contents("predict", predictor_bytes=1, experts=8), 1376
    each = c.rows("bundle")
    assert len(each) == 8 * 8 and {len(x.need) for x in each} == {n} and {x.asked for x in each} == {0.25}
    assert sum(x.need.sum() for x in each[:8]) == pytest.approx(0.11 * 2 * n, rel=1e-3)
    for batch, asked in ((1, 0.25), (8, 1 - 0.75**8)):
        named, active = c.rows("gate.weight", batch)[0], c.rows("bundle", batch)[0]
        assert named.asked == active.asked == pytest.approx(asked)
        wanted = n * asked if batch > 4 else 1.5 * active.need.sum()  # a larger step is not guessed
        assert named.need.sum() == pytest.approx(wanted, rel=0.02)
    off = contents("off", experts=8).rows("bundle", 2)[63]
    assert off.need.tolist() == [1 - 0.75**2] * n
    popular = dataclasses.replace(c.hotness, at=lambda layer, batch: np.linspace(0.6, 0.1, 8 * n))
    assert dataclasses.replace(c, hotness=popular).rows("bundle")[0].asked == 0.6


def test_of_a_drelu_model_those_with_an_open_gate_are_read() -> None:
    """Twice as many as are active where half of the ups are open: a root, never beyond what is predicted."""
    for experts in (1, 8):
        plain = contents("exact", experts=experts)
        drelu = dataclasses.replace(plain, spec=dataclasses.replace(plain.spec, up_activation="relu"))
        active, opened = plain.rows("bundle")[0], drelu.rows("bundle")[0]
        assert opened.need**2 == pytest.approx(active.need * active.asked)
        guessing = dataclasses.replace(drelu, sparsity="predict", predictor_bytes=1)
        named, read = guessing.rows("gate.weight")[0], guessing.rows("bundle")[0]
        assert (read.need == np.minimum(opened.need, named.need)).all()
        assert guessing.rows("bundle", 8)[0].need.sum() > drelu.rows("bundle", 4)[0].need.sum()


def test_a_refusal_names_a_budget_that_is_enough() -> None:
    c = contents()
    with pytest.raises(OutOfBudget) as refused:
        arranged(c, 0.3)
    enough = float(re.search(r"--ram ([\d.]+)", str(refused.value))[1])  # type: ignore[index]
    assert arranged(c, enough).bytes <= enough * GIB
    with pytest.raises(OutOfBudget):
        arranged(c, enough - 0.02)


def test_gate_rows_go_to_disk_only_where_that_reads_less() -> None:
    c = contents("predict", predictor_bytes=40 << 20)
    assert arranged(c, 1.6).gates is None
    tight = arranged(c, 0.85)
    assert tight.gates is not None and "gate rows" in tight.parts
    assert arranged(contents("exact"), 0.85).gates is None, "without a predictor all of them are read"


def test_what_is_resident_is_everything_but_what_may_be_on_disk() -> None:
    c = contents()
    names = resident(c.spec, c.tensors, gates=False)
    assert {n.split(".", 2)[-1] for n in set(c.tensors) - set(names)} == {"bundle", "weight"}
    assert "embed.weight" not in names and "head.weight" in names
    tied = dataclasses.replace(c.spec, tied_head=True)
    assert "embed.weight" in resident(tied, c.tensors, gates=False), "the head reads all of it"
    assert set(names) - set(resident(c.spec, c.tensors, gates=True)) == {
        f"layers.{i}.gate.weight" for i in range(8)
    }


def test_a_default_context_leaves_the_memory_to_the_weights() -> None:
    spec = dataclasses.replace(contents().spec, n_layers=32)  # keys and values of 4096 tokens: 2 GiB
    assert contexts_for(spec, None, 4 * GIB) == [4096, 1024]
    assert contexts_for(spec, 4096, 4 * GIB) == [4096], "what was asked for is kept"
    assert contexts_for(spec, None, None) == [4096]


def test_the_figure_of_a_refusal_is_the_least_that_works() -> None:
    """A small model needs more with its neurons on disk than without: "0.08 GiB" where 0.07 was enough."""
    bundled = Pack.open(BUNDLED)

    def fits(budget: int) -> bool:
        without_gpu(bundled, None, Needs("exact", 512, 1, 2, budget, "allowed"))
        return True

    with pytest.raises(OutOfBudget) as refused:
        fits(1 << 20)
    said = re.search(r"needs ([\d.]+) MiB .*use --ram ([\d.]+)", str(refused.value))
    assert said is not None
    assert fits(int(float(said[1]) * 2**20)) and fits(int(float(said[2]) * GIB))
    for less in (int((float(said[1]) - 0.11) * 2**20), int((float(said[2]) - 0.00011) * GIB)):
        with pytest.raises(OutOfBudget):
            fits(less)


@pytest.mark.parametrize("nbytes", [1, 2**20, 123_456_789, 2**30 - 1, 2**30, 5 * 2**30 + 1])
def test_sizes_that_are_needed_are_never_rounded_down(nbytes: int) -> None:
    assert nbytes <= float(gib_up(nbytes)) * GIB <= nbytes + GIB / 50
    for shown, holds in ((size_up(nbytes), True), (size_down(nbytes), False)):
        number, unit = shown.split()
        value = float(number) * {"MiB": 2**20, "GiB": GIB}[unit]
        assert (value >= nbytes) if holds else (value <= nbytes)
