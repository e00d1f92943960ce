"""The paged KV cache: blocks of positions, shared between sequences that begin with the same tokens.

It owns the keys and values of every layer, and counts the holders of each block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np

from thermocline.engine.named_places import NamedPlaces
from thermocline.engine.state_pool import CHECKPOINT_TOKENS, NONE, StatePool, zeros
from thermocline.model.modes import PLAIN as PLAIN
from thermocline.model.modes import CacheTypes as CacheTypes
from thermocline.model.spec import ModelSpec
from thermocline.ops.interface import I32, KVLayer, KVShape

BLOCK = 32  # positions per block
Storage = Callable[[int, KVShape], KVLayer]  # allocates a layer's keys and values
ROOT = b""  # the name of no tokens
ABSENT = -1  # a block that no position still to come attends to


@dataclass
class PoolBlocks:
    """One sequence's blocks in one pool, in position order; ABSENT before `begin`."""

    blocks: list[int] = field(default_factory=list)
    begin: int = 0
    reserved: int = 0  # the most blocks that it will ever hold at once


@dataclass
class BlockTable:
    """One sequence's blocks in every pool. The first `sealed` are full, read-only and findable."""

    held: list[PoolBlocks] = field(default_factory=list)
    sealed: int = 0
    chain: bytes = ROOT  # names the tokens of the sealed blocks
    state: int = NONE  # the slot of recurrent layers' states after all computed positions
    next_state: int = NONE  # the slot that its next step writes
    later_state: int = NONE  # the slot that the step after that writes, if it is begun before that has ended
    checkpoint: bytes = ROOT  # names its last state in the midst of an answer
    begun_ns: int = field(default_factory=time.time_ns)  # what it names was used then


# ---- sizes


def bytes_for(spec: ModelSpec, tokens: int, types: CacheTypes = PLAIN) -> int:
    """Return the bytes of keys and values of `tokens` positions in all layers."""
    return sum(layer_bytes(spec, i, tokens, types) for i in range(spec.n_layers))


def layer_bytes(spec: ModelSpec, layer: int, tokens: int, types: CacheTypes = PLAIN) -> int:
    """Return the bytes of keys and values of `tokens` positions in one layer."""
    shape = spec.attention(layer)
    stores = shape is not None and spec.kv_layer(layer) == layer
    return 0 if shape is None or not stores else tokens * shape.kv_heads * types.head_bytes(*shape.cached)


