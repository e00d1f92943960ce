"""The KV cache shares exactly what is equal, forgets the least recently used, and never loses a block."""

from __future__ import annotations

import random

import pytest

from thermocline.engine.kv_cache import BLOCK, BlockTable, KVCache, blocks_for, bytes_for
from thermocline.model.spec import ModelSpec

SPEC = ModelSpec(
    architecture="test",
    dim=8,
    ffn_dim=8,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    head_dim=4,
    vocab_size=16,
    max_context=64,
    norm="rms",
    norm_eps=1e-5,
    activation="relu",
)


def fill(kv: KVCache, ids: list[int]) -> BlockTable:
    """Open, grow and seal `ids`, as a request that computes all of them does."""
    table = kv.open(ids)
    assert kv.grow(table, len(ids))
    kv.seal(table, ids, len(ids))
    return table


def test_storage_is_what_bytes_for_says() -> None:
    kv = KVCache(SPEC, n_blocks=3)
    assert kv.nbytes == bytes_for(SPEC, 3 * BLOCK)
    assert kv.layer(1).k.shape == (3, 4, BLOCK)
    assert kv.layer(1).v.shape == (3, BLOCK, 4)
    assert kv.layer(0).k.ctypes.data % 64 == kv.layer(0).v.ctypes.data % 64 == 0


def test_a_layer_is_a_view_not_a_copy() -> None:
    kv = KVCache(SPEC, n_blocks=2)
    kv.layer(1).v[0, 5] = 7
    assert (kv.layer(1).v[0, 5] == 7).all() and not kv.layer(0).v.any()


def test_blocks_for_rounds_up() -> None:
    assert [blocks_for(n, 32) for n in (0, 1, 32, 33)] == [0, 1, 1, 2]


def test_the_same_beginning_shares_full_blocks_only() -> None:
    kv = KVCache(SPEC, n_blocks=8, block=4)
    a = fill(kv, list(range(10)))
    b = kv.open([*range(10), 99])
    assert b.held[0].blocks == a.held[0].blocks[:2] and b.sealed == 2
    kv.check_integrity()


def test_the_last_token_is_always_computed() -> None:
    kv = KVCache(SPEC, n_blocks=8, block=4)
    fill(kv, list(range(8)))
    assert (
        kv.open(list(range(8))).sealed == 1
    )  # its logits are wanted, so its block is not taken from the cache
    assert kv.open(list(range(9))).sealed == 2


def test_equal_blocks_after_different_beginnings_are_not_shared() -> None:
    kv = KVCache(SPEC, n_blocks=8, block=2)
    fill(kv, [1, 1, 5, 5])
    fill(kv, [2, 2])
    assert kv.open([2, 2, 5, 5, 0]).sealed == 1


def test_a_released_prefix_is_found_again() -> None:
    kv = KVCache(SPEC, n_blocks=4, block=2)
    table = fill(kv, [1, 2, 3, 4, 5])
    blocks = list(table.held[0].blocks)
    kv.close(table)
    assert kv.used == 0 and kv.pools[0].available == 4
    assert kv.open([1, 2, 3, 4, 9]).held[0].blocks == blocks[:2]
    kv.check_integrity()


def test_the_end_of_the_oldest_sequence_is_evicted_first() -> None:
    kv = KVCache(SPEC, n_blocks=4, block=2)
    for ids in ([1, 1, 2, 2], [3, 3, 4, 4]):
        kv.close(fill(kv, ids))
    kv.close(fill(kv, [5, 5]))
    assert kv.open([1, 1, 2, 2, 0]).sealed == 1
    assert kv.open([3, 3, 4, 4, 0]).sealed == 2
    kv.check_integrity()


def test_a_child_of_an_evicted_block_is_never_found() -> None:
    kv = KVCache(SPEC, n_blocks=3, block=2)
    child = fill(kv, [1, 1, 2, 2])
    parent = child.held[0].blocks[0]
    kv.close(child)
    kv.pools[0]._cached.move_to_end(parent, last=False)  # the worst order: the parent goes first
    fill(kv, [7, 7, 8, 8])
    assert kv.open([1, 1, 2, 2, 0]).sealed == 0
    kv.check_integrity()


def test_a_held_block_is_never_evicted() -> None:
    kv = KVCache(SPEC, n_blocks=2, block=2)
    fill(kv, [1, 1])
    other = BlockTable()
    assert kv.grow(other, 2)
    assert not kv.grow(other, 4)
    assert len(other.held[0].blocks) == 1, "a refusal changes nothing"
    kv.check_integrity()


def test_twins_computed_at_the_same_time_stay_apart_and_leak_nothing() -> None:
    kv = KVCache(SPEC, n_blocks=8, block=2)
    a, b = kv.open([1, 2, 3, 4]), kv.open([1, 2, 3, 4])
    assert kv.grow(a, 4) and kv.grow(b, 4)
    for computed in (2, 4):
        kv.seal(a, [1, 2, 3, 4], computed)
        kv.seal(b, [1, 2, 3, 4], computed)
    assert not set(a.held[0].blocks) & set(b.held[0].blocks)
    assert kv.open([1, 2, 3, 4, 5]).held[0].blocks == a.held[0].blocks
    kv.close(a)
    kv.close(b)
    kv.check_integrity()


def test_a_table_closed_twice_releases_once() -> None:
    kv = KVCache(SPEC, n_blocks=2, block=2)
    table = fill(kv, [1, 2, 3])
    kv.close(table)
    kv.close(table)
    kv.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_no_history_loses_a_block_or_finds_the_wrong_tokens(seed: int) -> None:
    """Every block remembers what was written to it; what is found must hold exactly the tokens asked for."""
    rng = random.Random(seed)
    kv = KVCache(SPEC, n_blocks=12, block=2)
    written: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end
    tables: list[BlockTable] = []
    for _ in range(400):
        if tables and rng.random() < 0.4:
            kv.close(tables.pop(rng.randrange(len(tables))))
        ids = [rng.randrange(2) for _ in range(rng.randrange(1, 12))]
        table = kv.open(ids)
        for i, block in enumerate(table.held[0].blocks):
            assert written[block] == tuple(ids[: 2 * i + 2])
        if not kv.grow(table, len(ids)):
            kv.close(table)
            continue
        for i in range(table.sealed, len(table.held[0].blocks)):
            written[table.held[0].blocks[i]] = tuple(ids[: 2 * i + 2])
        kv.seal(table, ids, len(ids))
        tables.append(table)
        kv.check_integrity()
    for table in tables:
        kv.close(table)
    assert kv.used == 0
    kv.check_integrity()
