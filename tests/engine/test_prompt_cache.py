"""A prompt cache: what was computed once is found, in memory and after a restart, and no bit changes."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kept_twins
import pytest
from logged import logged
from recurrent_toy import recurrent_lab
from test_engine import Lab, native_lab, prompt, run
from toy import GREEDY, SPEC

from thermocline.convert.importer import pack
from thermocline.engine import kv_cache, state_pool
from thermocline.engine.engine import Engine
from thermocline.engine.kv_cache import BLOCK
from thermocline.engine.prompt_cache.cache import PromptCache, PromptCacheSettings
from thermocline.engine.prompt_cache.files import PromptFiles
from thermocline.engine.prompt_cache.memory import KeptText, prompt_cache_bytes
from thermocline.errors import UsageError
from thermocline.model.modes import PLAIN, CacheTypes, PromptCacheLimits
from thermocline.pack.pack import Pack
from thermocline.session import kept_prompts
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session

SHORT = dataclasses.replace(GREEDY, max_tokens=4)
LONG = dataclasses.replace(GREEDY, max_tokens=40)
SYSTEM = prompt(11, 150)
WINDOWED = dataclasses.replace(SPEC, sliding_window=40)
SPECS = {"dense": SPEC, "windows": WINDOWED, "some": dataclasses.replace(WINDOWED, window_layers=(0,))}


@pytest.fixture(scope="module")
def lab() -> Lab:
    return native_lab()


@pytest.fixture
def ending() -> Iterator[Callable[[Engine], Engine]]:
    """Close engines, whatever happens."""
    made: list[Engine] = []

    def note(e: Engine) -> Engine:
        made.append(e)
        return e

    yield note
    for e in made:
        e.close()


def on_disk(path: Path, limit: int = 1 << 28) -> PromptCacheSettings:
    found = PromptFiles.open(path, b"m" * 32, limit)
    assert found is not None
    return PromptCacheSettings(files=found)


def stored(path: Path) -> list[Path]:
    return sorted(p for p in path.glob("*/*") if not p.name.startswith("."))


# ---- twins of real families: each turn has the bits of a session that keeps nothing

FAMILIES = {
    "dense": "llama", "window": "mistral", "some windows": "gemma3", "sinks": "gpt_oss",
    "latent": "deepseek_v3", "shared keys": "gemma4_small", "deltanet": "qwen3_5", "mamba2": "nemotron_h",
    "conv": "lfm2",
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return packed(FAMILIES[request.param], tmp_path_factory.mktemp("twin"))


def packed(name: str, path: Path, format: str = "q8_0") -> Pack:
    hf = kept_twins.write(name, path / "hf")
    config = json.loads((hf / "config.json").read_text())
    (config if "max_position_embeddings" in config else config["text_config"])["max_position_embeddings"] = (
        512
    )
    (hf / "config.json").write_text(json.dumps(config))
    pack(hf, path / "pack", format)
    return Pack.open(path / "pack")


Turn = tuple[list[int], str, int]


def turns(
    model: Pack, options: EngineOptions, prompts: list[list[int]], *, restart: bool = False
) -> list[Turn]:
    """Answer prompts one after the other; -> tokens, hash of all logits, tokens taken from the cache."""
    found: list[Turn] = []
    session = Session.open(model, options)
    for ids in prompts:
        if restart:
            session.close()
            session = Session.open(model, options)
        e = session.load()
        r = e.submit(ids, LONG)
        run(e, r)
        found.append((r.token_ids, r.completion().figures.logits_hash, r.cached))
    session.close()
    return found


def conversation(model: Pack, options: EngineOptions) -> tuple[list[list[int]], list[Turn]]:
    """Two turns, the second with the first's answer; without what is kept of others."""
    top = model.spec.vocab_size - 4
    ids = [3 + i % (top - 3) for i in prompt(5, 90)]
    prompts, answers = [], []
    for new in (0, 40):
        ids = [*ids, *(3 + i % (top - 3) for i in prompt(new, new))]
        prompts.append(ids)
        answers += turns(model, options, [ids])
        ids = [*ids, *answers[-1][0]]
    return prompts, answers


OPTIONS = EngineOptions(context=256, max_batch=2, threads=2)