def blocks_for(tokens: int, block: int = BLOCK) -> int:
    return -(-tokens // block)


def blocks_at_once(tokens: int, window: int | None, chunk: int, block: int = BLOCK) -> int:
    """Return the most blocks that a sequence of `tokens` positions holds in layers with this window.

    `chunk` is the number of positions in a step.
    """
    whole = blocks_for(tokens, block)
    # A step touches window - 1 + chunk positions, which may begin at the end of a block.
    return whole if window is None else min(whole, blocks_for(window + chunk - 2, block) + 1)


def block_counts(spec: ModelSpec, tokens: int, context: int, chunk: int) -> tuple[int, int]:
    """Return the blocks for `tokens` positions in sequences of up to `context`.

    The result is (blocks of layers without a window, blocks of layers with one).
    """
    blocks = blocks_for(tokens)
    one = blocks_at_once(context, spec.sliding_window, chunk)
    return blocks, min(blocks, -(-tokens * one // context))


def reserved_bytes(spec: ModelSpec, tokens: int, context: int, chunk: int, types: CacheTypes = PLAIN) -> int:
    """Return the bytes of a cache with as many blocks as `block_counts` gives."""
    blocks, window_blocks = block_counts(spec, tokens, context, chunk)
    counts = (blocks if spec.window(i) is None else window_blocks for i in range(spec.n_layers))
    return sum(layer_bytes(spec, i, n * BLOCK, types) for i, n in enumerate(counts))


def in_ram(layer: int, shape: KVShape) -> KVLayer:
    """Allocate the pages of a layer, zeros. The system backs a page with memory when it is first written."""
    s, pages = shape, shape.heads * shape.pages
    k = zeros(pages, s.k_bytes)
    if s.latent:
        latents = k.view(np.float16).reshape(pages, s.block, s.head_dim)
        return KVLayer(shape, latents, latents)
    v = zeros(pages, s.v_bytes)
    return KVLayer(
        shape,
        k.view(np.float16).reshape(pages, s.head_dim, s.block) if s.types.k == "f16" else k,
        v.view(np.float16).reshape(pages, s.block, s.head_dim) if s.types.v == "f16" else v,
    )


# ---- blocks and their holders


class BlockPool(NamedPlaces):
    """The blocks of all layers with the same window: `window` positions, or None for all positions.

    Without a window, a sequence takes all its blocks at once. With a window, it takes them as it goes,
    releases those that the window has passed, and reserves the most that it will hold, so that it never
    waits halfway. A shared block counts for each holder, so at least as many blocks are reserved as are
    used.
    """

    def __init__(self, n_blocks: int, block: int, window: int | None, chunk: int) -> None:
        super().__init__(n_blocks)
        self.n_blocks, self.block, self.window, self.chunk = n_blocks, block, window, chunk
        self.reserved = 0

    def first(self, computed: int) -> int:
        """Return the first block that position `computed` or a later one attends to."""
        return 0 if self.window is None else max(0, computed + 1 - self.window) // self.block

    def found(self, names: Sequence[bytes]) -> PoolBlocks:
        """Take the cached blocks that a sequence needs to continue after the blocks `names`."""
        begin = self.first(len(names) * self.block)
        held = PoolBlocks([ABSENT] * begin + [self.hold(name) for name in names[begin:]], begin)
        self._reserve(held, len(names) - begin)
        return held

    def fits(self, held: PoolBlocks, tokens: int) -> bool:
        """Return whether there are blocks for `tokens` positions of a sequence."""
        need = self._at_once(tokens)
        if self.window is None:
            return need - len(held.blocks) <= self.available
        return self.reserved - held.reserved + need <= self.n_blocks

    def grow(self, held: PoolBlocks, tokens: int) -> None:
        self._reserve(held, self._at_once(tokens))
        if self.window is None:
            self.extend(held, tokens)

    def extend(self, held: PoolBlocks, tokens: int) -> None:
        """Give a sequence blocks of its own up to position `tokens`."""
        while len(held.blocks) * self.block < tokens:
            held.blocks.append(self.take())

    def release_passed(self, held: PoolBlocks, computed: int) -> None:
        """Release the blocks that the window has passed.

        They go first, so that a long prompt leaves other texts' last windows alone, but for those from which
        a prompt that begins alike can go on after whole `CHECKPOINT_TOKENS`.
        """
        first = self.first(computed)
        for i in range(held.begin, first):
            self.release(held.blocks[i])
            checkpoint = -(-(i + 1) * self.block // CHECKPOINT_TOKENS) * CHECKPOINT_TOKENS
            if i < self.first(checkpoint):
                self.let_go_first(held.blocks[i])
            held.blocks[i] = ABSENT
        held.begin = max(held.begin, first)

    def close(self, held: PoolBlocks) -> None:
        for block in reversed(held.blocks[held.begin :]):  # a sequence's end is evicted before its start
            self.release(block)
        self._reserve(held, 0)

    def check_integrity(self) -> None:
        super().check_integrity()
        assert self.reserved >= self.used, "more used than reserved"

    def _at_once(self, tokens: int) -> int:
        return blocks_at_once(tokens, self.window, self.chunk, self.block)

    def _reserve(self, held: PoolBlocks, blocks: int) -> None:
        self.reserved += blocks - held.reserved
        held.reserved = blocks


class Keeper(Protocol):
    """Keeps what is named for longer than its place does."""

    def keep(self, places: NamedPlaces, name: bytes, depth: int, used_ns: int) -> None:
        """Take note of a place that was named: the `depth`-th block of its text, or the state after it."""


class Missing(NamedTuple):
    """A place that a sequence has and that is to be filled: a block of a pool, or a slot of states."""

    places: NamedPlaces
    place: int
    name: bytes


class KVCache:
    """Keys and values of all layers, with one pool of blocks for each size of window.

    A sealed block is found by a name for all tokens up to its end: a digest of 256 bits, so that no two texts
    share a name, by chance or by design. Earlier blocks may be gone if no window needs them. Only full
    blocks are shared, so no sequence writes to a block that another one holds.
    """

    def __init__(
        self,
        spec: ModelSpec,
        n_blocks: int,
        window_blocks: int | None = None,
        *,
        block: int = BLOCK,
        chunk: int = 1 << 31,
        types: CacheTypes = PLAIN,
        storage: Storage = in_ram,
    ) -> None:
        """Make a cache with `n_blocks` blocks in each layer, and `window_blocks` in layers with a window.

        `window_blocks` None means `n_blocks`. `chunk` is the most positions of a sequence in one step.
        """
        for each in spec.attentions:
            types.check(*each.cached)
        self.block, self._spec = block, spec
        shapes = {i: shape for i in range(spec.n_layers) if (shape := spec.attention(i)) is not None}
        windows = {spec.window(i) for i in shapes}
        self.windows = sorted(windows, key=lambda window: window is not None)  # a pool each
        self.pools: list[BlockPool] = []
        blocks = dict[int | None, int]()
        for window in self.windows:
            blocks[window] = n_blocks if window is None or window_blocks is None else window_blocks
            self.pools.append(BlockPool(blocks[window], block, window, chunk))

        self._layers = {
            i: storage(
                i, KVShape(blocks[spec.window(i)], s.kv_heads, s.head_dim, block, types, s.latent is not None)
            )
            for i, s in shapes.items()
            if spec.kv_layer(i) == i
        }
        self._layers |= {i: self._layers[spec.kv_layer(i)] for i in shapes}
        self.states: StatePool | None = None  # of models with recurrent layers: `keep_states`
        self.keeper: Keeper | None = None  # is told what is sealed

    def keep_states(self, states: StatePool) -> None:
        """Keep recurrent layers' states, too: a prefix is found as far as there is one."""
        self.states = states

    def layer(self, i: int) -> KVLayer:
        return self._layers[i]

    def layers_of(self, window: int | None) -> list[KVLayer]:
        """Return the keys and values of the pool of this window; layers that share them have one."""
        own = (i for i in self._layers if self._spec.window(i) == window and self._spec.kv_layer(i) == i)
        return [self._layers[i] for i in own]

    @property
    def nbytes(self) -> int:
        return sum({id(x): x.nbytes for x in self._layers.values()}.values())

    @property
    def used(self) -> int:
        return sum(pool.used for pool in self.pools)

    def open(self, ids: list[int]) -> BlockTable:
        """Return a table with the longest prefix of `ids` whose keys and values are cached.

        The last token is never part of it: its logits are needed. In layers with a window, only the blocks
        that the window reaches must still be there. Recurrent layers need the state after the prefix, too.
        """
        names: list[bytes] = []
        best, missed = 0, [0] * len(self.pools)  # missed: where each pool's current run of blocks begins
        for name in self.names(ids[:-1]):
            names.append(name)
            for p, pool in enumerate(self.pools):
                if name not in pool:
                    missed[p] = len(names)
            at = len(names) * self.block
            if all(begin <= pool.first(at) for begin, pool in zip(missed, self.pools, strict=True)):
                best = len(names) if self.states is None or name in self.states else best
            elif self.windows[0] is None and missed[0]:
                break
        del names[best:]
        table = BlockTable([pool.found(names) for pool in self.pools], best, names[-1] if names else ROOT)
        if self.states is not None and names:
            table.state = self.states.hold(names[-1])
        return table

    def names(self, ids: list[int]) -> Iterator[bytes]:
        """Yield the names of a text's full blocks. Each names all tokens up to the block's end."""
        chain = ROOT
        for i in range(len(ids) // self.block):
            chain = self._name(chain, ids, i)
            yield chain

    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Reserve blocks for `tokens` positions. Return False, and change nothing, if there are too few."""
        table.held = table.held or [PoolBlocks() for _ in self.pools]
        pairs = list(zip(self.pools, table.held, strict=True))
        if not all(pool.fits(held, tokens) for pool, held in pairs):
            return False
        for pool, held in pairs:
            pool.grow(held, tokens)
        return True

    def begin_again(self, table: BlockTable, tokens: int) -> None:
        """Give up what a sequence holds; reserve blocks for `tokens` positions of another in its place."""
        self.close(table)
        grown = self.grow(table, tokens)
        assert grown, "the cache is large enough"

    def open_again(self, table: BlockTable, ids: list[int], tokens: int) -> bool:
        """Give up what a sequence holds for what memory has of it; reserve blocks for `tokens` positions.

        Return False, and hold nothing, if there are too few: others may have taken blocks that it shared.
        """
        found = self.open(ids)
        self.close(table)
        table.held, table.sealed = found.held, found.sealed
        table.chain, table.state = found.chain, found.state
        if self.grow(table, tokens):
            return True
        self.close(table)
        return False

    def look_again(self, table: BlockTable, ids: list[int], tokens: int) -> None:
        """Take blocks that were sealed since `table` was opened, in place of blocks that it has not written.

        There are always enough blocks: it gives back as many as it takes, and shares some.
        """
        found = self.open(ids)
        if found.sealed > table.sealed:
            table.held, found.held = found.held, table.held
            table.sealed, table.chain = found.sealed, found.chain
            table.state, found.state = found.state, table.state
        self.close(found)
        grown = self.grow(table, tokens)
        assert grown, "a sequence that shares more needs more"

    def expect(self, table: BlockTable, names: Sequence[bytes]) -> list[Missing]:
        """Let a grown table hold the blocks `names` and the state after them, as if it had computed them.

        Return those that are in no place yet. They are the table's own, to be filled and then published.
        """
        missing: list[Missing] = []
        for pool, held in zip(self.pools, table.held, strict=True):
            begin, before = pool.first(len(names) * self.block), held.blocks
            found = [pool.hold(name) if name in pool else ABSENT for name in names[begin:]]
            rest = before[len(names) :] if pool.window is None else []
            for block in before[held.begin : len(before) - len(rest)]:
                pool.release(block)
            held.blocks, held.begin = [ABSENT] * begin + found + rest, begin
            for i, name in enumerate(names[begin:], begin):
                if held.blocks[i] == ABSENT:
                    held.blocks[i] = pool.take()
                    missing.append(Missing(pool, held.blocks[i], name))
        table.sealed, table.chain = len(names), names[-1]
        if self.states is not None:
            there = names[-1] in self.states
            state = self.states.hold(names[-1]) if there else self.states.take()
            self.states.release(table.state)
            table.state = state
            missing += [] if there else [Missing(self.states, state, names[-1])]
        return missing

    def tables(self, tables: Sequence[BlockTable], stops: Sequence[int]) -> list[I32]:
        """Return each pool's block table [tables, blocks] with blocks up to `stops`, as `grow` reserved."""
        out = []
        for p, pool in enumerate(self.pools):
            rows = []
            for table, stop in zip(tables, stops, strict=True):
                pool.extend(table.held[p], stop)
                rows.append(table.held[p].blocks[: blocks_for(stop, self.block)])
            widest = max(map(len, rows))
            out.append(np.array([row + [ABSENT] * (widest - len(row)) for row in rows], np.int32))
        return out

    def state_slots(self, tables: Sequence[BlockTable]) -> tuple[I32, I32] | tuple[None, None]:
        """Return the slots that a step of these sequences reads and writes, if there are states.

        A step that is made again writes the same ones.
        """
        if self.states is None:
            return None, None
        for table in tables:
            if table.next_state == NONE:
                table.next_state = self.states.take()
        read, written = [table.state for table in tables], [table.next_state for table in tables]
        return np.array(read, np.int32), np.array(written, np.int32)

    def later_slots(self, tables: Sequence[BlockTable]) -> tuple[I32, I32] | tuple[None, None]:
        """Return the slots that the step after that one reads and writes."""
        if self.states is None:
            return None, None
        for table in tables:
            if table.later_state == NONE:
                table.later_state = self.states.take()
        read, written = [table.next_state for table in tables], [table.later_state for table in tables]
        return np.array(read, np.int32), np.array(written, np.int32)

    def seal(self, table: BlockTable, ids: list[int], computed: int, n_prompt: int = 0) -> None:
        """Publish the blocks that `computed` positions fill. Release those that no later position attends to.

        The keys and values of these positions must be written, and the state after them. A state at the end
        of a block can be found, too: of an answer, which begins at `n_prompt`, only the last one.
        """
        while (table.sealed + 1) * self.block <= computed:
            table.chain = self._name(table.chain, ids, table.sealed)
            for pool, held in zip(self.pools, table.held, strict=True):
                if pool.publish(held.blocks[table.sealed], table.chain):
                    self._keep(pool, table, table.chain)
            table.sealed += 1
        self.release_passed(table, computed)
        if self.states is not None:
            self.states.release(table.state)
            table.state, table.next_state, table.later_state = table.next_state, table.later_state, NONE
            if table.sealed * self.block == computed:
                self._check_in(self.states, table, computed, n_prompt)

    def release_passed(self, table: BlockTable, computed: int) -> None:
        """Release the blocks that no position after `computed` ones attends to."""
        for pool, held in zip(self.pools, table.held, strict=True):
            pool.release_passed(held, computed)

    def _check_in(self, states: StatePool, table: BlockTable, computed: int, n_prompt: int) -> None:
        """Publish a state. Of a prompt, the last one that another prompt can take stays the longest."""
        last = max(0, n_prompt - 1) // self.block * self.block
        kept = computed == last or (computed < last and computed % CHECKPOINT_TOKENS == 0)
        passing = computed < last and not (kept and states.kept)
        published = states.publish(table.state, table.chain, passing=passing)
        if published and kept:
            self._keep(states, table, table.chain)
        if computed > last and published:
            states.forget(table.checkpoint)
            table.checkpoint = table.chain

    def _keep(self, places: NamedPlaces, table: BlockTable, name: bytes) -> None:
        if self.keeper is not None:
            self.keeper.keep(places, name, table.sealed, table.begun_ns)

    def close(self, table: BlockTable) -> None:
        """Release every block of a sequence. Sealed ones stay cached."""
        for pool, held in zip(self.pools, table.held, strict=False):  # a table never opened holds nothing
            pool.close(held)
        if self.states is not None:
            if table.checkpoint != ROOT:
                self._keep(self.states, table, table.checkpoint)
            self.states.release(table.later_state)
            self.states.release(table.next_state)
            self.states.release(table.state)
        table.held, table.sealed, table.chain = [], 0, ROOT
        table.state = table.next_state = table.later_state = NONE
        table.checkpoint = ROOT

    def check_integrity(self) -> None:
        for pool in self.pools:
            pool.check_integrity()
        if self.states is not None:
            self.states.check_integrity()

    def _name(self, chain: bytes, ids: list[int], i: int) -> bytes:
        tokens = np.array(ids[i * self.block : (i + 1) * self.block], np.int32)
        return blake2b(chain + tokens.tobytes(), digest_size=32).digest()
