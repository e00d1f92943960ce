"""A prompt cache beside a GPU: what lies on the device goes to RAM and disk, and comes back as it was."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from pathlib import Path
from typing import Any, cast

import fake_cuda
import placements
import pytest
import torch
from logged import logged
from test_engine import prompt, run
from test_gpu import gpu_ops, pack_of, stand_in, storage
from test_prompt_cache import OPTIONS, packed
from toy import GREEDY

from thermocline import LLM
from thermocline.engine.engine import Engine, EngineSettings
from thermocline.engine.kv_cache import BLOCK
from thermocline.engine.prompt_cache.cache import NO_PROMPTS, PromptCacheSettings
from thermocline.engine.prompt_cache.copies import PromptCopies
from thermocline.engine.prompt_cache.files import PromptFiles
from thermocline.engine.prompt_cache.memory import READERS, KeptText, prompt_cache_bytes, section_bytes
from thermocline.engine.sampler import SamplingParams
from thermocline.errors import DeviceFailure
from thermocline.machine import gpu_speed, this_machine
from thermocline.machine.tiers import read_tiers
from thermocline.model.modes import PLAIN, PromptCacheLimits
from thermocline.model.spec import ModelSpec
from thermocline.ops.device import StandIn
from thermocline.ops.device_places import DevicePlaces
from thermocline.ops.device_rows import Kernels
from thermocline.ops.gpu import GpuOps
from thermocline.ops.interface import Weights
from thermocline.ops.kernels import torch_kernels
from thermocline.pack.pack import Pack
from thermocline.plan.placement import Placement
from thermocline.session import gpu, gpu_loading, gpu_weights, kept_prompts
from thermocline.session.gpu import OpenGpu
from thermocline.session.gpu_tier import Gpus
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session

pytestmark = pytest.mark.oracle
__all__ = ["stand_in"]  # a fixture
FAMILIES = {"pages": "llama", "windows": "gemma3", "latents": "deepseek_v3", "states": "qwen3_5"}
SHORT = dataclasses.replace(GREEDY, max_tokens=4)
ON_GPU = dataclasses.replace(OPTIONS, gpu="stand-in")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose speeds are known, so that nothing is measured; one thread of torch's: equal bits."""
    torch.set_num_threads(1)
    known = read_tiers("rtx4090-i9-13900k")
    kernels = known.cpu.kernels | {"f32": known.cpu.kernels["f16"]}
    here = dataclasses.replace(
        known, gpu=None, cpu=dataclasses.replace(known.cpu, threads=2, kernels=kernels)
    )
    monkeypatch.setattr(this_machine, "tiers_here", lambda *_, **__: here)


Turn = tuple[list[int], str, int]


def turns(model: Pack, options: EngineOptions, *prompts: list[int], restart: bool = False) -> list[Turn]:
    """Answer prompts one after the other; -> tokens, hash of all logits, tokens taken from the cache."""
    found: list[Turn] = []
    for group in [[ids] for ids in prompts] if restart else [prompts]:
        with Session.open(model, options) as session:
            for ids in group:
                e = session.load()
                r = e.submit(ids, SHORT)
                run(e, r)
                found.append((r.token_ids, r.completion().figures.logits_hash, r.cached))
    return found


def conversation(model: Pack) -> tuple[list[int], list[int]]:
    """Two prompts, of which the second goes on from the first."""
    top = model.spec.vocab_size - 4
    first, more = ([3 + i % (top - 3) for i in prompt(n, n)] for n in (90, 20))
    return first, [*first, *more]


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_turn_after_a_restart_has_the_bits_of_one_whose_prefix_stayed(kind: str, tmp_path: Path) -> None:
    model = packed(FAMILIES[kind], tmp_path)
    prompts = conversation(model)
    stayed = turns(model, ON_GPU, *prompts)
    assert [cached for *_, cached in stayed] == [0, 64]
    kept = dataclasses.replace(ON_GPU, prompt_cache_dir=tmp_path / "d")
    assert turns(model, kept, *prompts, restart=True) == stayed