def test_every_turn_has_the_bits_of_the_uncached_run(model: Pack, tmp_path: Path) -> None:
    """In memory; from disk in a new session each turn; and beside a directory of the wrong bytes."""
    prompts, alone = conversation(model, OPTIONS)
    bits = [turn[:2] for turn in alone]
    assert [cached for *_, cached in alone] == [0, 0] and len(set(map(str, bits))) == 2
    ram = dataclasses.replace(OPTIONS, prompt_cache=0.01)
    disk = dataclasses.replace(OPTIONS, prompt_cache_dir=tmp_path / "d")
    inside = turns(model, ram, prompts)
    after = turns(model, disk, prompts, restart=True)
    assert [turn[:2] for turn in inside] == bits and [turn[:2] for turn in after] == bits
    assert [cached for *_, cached in inside] == [cached for *_, cached in after] == [0, *caches(prompts)]
    for path in stored(tmp_path / "d")[::2]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    again = turns(model, disk, prompts, restart=True)
    assert [turn[:2] for turn in again] == bits


def caches(prompts: list[list[int]]) -> list[int]:
    """Return what each turn finds of the one before it, whose last token was never computed."""
    answered = LONG.max_tokens
    assert answered is not None
    known = (len(ids) + answered - 1 for ids in prompts)
    return [min(n, len(ids) - 1) // BLOCK * BLOCK for n, ids in zip(known, prompts[1:], strict=False)]


# ---- restored


@pytest.mark.parametrize("name", SPECS)
def test_a_prompt_is_restored_after_a_restart(
    lab: Lab, name: str, tmp_path: Path, ending: Callable[[Engine], Engine]
) -> None:
    spec = SPECS[name]
    first = lab.engine(spec, prompts=on_disk(tmp_path))
    run(first, first.submit(SYSTEM, SHORT))
    first.close()
    e = ending(lab.engine(spec, prompts=on_disk(tmp_path)))
    ids = [[*SYSTEM, 7], [*SYSTEM[:100], 9], SYSTEM[:96], prompt(3, 20)]
    requests = [e.submit(x, SHORT) for x in ids]
    assert lab.answers(e, *requests) == [lab.alone(x, SHORT, spec=spec) for x in ids]
    assert [r.cached for r in requests] == [128, 96, 64, 0]
    counts = e.counts().disk
    assert counts is not None and counts.damaged == 0 and counts.read_bytes > 0
    assert counts.restored >= 1 and counts.tokens >= 128


def test_requests_that_begin_alike_read_it_once(
    lab: Lab, tmp_path: Path, ending: Callable[[Engine], Engine]
) -> None:
    first = lab.engine(prompts=on_disk(tmp_path))
    run(first, first.submit(SYSTEM, SHORT))
    first.close()
    e = ending(lab.engine(prompts=on_disk(tmp_path)))
    requests = [e.submit([*SYSTEM, i], SHORT) for i in range(4)]
    run(e, *requests)
    counts = e.counts().disk
    assert [r.cached for r in requests] == [128] * 4 and counts is not None
    assert (counts.restored, counts.tokens) == (1, 128)
    assert counts.read_bytes == 4 * e.kv.nbytes // e.kv.pools[0].n_blocks


def held(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> threading.Event:
    """Let calls of a method wait until the event is set."""
    go, method = threading.Event(), getattr(owner, name)

    def waits(*args: Any) -> Any:
        assert go.wait(60)
        return method(*args)

    monkeypatch.setattr(owner, name, waits)
    return go


def test_others_answer_while_a_prefix_is_read(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: Callable[[Engine], Engine]
) -> None:
    """The reading waits until another request has answered; nothing waits for the reading."""
    first = lab.engine(prompts=on_disk(tmp_path))
    run(first, first.submit(SYSTEM, SHORT))
    first.close()
    go = held(monkeypatch, PromptFiles, "sections")
    e = ending(lab.engine(prompts=on_disk(tmp_path)))
    waits, other = e.submit([*SYSTEM, 7], SHORT), e.submit(prompt(3, 20), SHORT)
    while other.finish_reason is None:
        e.step()
    assert waits.restore is not None and not waits.token_ids
    go.set()
    assert lab.answers(e, waits) == [lab.alone([*SYSTEM, 7], SHORT)] and waits.cached == 128


@pytest.mark.parametrize("name", SPECS)
def test_one_that_is_cancelled_while_it_is_read_leaks_nothing(
    lab: Lab, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: Callable[[Engine], Engine]
) -> None:
    """Its blocks are nobody's until no reader writes to them: the next one gets others, or waits."""
    spec = SPECS[name]
    first = lab.engine(spec, prompts=on_disk(tmp_path))
    run(first, first.submit(SYSTEM, SHORT))
    first.close()
    go = held(monkeypatch, PromptCache, "_filled")
    e = ending(lab.engine(spec, prompts=on_disk(tmp_path), context=192, kv_tokens=192))
    leaves = e.submit([*SYSTEM, 7], SHORT)
    e.step()
    assert leaves.restore is not None
    e.cancel(leaves)
    other = e.submit(prompt(3, 120), SHORT)
    for _ in range(3):
        e.step()
    go.set()
    assert lab.answers(e, other) == [lab.alone(prompt(3, 120), SHORT, spec=spec)]
    e.check_integrity()


def test_states_of_cancelled_requests_are_counted_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: Callable[[Engine], Engine]
) -> None:
    """There are six slots. Each of eight requests is cancelled while its state may still be written."""
    lab, prompts = recurrent_lab("deltanet"), [prompt(seed, 70) for seed in range(8)]
    first = lab.engine(prompts=on_disk(tmp_path))
    for ids in prompts:
        run(first, first.submit(ids, SHORT))
    first.close()
    go = held(monkeypatch, PromptCache, "_filled")
    e = ending(lab.engine(max_batch=1, kv_tokens=2048, prompts=on_disk(tmp_path)))
    for ids in prompts:
        leaves = e.submit(ids, SHORT)
        e.step()
        e.cancel(leaves)
    last = e.submit(prompts[7], SHORT)
    e.step()
    assert list(e.waiting) == [last]
    go.set()
    assert lab.answers(e, last) == [lab.alone(prompts[7], SHORT)] and last.cached == 64


# ---- what is wrong with a file


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 16
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def into_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


WRONG = {"flipped bit": flip, "truncated": truncate, "replaced": replace, "a directory": into_directory}


@pytest.mark.parametrize("which", [0, 2, 3])
@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("name", SPECS)
def test_a_wrong_file_is_never_used_and_its_text_computed_again(
    lab: Lab, name: str, what: str, which: int, tmp_path: Path, ending: Callable[[Engine], Engine]
) -> None:
    spec = SPECS[name]
    first = lab.engine(spec, prompts=on_disk(tmp_path))
    run(first, first.submit(SYSTEM, SHORT))
    blocks = list(first.kv.names(SYSTEM))
    first.close()
    (path,) = tmp_path.glob(f"*/{blocks[which].hex()}.k0")
    WRONG[what](path)
    e = ending(lab.engine(spec, prompts=on_disk(tmp_path)))
    request = e.submit([*SYSTEM, 7], SHORT)
    with logged() as lines:
        assert lab.answers(e, request) == [lab.alone([*SYSTEM, 7], SHORT, spec=spec)]
    needed = spec is not WINDOWED or which >= 2  # a window of 40 reaches over two blocks
    assert (request.cached < 128) == needed
    assert sum("computed again" in line for line in lines) == int(needed)
    counts = e.counts().disk
    assert counts is not None and counts.damaged == int(needed and what != "a directory")
    assert request.cached == (32 * which if needed and spec is SPEC else request.cached)
    e.close()
    if what != "a directory":  # what was found wrong is gone, and written anew
        later = ending(lab.engine(spec, prompts=on_disk(tmp_path)))
        again = later.submit([*SYSTEM, 7], SHORT)
        run(later, again)
        assert again.cached == 128


def test_a_wrong_file_beside_blocks_that_a_running_request_shares(
    lab: Lab, tmp_path: Path, ending: Callable[[Engine], Engine]
) -> None:
    """All 8 blocks are in use: 5 of one request, of which the other shares 4 and has 3 more."""
    long, other = [*SYSTEM[:128], *prompt(12, 90)], [*SYSTEM[:128], 7]
    first = lab.engine(prompts=on_disk(tmp_path))
    run(first, first.submit(long, SHORT))
    first.close()
    (path,) = tmp_path.glob(f"*/{list(first.kv.names(long))[5].hex()}.k0")
    flip(path)
    e = ending(lab.engine(kv_tokens=256, max_batch=2, prompts=on_disk(tmp_path)))
    runs = e.submit(other, dataclasses.replace(GREEDY, max_tokens=30))
    while not runs.token_ids:
        e.step()
    request = e.submit(long, SHORT)
    assert lab.answers(e, request) == [lab.alone(long, SHORT)] and request.cached == 160
    assert runs.finish_reason == "length"


def test_one_whose_blocks_others_took_waits_again_after_a_wrong_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: Callable[[Engine], Engine]
) -> None:
    """Without the state on disk it cannot share 2 blocks, and a third request has those that it had."""
    lab = recurrent_lab("deltanet")
    first = lab.engine(prompts=on_disk(tmp_path))
    run(first, first.submit(SYSTEM[:131], SHORT))
    first.close()
    (path,) = tmp_path.glob("*/*.s0")
    flip(path)
    go = held(monkeypatch, PromptCache, "_filled")
    e = ending(lab.engine(kv_tokens=320, max_batch=3, prompts=on_disk(tmp_path)))
    prompts = [[*SYSTEM[:64], *prompt(3, 40)], SYSTEM[:131], prompt(4, 40)]
    requests = [e.submit(prompts[0], LONG)]
    while not requests[0].token_ids:
        e.step()
    requests += [
        e.submit(prompts[1], SHORT),
        e.submit(prompts[2], dataclasses.replace(GREEDY, max_tokens=20)),
    ]
    while not requests[2].token_ids:
        e.step()
    go.set()
    stored, restore = e.prompt_cache, requests[1].restore
    assert stored is not None and restore is not None
    while not stored.over(restore):
        stored.wait()
    e.step()
    assert list(e.waiting) == requests[1:2] and requests[0].finish_reason is None
    assert lab.answers(e, *requests)[1] == lab.alone(prompts[1], SHORT)


