"""Several models within one budget, without processes: who is loaded, who makes room, who waits for whom."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import several
from several import MIB, LoadingEngine, Machine, new_machine

from thermocline.errors import BadFile, UsageError
from thermocline.server.api.models.registered import Loading, RegisteredModel
from thermocline.server.api.models.registry import Registry
from thermocline.server.api.models.served import ServedModel
from thermocline.server.http.refusal import Refusal
from thermocline.server.process import engine_process
from thermocline.server.process.engine_process import WRITE_S, EngineCrashed, EngineProcess
from thermocline.session.options import EngineOptions, ModelOptions


class Opened:
    """As much of a `ServedModel` as the registry looks at."""

    def __init__(self, found: object, name: str, engine: LoadingEngine, defaults: object) -> None:
        self.engine = engine

    def close(self) -> None:
        pass


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(ServedModel, "of", staticmethod(Opened))
    return new_machine(monkeypatch)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name in "abc":
        (tmp_path / f"{name}.gguf").write_bytes(name.encode())
    return tmp_path


def told(
    story: Callable[[Registry], Awaitable[None]],
    directory: Path,
    budget: int,
    *,
    most: int = 9,
    drain_s: float = 60.0,
    default: str | None = None,
    prompts: Path | None = None,
) -> None:
    """Tell the story of a registry with so many bytes for models."""

    async def main() -> None:
        options = EngineOptions(ram=(budget + MIB) / 2**30, prompt_cache_dir=prompts)
        how = Loading(options, {}, 60.0, drain_s, beside=MIB, most=most)
        registry = Registry(how, directory, ModelOptions(model=default))
        registry.start()
        try:
            await asyncio.wait_for(story(registry), 60)
        finally:
            await registry.stop(0)
            registry.close()
        assert not several.MACHINE.taken and registry.held_bytes == 0

    asyncio.run(main())


async def used(r: Registry, name: str, rounds: int = 3) -> str:
    """Use a model for a while. Return the name of the one that was given."""
    return await held(r, await r.find(name), rounds)


async def held(r: Registry, m: RegisteredModel, rounds: int = 3) -> str:
    model = await r.take(m)
    try:
        for _ in range(rounds):
            await asyncio.sleep(0)
            assert m.state in ("loaded", "unloading") and m.model is model
        return Path(str(model.engine.files.model)).stem
    finally:
        r.give_back(m)


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come about")


def test_two_models_in_a_budget_for_one_take_turns_and_no_request_is_lost(
    machine: Machine, models: Path
) -> None:
    async def story(r: Registry) -> None:
        asked = [await r.find(name) for name in "ab"] * 40
        assert await asyncio.gather(*(held(r, m) for m in asked)) == ["a", "b"] * 40
        assert machine.most_loaded == 1 and machine.most_taken == MIB
        assert machine.loads == ["a.gguf", "b.gguf"], "all that wait for a model are served by one load"
        for name in "abab":
            assert await used(r, name) == name
        assert machine.loads == ["a.gguf", "b.gguf"] + ["a.gguf", "b.gguf"] * 2

    told(story, models, MIB)


def test_the_least_recently_used_makes_room_and_one_that_works_comes_last(
    machine: Machine, models: Path
) -> None:
    async def story(r: Registry) -> None:
        for name in "aba":
            await used(r, name)
        await used(r, "c")
        assert sorted(machine.taken) == ["a.gguf", "c.gguf"]
        a = await r.find("a")
        await r.take(a)
        await used(r, "c")
        await used(r, "b")
        assert sorted(machine.taken) == ["a.gguf", "b.gguf"], "c was used last, but nobody uses it now"
        r.give_back(a)
        assert machine.most_taken == 2 * MIB and r.held_bytes == 2 * MIB

    told(story, models, 2 * MIB)


def test_a_model_that_makes_room_has_time_to_write_its_prompts(
    machine: Machine, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    unload = LoadingEngine.unload

    def noted(self: LoadingEngine, grace_s: float) -> Awaitable[None]:
        given.append(grace_s)
        return unload(self, grace_s)

    async def story(r: Registry) -> None:
        await used(r, "a")
        await used(r, "b")
        assert given == [WRITE_S]

    monkeypatch.setattr(LoadingEngine, "unload", noted)
    told(story, models, MIB, prompts=tmp_path)


def test_a_count_bounds_models_too_and_a_large_one_unloads_several(machine: Machine, models: Path) -> None:
    machine.needs["c.gguf"] = 3 * MIB

    async def counted(r: Registry) -> None:
        for name in "abab":
            await used(r, name)
        assert machine.most_loaded == 1

    async def large(r: Registry) -> None:
        for name in "abc":
            await used(r, name)
        assert list(machine.taken) == ["c.gguf"] and r.unloads == 2

    told(counted, models, 9 * MIB, most=1)
    told(large, models, 3 * MIB)


def test_a_model_in_use_is_unloaded_after_its_last_answer_and_those_that_come_meanwhile_wait(
    machine: Machine, models: Path
) -> None:
    async def story(r: Registry) -> None:
        a = await r.find("a")
        await r.take(a)
        other = asyncio.create_task(used(r, "b"))
        await until(lambda: a.state == "unloading")
        late = asyncio.create_task(used(r, "a"))
        await asyncio.sleep(0.02)
        assert not other.done() and not late.done() and list(machine.taken) == ["a.gguf"]
        r.give_back(a)
        assert (await other, await late) == ("b", "a")
        assert machine.loads == ["a.gguf", "b.gguf", "a.gguf"] and machine.most_loaded == 1

    told(story, models, MIB)


def test_a_request_that_does_not_end_is_waited_for_so_long_only(machine: Machine, models: Path) -> None:
    async def story(r: Registry) -> None:
        a = await r.find("a")
        model = await r.take(a)
        assert await used(r, "b") == "b"
        with pytest.raises(EngineCrashed):
            EngineProcess.submit(model.engine, [])
        r.give_back(a)

    told(story, models, MIB, drain_s=0.02)


def test_a_model_that_nobody_waits_for_any_more_is_not_loaded(machine: Machine, models: Path) -> None:
    machine.slow.add("a.gguf")

    async def story(r: Registry) -> None:
        first = asyncio.create_task(used(r, "a"))
        await until(lambda: bool(machine.taken))
        queued = asyncio.create_task(used(r, "b"))
        await asyncio.sleep(0.01)
        queued.cancel()
        first.cancel()
        await until(lambda: not machine.taken)
        assert (await r.find("a")).state == "unloaded"
        assert machine.began == ["a.gguf"], "b left before its turn"
        machine.slow.clear()
        assert await used(r, "a") == "a"

    told(story, models, MIB)


def test_a_request_that_comes_while_a_load_is_given_up_is_not_lost(machine: Machine, models: Path) -> None:
    machine.slow.add("a.gguf")

    async def story(r: Registry) -> None:
        a = await r.find("a")
        first = asyncio.create_task(held(r, a))
        await until(lambda: bool(machine.taken))
        first.cancel()
        await asyncio.sleep(0)
        machine.slow.clear()
        assert await asyncio.wait_for(held(r, a), 20) == "a" and machine.began == ["a.gguf"] * 2

    told(story, models, MIB)


def test_one_that_leaves_does_not_end_the_load_that_others_wait_for(machine: Machine, models: Path) -> None:
    machine.slow.add("a.gguf")

    async def story(r: Registry) -> None:
        a = await r.find("a")
        leaves, stays = (asyncio.create_task(held(r, a)) for _ in range(2))
        await until(lambda: bool(machine.taken))
        leaves.cancel()
        await asyncio.sleep(0.01)
        machine.go()
        assert await stays == "a" and machine.began == ["a.gguf"]

    told(story, models, MIB)


def test_a_victim_stays_when_the_request_for_its_memory_leaves(machine: Machine, models: Path) -> None:
    async def story(r: Registry) -> None:
        a = await r.find("a")
        await r.take(a)
        other = asyncio.create_task(used(r, "b"))
        await until(lambda: a.state == "unloading")
        late = asyncio.create_task(used(r, "a"))
        await asyncio.sleep(0.01)
        other.cancel()
        assert await late == "a", "it does not wait for the requests that use it"
        r.give_back(a)
        assert a.state == "loaded" and machine.loads == ["a.gguf"] and r.unloads == 0
        assert await used(r, "b") == "b"

    told(story, models, MIB)


def test_a_file_that_is_wrong_unloads_nothing_and_is_not_opened_again_until_it_changes(
    machine: Machine, models: Path
) -> None:
    machine.broken["b.gguf"] = 1

    async def story(r: Registry) -> None:
        await used(r, "a")
        for _ in range(3):
            with pytest.raises(BadFile, match=r"b\.gguf is broken"):
                await used(r, "b")
        assert machine.began == ["a.gguf", "b.gguf"] and list(machine.taken) == ["a.gguf"]
        assert await used(r, "c") == "c", "the queue goes on"
        (models / "b.gguf").write_bytes(b"mended")
        assert await used(r, "b") == "b"

    told(story, models, MIB)


def test_an_engine_that_crashes_while_it_loads_is_started_again_within_its_share(
    machine: Machine, models: Path
) -> None:
    machine.crashes["a.gguf"] = 2

    async def story(r: Registry) -> None:
        assert await used(r, "a") == "a"
        assert machine.began == ["a.gguf"] * 3
        machine.crashes["b.gguf"] = 3
        with pytest.raises(EngineCrashed, match="3 times in a row"):
            await used(r, "b")
        assert r.held_bytes == 0 and await used(r, "b") == "b", "the next request tries once more"

    told(story, models, MIB)


def test_an_engine_that_ends_for_good_is_loaded_again_for_the_next_request(
    machine: Machine, models: Path
) -> None:
    async def story(r: Registry) -> None:
        await used(r, "a")
        machine.crashes["a.gguf"] = 9
        a = await r.find("a")
        a.engine.kill()
        await until(lambda: a.state == "unloaded")
        assert r.held_bytes == 0 and not machine.taken
        machine.crashes.clear()
        assert await used(r, "a") == "a"

    told(story, models, MIB)


def test_whatever_comes_and_goes_no_byte_is_above_the_budget(
    machine: Machine, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 requests at random: some leave, engines are killed, files are wrong for a while."""
    monkeypatch.setattr(engine_process, "CRASHES", 10**6)
    rng = random.Random(7)
    machine.needs |= {"a.gguf": 2 * MIB, "b.gguf": 3 * MIB, "c.gguf": MIB}

    async def story(r: Registry) -> None:
        async def one() -> str | None:
            await asyncio.sleep(rng.random() / 4)
            name = rng.choice("abc")
            task = asyncio.create_task(used(r, name, rng.randrange(30)))
            if (dice := rng.random()) < 0.2:
                await asyncio.sleep(rng.random() / 50)
                task.cancel()
            elif dice < 0.4:
                killed = r.models[rng.choice("abc")].engine
                if Path(str(killed.files.model)).name in machine.taken:
                    killed.kill()
            await asyncio.wait({task})
            if task.cancelled():
                return None
            assert r.held_bytes <= r.budget_bytes
            assert task.result() == name
            return name

        done = await asyncio.gather(*(one() for _ in range(500)))
        assert len([d for d in done if d]) > 300
        assert all(m.leases == 0 and not m.is_wanted for m in r.models.values())

    told(story, models, 4 * MIB, most=2)
    assert machine.most_taken <= 4 * MIB and machine.most_loaded <= 2