def test_prompts_of_another_placement_are_computed_again(tmp_path: Path) -> None:
    """Each placement has its own: the CPU's prompts are not a GPU's, nor the other way round."""
    model = packed("llama", tmp_path)
    ids, _ = conversation(model)
    here, there = (dataclasses.replace(o, prompt_cache_dir=tmp_path / "d") for o in (OPTIONS, ON_GPU))
    for options, cached, lines in ((here, 0, 0), (there, 0, 1), (there, 64, 0), (here, 64, 0)):
        with logged() as said:
            ((*_, found),) = turns(model, options, ids)
        assert found == cached
        assert sum("another split between CPU and GPU" in line for line in said) == lines


def test_ram_and_what_passes_to_the_device_are_planned(tmp_path: Path) -> None:
    model = packed("llama", tmp_path)
    limits = PromptCacheLimits(1 << 20)
    with Session.open(model, dataclasses.replace(ON_GPU, prompt_cache=1 / 1024)) as session:
        planned, cache = session.placement.bytes["cpu"]["prompt cache"], session.load().prompt_cache
        assert cache is not None
        (copies,) = cache._stores
    assert isinstance(copies, PromptCopies)
    assert copies.limit_bytes == KeptText.within(model.spec, limits).nbytes(model.spec)
    assert planned == copies.limit_bytes + (READERS + 1) * section_bytes(model.spec)
    assert planned == prompt_cache_bytes(model.spec, limits, gpu=True)


def test_every_split_has_a_key_of_its_own(tmp_path: Path, stand_in: StandIn) -> None:
    model = packed("llama", tmp_path)
    gpus, spec = Gpus((OpenGpu(stand_in, cast(Kernels, torch_kernels), 0),), 1), model.spec
    places = [placements.every(spec, attention, False, n) for attention in (True, False) for n in (8, 16)]
    by = [gpu_loading.computed_by(p, gpus) for p in places]
    keys = {kept_prompts.key(model, 256, PLAIN, x) for x in (kept_prompts.ON_CPU, None, *by)}
    assert len(keys) == 6
    larger = dataclasses.replace(places[0], context=7, kv_tokens=9, bytes={"cpu": {"head": 1}})
    assert gpu_loading.computed_by(larger, gpus) == by[0], "which changes no bit"


# ---- engines whose layers are divided: pages of the first and last on the device, of the second in RAM


@dataclasses.dataclass
class Divided:
    """An engine's parts."""

    device: StandIn
    ops: GpuOps
    weights: Weights
    places: Placement
    spec: ModelSpec

    def engine(self, **prompts: Any) -> Engine:
        """Return one with room for one request, whose prompts are computed in whole blocks."""
        own = PromptCacheSettings(places=DevicePlaces(self.ops), **prompts) if prompts else NO_PROMPTS
        self.ops.forget()
        settings = EngineSettings(160, 1, prefill_chunk=BLOCK, prompts=own)
        return Engine(self.spec, self.weights, self.ops, settings, storage=storage(self.places, self.device))


@pytest.fixture
def divided(tmp_path: Path, stand_in: StandIn) -> Divided:
    tied = {"tie_word_embeddings": True, "max_position_embeddings": 256}
    pack = pack_of(tmp_path, "f32", **tied)
    there = ((True, 512), (False, 96), (True, 512))
    each = tuple(placements.layer(pack.spec, attention, False, n) for attention, n in there)
    places, ops = Placement(each, "gpu:0"), gpu_ops(stand_in, pack.spec)
    made = gpu_weights.load(pack, places, (stand_in,), ops.cpu)
    return Divided(stand_in, ops, made, places, pack.spec)


def answer(e: Engine, ids: list[int], params: SamplingParams = SHORT) -> Turn:
    r = e.submit(ids, params)
    run(e, r)
    return r.token_ids, r.completion().figures.logits_hash, r.cached


TEXTS = [prompt(seed, 120) for seed in range(3)]


def on_disk(path: Path) -> PromptFiles:
    found = PromptFiles.open(path, b"m" * 32, 1 << 28)
    assert found is not None
    return found


def kept(e: Engine, copies: PromptCopies, ids: list[int]) -> None:
    """Wait until a text's blocks have copies."""
    names = list(e.kv.names(ids))
    for _ in range(60_000):
        if all(copies.has(name, "k0") for name in names):
            return
        time.sleep(0.001)
    raise AssertionError("they are not kept")