def test_a_full_disk_is_one_line_and_answers_go_on(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: Callable[[Engine], Engine]
) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PromptFiles, "write", full)
    with logged() as lines:
        e = lab.engine(prompts=on_disk(tmp_path))
        request = e.submit(SYSTEM, SHORT)
        assert lab.answers(e, request) == [lab.alone(SYSTEM, SHORT)]
        e.close()
    assert ["not kept on disk" in line and "No space" in line for line in lines] == [True]


def test_a_block_that_is_taken_while_it_is_written_is_not_kept(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer holds no block. Here it is slow, and each block has become another's meanwhile."""
    wrote, go = PromptFiles.write, threading.Event()

    def slow(self: PromptFiles, text: bytes, part: str, sections: Any, *rest: Any) -> int:
        def late() -> Iterator[Any]:
            assert go.wait(60)
            yield from sections

        return wrote(self, text, part, late(), *rest)

    monkeypatch.setattr(PromptFiles, "write", slow)
    e = lab.engine(prompts=on_disk(tmp_path), context=160, kv_tokens=160)
    prompts = [prompt(seed, 150) for seed in range(3)]
    for ids in prompts:
        run(e, e.submit(ids, SHORT))
    go.set()
    e.close()
    monkeypatch.undo()
    e = lab.engine(prompts=on_disk(tmp_path))
    for ids in prompts:
        request = e.submit([*ids, 5], SHORT)
        assert lab.answers(e, request) == [lab.alone([*ids, 5], SHORT)]
    counts = e.counts().disk
    e.close()
    assert counts is not None and counts.damaged == 0


def test_of_a_text_larger_than_the_limit_the_beginning_stays(
    lab: Lab, tmp_path: Path, ending: Callable[[Engine], Engine]
) -> None:
    one = lab.engine().kv.nbytes // 64  # of a block, with its header: at most two of these
    first = lab.engine(prompts=on_disk(tmp_path, limit=4 * one))
    run(first, first.submit(SYSTEM, SHORT))
    first.close()
    e = ending(lab.engine(prompts=on_disk(tmp_path)))
    request = e.submit([*SYSTEM, 7], SHORT)
    run(e, request)
    assert 0 < request.cached < 128


# ---- header lines that change


def test_two_headers_are_held_at_once(lab: Lab, tmp_path: Path, ending: Callable[[Engine], Engine]) -> None:
    """After a token that differs every key differs, so each variant is kept by itself, and all are found."""
    variants = [[*prompt(seed, 40), *SYSTEM[:80]] for seed in range(4)]
    first = lab.engine(prompts=on_disk(tmp_path))
    for ids in variants:
        run(first, first.submit(ids, SHORT))
    first.close()
    e = ending(lab.engine(prompts=on_disk(tmp_path)))
    requests = [e.submit([*ids, 5], SHORT) for ids in variants]
    assert lab.answers(e, *requests) == [lab.alone([*ids, 5], SHORT) for ids in variants]
    assert [r.cached for r in requests] == [96] * 4


# ---- memory


@pytest.mark.parametrize("mib", [0.1, 1, 7.3])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "qwen3_5", "deepseek_v3", "gemma4_small"])
def test_the_memory_is_what_was_promised(name: str, mib: float, tmp_path: Path) -> None:
    model, sizes = packed(name, tmp_path), list[int]()
    spec = model.spec
    for gib in (0.0, mib / 1024):
        options = dataclasses.replace(OPTIONS, prompt_cache=gib)
        with Session.open(model, options) as session:
            e, parts = session.load(), session.placement.bytes["cpu"]
            states = 0 if e.kv.states is None else e.kv.states.nbytes
            sizes.append(e.kv.nbytes + states)
            planned = parts["keys and values"] + parts.get("recurrent states", 0)
            assert sizes[-1] == planned + parts.get("prompt cache", 0)
    kept = KeptText.within(spec, PromptCacheLimits(int(mib * 2**20)))
    assert sizes[1] - sizes[0] == kept.nbytes(spec) <= mib * 2**20
    assert KeptText.of_text(spec, kept.blocks + 1).nbytes(spec) > mib * 2**20


