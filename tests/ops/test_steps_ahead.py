"""Tokens that are chosen on a device, and steps that are begun before the last one's are looked at.

Nobody can tell: requests get the same tokens, statistics and errors as from logits in RAM, one step after the
other.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import placements
import pytest
import recurrent_toy
from recurrent_toy import weights_of
from test_gpu import gpu_ops, pack_of, placed, stand_in, storage
from test_gpu_moe import mixture_of, random_mixture
from test_options import SPEC, random_weights
from toy import VOCAB

from thermocline.engine.decoder import bind
from thermocline.engine.engine import Engine, EngineSettings
from thermocline.engine.request import Request
from thermocline.engine.sampler import SamplingParams
from thermocline.errors import DeviceFailure, NumericalError
from thermocline.ops.device import StandIn
from thermocline.ops.gpu import GpuOps
from thermocline.ops.interface import Linear, Weights
from thermocline.ops.kernels import torch_kernels
from thermocline.pack.pack import Pack
from thermocline.plan.placement import Placement
from thermocline.session import gpu_weights

pytestmark = pytest.mark.oracle
__all__ = ["stand_in"]  # a fixture
TIED = {"tie_word_embeddings": True}
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=11, seed=5, ignore_eos=True)
HOT = SamplingParams(max_tokens=16, seed=9, temperature=1.8, top_k=60, top_p=1.0, min_p=0.0)
WAYS = ("logits", "one step", "steps ahead")


@dataclass
class Model:
    """A tied model on the stand-in, whose engines choose tokens in one way or the other."""

    device: StandIn
    ops: GpuOps
    weights: Weights
    places: Placement
    spec: Any

    def engine(self, way: str, **settings: Any) -> Engine:
        own = EngineSettings(**{"context": 64, "max_batch": 4, "prefill_chunk": 16, **settings})
        still: dict[str, Any] = {"clock": lambda: 0.0}  # or chunks of prompts were as long as time lets them
        made = Engine(self.spec, self.weights, self.ops, own, storage=storage(self.places), **still)
        self.ops.forget()  # recordings are of one engine's keys and values
        assert made.model.chooser is not None
        if way == "logits":
            made.model = replace(made.model, chooser=None)
        elif way == "one step":
            made._goes_on = lambda spans: False  # type: ignore[method-assign]
        return made


def model_of(pack: Pack, stand_in: StandIn, *neurons: int) -> Model:
    """`neurons` of the layers on the device: all, a part, or none."""
    each = tuple(placements.layer(pack.spec, True, False, n) for n in neurons or (512, 512, 512))
    places, ops = Placement(each, "gpu:0"), gpu_ops(stand_in, pack.spec)
    return Model(stand_in, ops, gpu_weights.load(pack, places, (stand_in,), ops.cpu), places, pack.spec)


@pytest.fixture
def model(tmp_path: Path, stand_in: StandIn) -> Model:
    return model_of(pack_of(tmp_path, "f32", **TIED), stand_in, 512, 96, 512)


def told(r: Request) -> tuple[Any, ...]:
    """Return all that a request has to show, but for its times and hash (torch's last bits vary)."""
    f = dataclasses.asdict(r.figures())
    same = {k: v for k, v in f.items() if not k.endswith(("_s", "_p99", "_hash"))}
    return r.ids, r.finish_reason, type(r.error), same, [c.finish_reason for c in r.chunks], r.decode


def served(engine: Engine, *requests: Request) -> list[tuple[Any, ...]]:
    while engine.step():
        engine.check_integrity()
    engine.check_integrity()
    assert engine.kv.used == 0
    return [told(r) for r in requests]


def in_each_way(model: Model, serve: Callable[[Engine], list[tuple[Any, ...]]], **settings: Any) -> Any:
    """-> what is told, the same in each way."""
    first, *others = [serve(model.engine(way, **settings)) for way in WAYS]
    for other in others:
        for one, same in zip(other, first, strict=True):
            assert one == same
    return first


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how steps of answers began, and how many were given up."""
    found, begin, ended = Counter[str](), Engine._begun, GpuOps.ended

    def counted(self: Engine, spans: Any, after: Any = None) -> Any:
        made = begin(self, spans, after)
        if made is not None:
            found["ahead" if after is not None else "alone"] += 1
        return made

    def used(self: GpuOps, *args: Any) -> None:
        found["used"] += args[0].chooses
        ended(self, *args)

    monkeypatch.setattr(Engine, "_begun", counted)
    monkeypatch.setattr(GpuOps, "ended", used)
    return found


# ---- the same tokens


@pytest.mark.parametrize("format", ["f32", "q8_0", "q4_0"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED, HOT], ids=["greedy", "seeded", "hot"])
def test_one_request_gets_the_same_in_each_way(
    format: str, params: SamplingParams, tmp_path: Path, stand_in: StandIn, begun: Counter[str]
) -> None:
    model = model_of(pack_of(tmp_path, format, **TIED), stand_in)
    (one,) = in_each_way(model, lambda e: served(e, e.submit(range(3, 24), params)))
    assert len(one[0]) > 30
    assert begun["ahead"] > begun["alone"] / 2


def test_requests_of_every_kind_share_steps(model: Model, begun: Counter[str]) -> None:
    """Some draw, some are greedy; one needs its logits, so its steps are not ahead of anybody."""
    own = replace(SEEDED, max_tokens=5, logprobs=1)
    asked = [(range(3, 9), GREEDY), (range(3, 40), SEEDED), (range(9, 12), HOT)]

    def serve(e: Engine) -> list[tuple[Any, ...]]:
        return served(e, *(e.submit(*a) for a in asked), e.submit(range(5, 8), own))

    each = in_each_way(model, serve)
    for alone, want in zip((*asked, (range(5, 8), own)), each, strict=True):
        e = model.engine("logits")
        assert served(e, e.submit(*alone))[0][0] == want[0]
    assert begun["ahead"] > 6


def test_who_comes_while_a_step_is_ahead_is_served(model: Model) -> None:
    def serve(e: Engine) -> list[tuple[Any, ...]]:
        requests = [e.submit(range(3, 9), GREEDY)]
        for n in (4, 3, 1):
            for _ in range(n):
                e.step()
            requests.append(e.submit(range(3, 9 + n), replace(SEEDED, seed=n)))
        return served(e, *requests)

    in_each_way(model, serve)


# ---- steps that are given up


def test_what_ends_an_answer_ends_the_step_ahead(model: Model, begun: Counter[str]) -> None:
    """A stop token amid an answer: those beside it go on, and get what they get alone."""
    e = model.engine("logits")
    ((ids, *_),) = served(e, e.submit(range(3, 9), HOT))
    stop, at = ids[13], ids.index(ids[13], 6)
    begun.clear()

    def serve(e: Engine) -> list[tuple[Any, ...]]:
        first = e.submit(range(3, 9), replace(HOT, stop_ids=(stop,)))
        return served(e, first, e.submit(range(3, 20), GREEDY), e.submit(range(4, 9), SEEDED))

    first, *_ = in_each_way(model, serve)
    assert (first[0], first[1]) == (ids[: at + 1], "stop")
    assert begun["used"] < begun["alone"] + begun["ahead"], "a step was given up"


def test_a_length_that_is_known_begins_no_step_in_vain(model: Model, begun: Counter[str]) -> None:
    in_each_way(model, lambda e: served(e, *(e.submit(range(3, 5 + n), GREEDY) for n in (1, 7))))
    assert begun["used"] == begun["alone"] + begun["ahead"]


def test_cancelled_requests_leave_a_step_that_never_was(model: Model, begun: Counter[str]) -> None:
    def serve(e: Engine) -> list[tuple[Any, ...]]:
        first, second = e.submit(range(3, 9), GREEDY), e.submit(range(3, 20), SEEDED)
        for _ in range(6):
            e.step()
        e.cancel(first)
        third = e.submit(range(3, 9), replace(SEEDED, seed=8))  # may take the blocks of the first
        return served(e, first, second, third)

    in_each_way(model, serve)
    assert begun["used"] < begun["alone"] + begun["ahead"]


def test_a_prefix_is_reused_behind_steps_that_were_given_up(model: Model) -> None:
    """The block that a step wrote to in vain is another's."""

    def serve(e: Engine) -> list[tuple[Any, ...]]:
        found = []
        for n in (5, 9):
            params = replace(HOT, stop_ids=tuple(range(0, 512, n)))
            found += served(e, *(e.submit(range(3, 40), replace(params, seed=s)) for s in range(3)))
        return found

    in_each_way(model, serve)


# ---- errors


class Faulty(StandIn):
    """Fails once, at the nth call of a kernel that runs on it."""

    kernel, left = "", 0

    def run(self, kernel: Callable[..., Any], *args: Any) -> None:
        def work(*given: Any) -> None:
            if kernel.__name__ == self.kernel:
                self.left -= 1
                if not self.left:
                    raise RuntimeError("planted")
            kernel(*given)

        super().run(work, *args)


@pytest.mark.parametrize("at", range(1, 12, 3))
def test_a_step_ahead_that_fails_costs_its_own_token(at: int, tmp_path: Path) -> None:
    """Whoever waits for it is told, once; made again, it gives the same tokens with the same numbers."""
    device = Faulty()
    model = model_of(pack_of(tmp_path, "f32", **TIED), device, 512, 96, 512)
    e = model.engine("logits")
    want = served(e, e.submit(range(3, 9), SEEDED), e.submit(range(3, 20), GREEDY))
    for _ in range(2):
        e = model.engine("steps ahead")
        requests = e.submit(range(3, 9), SEEDED), e.submit(range(3, 20), GREEDY)
        device.kernel, device.left = "choose", at
        with pytest.raises(DeviceFailure, match="planted"):
            served(e, *requests)
        assert len(requests[0].token_ids) == at, "the tokens of the steps before it are there"
        assert served(e, *requests) == want
    device.close()


def test_a_step_that_cannot_be_begun_ahead_is_begun_in_its_turn(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = model.engine("logits")
    want = served(e, e.submit(range(3, 9), SEEDED))
    true, calls = model.ops.choose, Counter[str]()

    def choose(*args: Any) -> Any:
        calls["all"] += 1
        if model.ops.turn:
            calls["ahead"] += 1
            raise DeviceFailure("planted")
        return true(*args)

    monkeypatch.setattr(model.ops, "choose", choose)
    e = model.engine("steps ahead")
    assert served(e, e.submit(range(3, 9), SEEDED)) == want
    assert calls["ahead"] and calls["all"] > calls["ahead"]


def test_ctrl_c_leaves_both_steps_to_be_made_again(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    e = model.engine("logits")
    want = served(e, e.submit(range(3, 9), SEEDED), e.submit(range(3, 9), GREEDY))
    e = model.engine("steps ahead")
    requests = e.submit(range(3, 9), SEEDED), e.submit(range(3, 9), GREEDY)
    for _ in range(5):
        e.step()
    true = StandIn.wait

    def interrupted(self: StandIn, tasks: Any, mark: object = None) -> None:
        monkeypatch.setattr(StandIn, "wait", true)
        raise KeyboardInterrupt

    monkeypatch.setattr(StandIn, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        e.step()
    assert not e.computing
    assert served(e, *requests) == want


def test_a_logit_that_is_no_number_ends_its_request_alone(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = model.engine("logits")
    *_, want = served(e, e.submit(range(3, 9), GREEDY), e.submit(range(3, 20), SEEDED))
    true, calls = torch_kernels.choose, Counter[str]()

    def choose(ids: Any, chosen: Any, logits: Any, *rest: Any) -> None:
        calls["steps"] += 1
        if calls["steps"] == 4:
            logits[0, [77, 300]] = np.nan
        true(ids, chosen, logits, *rest)

    monkeypatch.setattr(torch_kernels, "choose", choose)
    e = model.engine("steps ahead")
    first, second = served(e, e.submit(range(3, 9), GREEDY), e.submit(range(3, 20), SEEDED))
    assert first[1:3] == ("cancelled", NumericalError) and second[0] == want[0]


# ---- other models


@pytest.mark.parametrize("kind", recurrent_toy.SPECS)
@pytest.mark.parametrize("batch", [4, 1])
def test_states_follow_each_other_ahead(
    kind: str, batch: int, stand_in: StandIn, begun: Counter[str]
) -> None:
    """A stop amid an answer, prompts that go on from a kept state; where slots are few, no step is ahead."""
    spec = replace(recurrent_toy.SPECS[kind], tied_head=True)
    places = placements.whole(spec)
    ops = gpu_ops(stand_in, spec)
    w = weights_of(spec)
    tied = replace(w, head=Linear(w.embed, None))
    model = Model(stand_in, ops, placed(tied, places), places, spec)
    chat = list(range(3, 70))

    def serve(e: Engine) -> list[tuple[Any, ...]]:
        params = [
            replace(HOT, max_tokens=40, seed=s, stop_ids=tuple(range(0, VOCAB, 7))) for s in range(batch)
        ]
        found = served(e, *(e.submit(chat, p) for p in params))
        return found + served(e, e.submit([*chat, *found[0][0][67:], 5], GREEDY))

    in_each_way(model, serve, context=128, max_batch=batch)
    assert begun["ahead"] > 4


OTHERS = {
    "mixture": mixture_of(SPEC),
    "window": replace(SPEC, sliding_window=9, window_layers=(1,)),
    "scaled": replace(SPEC, embed_scale=2.5, logit_scale=0.3),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_other_models_get_the_same_in_each_way(
    kind: str, seed: int, stand_in: StandIn, begun: Counter[str]
) -> None:
    """Some layers' attention is on the CPU, some layers are divided: each turn has its own tasks."""
    spec = replace(OTHERS[kind], vocab_size=VOCAB, tied_head=True, max_context=64, eos_ids=(5, 50))
    places = placements.some(spec, seed) if seed else placements.whole(spec)
    places = replace(places, head="gpu:0")
    w = random_mixture(spec) if kind == "mixture" else random_weights(spec)
    model = Model(stand_in, gpu_ops(stand_in, spec), placed(w, places), places, spec)

    def serve(e: Engine) -> list[tuple[Any, ...]]:
        asked = [replace(HOT, seed=s, max_tokens=25) for s in range(2)]
        return served(e, *(e.submit(range(6, 26), p) for p in (*asked, GREEDY)))

    in_each_way(model, serve)
    assert begun["ahead"] > 4


@pytest.mark.parametrize(
    "changes",
    [{"logit_softcap": 30.0}, {"position": "learned"}, {"tied_head": False}],
    ids=["bounded logits", "learned positions", "an untied head"],
)
def test_where_a_step_needs_the_cpu_logits_go_to_ram(
    changes: dict[str, Any], stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    spec = replace(SPEC, **{"vocab_size": VOCAB, "tied_head": True, **changes})
    places = placements.whole(spec)
    model = bind(spec, placed(random_weights(spec), places), ops := gpu_ops(stand_in, spec))
    with caplog.at_level("DEBUG", logger="thermocline"):
        assert model.chooser is None and ops.chooser(spec, model.weights) is None
    assert "tokens are chosen on the CPU: " in caplog.text