def test_what_left_the_device_comes_back_from_ram_with_the_uncached_bits(divided: Divided) -> None:
    alone = [answer(divided.engine(), [*ids, 5])[:2] for ids in TEXTS]
    block = divided.engine().kv.nbytes // 5
    copies = PromptCopies(9 * block)
    e = divided.engine(copies=copies)
    for ids in TEXTS:
        assert answer(e, ids)[2] == 0
        kept(e, copies, ids)
    found = [answer(e, [*ids, 5]) for ids in TEXTS]
    e.close()
    assert copies.nbytes == 9 * block
    assert found == [(*turn, 96) for turn in alone]


def stored(divided: Divided, directory: Path) -> tuple[list[int], str]:
    """Keep the first text in a directory; -> tokens and hash of its next turn, uncached."""
    alone = answer(divided.engine(), [*TEXTS[0], 5])[:2]
    first = divided.engine(files=on_disk(directory))
    answer(first, TEXTS[0])
    first.close()
    return alone


def test_a_restore_that_is_broken_off_names_nothing(
    divided: Divided, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device fails amid it: the session is told, and files stay. Another request is served from them."""
    alone = stored(divided, tmp_path / "d")
    e, true, calls = divided.engine(files=on_disk(tmp_path / "d")), DevicePlaces.put, Counter[str]()

    def broken(self: DevicePlaces, *args: Any) -> None:
        calls["put"] += 1
        if calls["put"] == 4:
            raise DeviceFailure("planted")
        true(self, *args)

    monkeypatch.setattr(DevicePlaces, "put", broken)
    request = e.submit([*TEXTS[0], 5], SHORT)
    with pytest.raises(DeviceFailure, match="planted"):
        run(e, request)
    assert not any(name in pool for pool in e.kv.pools for name in e.kv.names(TEXTS[0]))
    e.cancel(request)
    assert answer(e, [*TEXTS[0], 5]) == (*alone, 96)
    e.close()


def test_a_step_that_was_given_up_ends_before_its_block_is_read_into(
    divided: Divided, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer ends at a stop token while its next step, which is slow, still writes to what is free now."""
    alone = stored(divided, tmp_path / "d")
    long = dataclasses.replace(SHORT, max_tokens=12, ignore_eos=False)
    tokens, *_ = answer(divided.engine(), TEXTS[1][:9], long)
    e, true, slow = divided.engine(files=on_disk(tmp_path / "d")), torch_kernels.rope_store, list[float]()

    def store(*args: Any) -> None:
        time.sleep(sum(slow))
        true(*args)

    monkeypatch.setattr(torch_kernels, "rope_store", store)
    at = next(i for i in range(4, 12) if tokens[i] not in tokens[:i])
    ends = e.submit(TEXTS[1][:9], dataclasses.replace(long, stop_ids=(tokens[at],)))
    while len(ends.token_ids) < at:
        e.step()
    slow.append(0.05)
    run(e, ends)
    assert ends.finish_reason == "stop" and divided.ops._under_way, "a step was given up"
    request = e.submit([*TEXTS[0], 5], SHORT)
    e.step()
    slow.clear()
    run(e, request)
    e.close()
    assert (request.token_ids, request.completion().figures.logits_hash, request.cached) == (*alone, 96)


# ---- a card


def test_a_card_takes_back_what_it_gave(
    tiny_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of `Cuda`'s Python, over a card whose queues run when somebody looks."""
    fake_cuda.install(monkeypatch, fake_cuda.Card(order="last stream first"))
    fast = dataclasses.replace(gpu.PRETENDED, vram_bytes=1 << 30)
    monkeypatch.setattr(gpu_speed, "gpu_tier", lambda *_: fast)
    how: dict[str, Any] = {"gpu": "0", "context": 128, "max_batch": 2, "threads": 2}
    found = []
    for _ in range(2):
        with LLM(tiny_pack, prompt_cache_dir=tmp_path / "d", prompt_cache=0.01, **how) as llm:
            made = llm.generate("Once upon a time " * 5, SHORT)
            found.append((made.token_ids, made.figures.cached_tokens))
            assert made.figures.prompt_tokens > 64
    (tokens, none), again = found
    assert again == (tokens, 64) and none == 0