def test_what_passes_to_a_disk_is_counted(tmp_path: Path) -> None:
    assert prompt_cache_bytes(SPEC, PromptCacheLimits(0, "d")) == 5 * (1 << 20)
    with pytest.raises(UsageError, match="--prompt-cache 1e-06: 32 tokens of this model take more; give at"):
        prompt_cache_bytes(SPEC, PromptCacheLimits(1074))


def test_conversations_beyond_the_context_stay_in_memory(lab: Lab) -> None:
    """Of three conversations, one has room in the cache of running requests."""
    talks = [prompt(seed, 150) for seed in range(3)]
    cached = {}
    for blocks in (0, 15):
        e = lab.engine(
            context=160, kv_tokens=160, prompts=PromptCacheSettings(KeptText.of_text(SPEC, blocks))
        )
        for ids in talks:
            run(e, e.submit(ids, SHORT))
        again = [e.submit([*ids, 5], SHORT) for ids in talks[:1]]
        assert lab.answers(e, *again) == [lab.alone([*talks[0], 5], SHORT)]
        cached[blocks] = again[0].cached
    assert cached == {0: 0, 15: 128}


@pytest.mark.parametrize("name", ["windows", "some"])
def test_a_long_prompt_leaves_other_conversations_their_last_window(lab: Lab, name: str) -> None:
    """A window passes many blocks, which would else be the ones used last."""
    spec = SPECS[name]
    kept = PromptCacheSettings(KeptText(14, 4))
    e = lab.engine(spec, context=224, kv_tokens=224, prefill_chunk=32, prompts=kept)
    talk, long = prompt(1, 150), prompt(2, 200)
    run(e, e.submit(talk, SHORT))
    run(e, e.submit(long, SHORT))
    again = e.submit([*talk, 5], SHORT)
    assert lab.answers(e, again) == [lab.alone([*talk, 5], SHORT, spec=spec)] and again.cached == 128