def test_the_default_is_a_name_or_a_path_and_without_one_a_request_has_to_say(
    machine: Machine, models: Path, tmp_path: Path
) -> None:
    async def named(r: Registry) -> None:
        assert (await r.find(None)).name == "b" and len(r.models) == 3
        await until(lambda: machine.loads == ["b.gguf"])

    async def nothing(r: Registry) -> None:
        with pytest.raises(Refusal, match="'a', 'b', 'c'") as refused:
            await r.find(None)
        assert refused.value.status == 400
        for name in "ab":
            (models / f"{name}.gguf").unlink()
        assert (await r.find(None)).name == "c", "the only one"

    told(named, models, MIB, default="b")
    machine.loads.clear()
    told(named, models, MIB, default=str(models / "b.gguf"))
    elsewhere = tmp_path.with_name("elsewhere")
    elsewhere.mkdir()
    (elsewhere / "a.gguf").touch()
    with pytest.raises(UsageError, match="--alias"):
        told(named, models, MIB, default=str(elsewhere / "a.gguf"))
    told(nothing, models, MIB)


def test_what_is_loaded_stays_what_it_was_and_what_is_gone_is_noticed(machine: Machine, models: Path) -> None:
    async def story(r: Registry) -> None:
        await used(r, "a")
        (models / "a.gguf").unlink()
        (models / "d.gguf").touch()
        assert await used(r, "d") == "d" and await used(r, "a") == "a", "it is still in memory"
        await used(r, "c")
        await used(r, "b")
        with pytest.raises(Refusal, match="no model 'a' here, but 'b', 'c', 'd'"):
            await r.find("a")

    told(story, models, 2 * MIB)


def test_a_budget_without_room_for_a_model_is_refused_at_once(models: Path) -> None:
    with pytest.raises(UsageError, match="--ram"):
        told(_nothing, models, -MIB // 2)


async def _nothing(r: Registry) -> None:
    raise AssertionError


def test_a_wait_that_is_cancelled_as_it_ends_gives_the_model_back(machine: Machine, models: Path) -> None:
    async def story(r: Registry) -> None:
        a: RegisteredModel = await r.find("a")
        machine.slow.add("a.gguf")
        waits = asyncio.create_task(r.take(a))
        await until(lambda: bool(machine.taken))
        machine.go()
        await until(lambda: a.leases == 1)
        waits.cancel()
        await asyncio.wait({waits})
        if waits.cancelled():
            assert a.leases == 0 and a.idle.is_set()
        else:
            r.give_back(a)

    told(story, models, MIB)