def test_states_are_kept_in_the_midst_of_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: Callable[[Engine], Engine]
) -> None:
    """Of two agents' conversations after a restart, the second begins where a checkpoint is."""
    for module in (kv_cache, state_pool):
        monkeypatch.setattr(module, "CHECKPOINT_TOKENS", 64)
    lab = recurrent_lab("deltanet")
    first = lab.engine(prompts=on_disk(tmp_path))
    run(first, first.submit(SYSTEM, SHORT))
    first.close()
    e = ending(lab.engine(prompts=on_disk(tmp_path)))
    ids = [[*SYSTEM, 7], [*SYSTEM[:100], 9]]
    requests = [e.submit(x, SHORT) for x in ids]
    assert lab.answers(e, *requests) == [lab.alone(x, SHORT) for x in ids]
    assert [r.cached for r in requests] == [128, 64]


# ---- what is refused


@pytest.mark.parametrize(
    "options, says",
    [
        ({"prompt_cache_dir": "d", "sparsity": "predict"}, "--prompt-cache-dir with --sparsity predict"),
        ({"prompt_cache_dir": "d", "read_budget": 1.0}, "--prompt-cache-dir with --read-budget"),
        ({"prompt_cache": -1.0}, "prompt_cache is -1.0; it must be 0 to 1e\\+06 GiB"),
        ({"prompt_cache_disk": 0.0}, "prompt_cache_disk is 0.0; it must be 0.001 to 1e\\+06 GiB"),
    ],
)
def test_what_cannot_be_kept_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        EngineOptions(**options)


def test_the_key_differs_where_a_bit_may(tmp_path: Path) -> None:
    keys = []
    for name in ("llama", "mistral"):
        model = packed(name, tmp_path / name)
        keys += [kept_prompts.key(model, 256, PLAIN), kept_prompts.key(model, 256, CacheTypes("f16", "q8_0"))]
        assert kept_prompts.key(model, 128, PLAIN) == keys[-2]
    keys.append(kept_prompts.key(packed("llama", tmp_path / "x", "q4_0"), 256, PLAIN))
    assert len(set(keys)) == 5 and {len(key) for key in keys} == {32}
