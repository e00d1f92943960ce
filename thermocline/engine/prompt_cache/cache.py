"""A prompt cache's stores: what a `KVCache` names is written to them and brought back, beside steps.

It owns the threads. What a file is, `files` knows; beside a GPU there are `copies` in RAM, too. All methods
are for the engine's thread.

**Written while it may be evicted.** The writer holds no block, so that no request waits for the disk. It
copies a named place and then asks whether somebody took the place meanwhile (`NamedPlaces.unchanged`). If
so, the copy is thrown away: the text will be computed and named again before anybody can need it.

**Read into places that a request holds.** A request that begins gets the blocks of its prefix as if it had
computed them (`KVCache.expect`), and is not scheduled until the readers have filled them. One that is
cancelled meanwhile leaves its blocks to the `Restore`, which gives them back when no reader writes any more.

**On a GPU** places are copied by `DevicePlaces`. A step that was given up may still write to a place that the
next request gets, so all that is queued ends before a place is read into.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from thermocline.engine.kv_cache import BlockTable, KVCache, Missing
from thermocline.engine.named_places import NamedPlaces
from thermocline.engine.prompt_cache.copies import PromptCopies
from thermocline.engine.prompt_cache.files import PromptFiles
from thermocline.engine.prompt_cache.memory import NOTHING_KEPT, READERS, SECTION_BYTES, KeptText
from thermocline.errors import BadFile, DeviceFailure
from thermocline.ops.interface import F16, F32, I32, U8, KVShape

if TYPE_CHECKING:
    from thermocline.ops.device_places import DevicePlaces

log = logging.getLogger(__name__)

PAUSE_S = 60.0  # without writing, after the disk refused
WAIT_S = 0.02  # for files, where there is nothing to compute: a request that comes waits no longer


@dataclass(frozen=True)
class PromptCacheSettings:
    """The text of finished requests that a cache has memory for, and the files of more.

    `copies`: in place of that memory where layers are on a device, whose `places` they are copies of.
    """

    text: KeptText = NOTHING_KEPT
    files: PromptFiles | None = None
    copies: PromptCopies | None = None
    places: DevicePlaces | None = None


NO_PROMPTS = PromptCacheSettings()


@dataclass
class PromptCacheCounts:
    """Figures since the engine was made."""

    restored: int = 0  # prompts that had a prefix in a store
    tokens: int = 0  # of these prefixes
    read_bytes: int = 0
    written_bytes: int = 0
    damaged: int = 0  # files that were not what was written


@dataclass
class Restore:
    """A prefix on its way from a store to the blocks of a request."""

    table: BlockTable
    ids: list[int]
    tokens: int  # positions that the request may need
    missing: list[Missing]
    begun: int  # blocks that it had before
    left: int  # files still to be read
    abandoned: bool = False  # nobody waits for it: nothing more is read
    bad: list[Missing] = field(default_factory=list)
    failure: DeviceFailure | None = None  # what a copy to a device met


@dataclass(frozen=True)
class _Array:
    """Keys or values of a layer's pages, or a layer's states."""

    bytes: U8  # [places, bytes of one]
    shape: KVShape | None = None  # of pages

    @cached_property
    def nbytes(self) -> int:
        """Return the bytes of one block or slot."""
        return int(self.bytes.shape[1]) * (1 if self.shape is None else self.shape.heads)

    def put(self, rows: I32, data: U8) -> None:
        self.bytes[rows] = data.reshape(len(rows), -1)

    def get(self, rows: I32, to: U8) -> None:
        self.bytes.take(rows, 0, to.reshape(len(rows), -1), "clip")


@dataclass(frozen=True)
class _DeviceArray:
    """The same, on a device, where a block's heads lie side by side."""

    there: Any  # [places, bytes of one]
    places: DevicePlaces
    shape: None = None

    @cached_property
    def nbytes(self) -> int:
        return int(self.there.shape[1])

    def put(self, rows: I32, data: U8) -> None:
        self.places.put(self.there, int(rows[0]), data)

    def get(self, rows: I32, to: U8) -> None:
        self.places.get(to, self.there, int(rows[0]))


_Layer = _Array | _DeviceArray


@dataclass(frozen=True)
class _Part:
    """The content of files of one kind: of one pool of blocks, or of the states."""

    name: str
    sections: tuple[tuple[_Layer, ...], ...]  # arrays whose rows of a block are read and checked together

    @staticmethod
    def of(name: str, arrays: Iterable[_Layer]) -> _Part:
        sections: list[list[_Layer]] = []
        for array in arrays:
            if not sections or sum(a.nbytes for a in sections[-1]) + array.nbytes > SECTION_BYTES:
                sections.append([])
            sections[-1].append(array)
        return _Part(name, tuple(map(tuple, sections)))

    @cached_property
    def sizes(self) -> list[int]:
        return [sum(array.nbytes for array in section) for section in self.sections]

    @cached_property
    def _shapes(self) -> set[KVShape | None]:
        return {array.shape for section in self.sections for array in section}

    def _rows(self, place: int) -> dict[KVShape | None, I32]:
        """Return the rows of a block, one for each head, or of a slot: once for all layers of a shape."""
        one = np.array([place], np.int32)
        return {shape: one if shape is None else shape.places(one)[:, 0] for shape in self._shapes}

    def put(self, place: int, found: Iterable[memoryview]) -> None:
        """Copy sections to a block or a slot."""
        rows = self._rows(place)
        for section, data in zip(self.sections, found, strict=True):
            for a, part in _split(section, np.frombuffer(data, np.uint8)):
                a.put(rows[a.shape], part)

    def got(self, place: int, buffer: U8) -> Iterator[memoryview]:
        """Yield the sections of a block or a slot, in `buffer`, which the next one overwrites."""
        rows = self._rows(place)
        for section, size in zip(self.sections, self.sizes, strict=True):
            for a, part in _split(section, buffer[:size]):
                a.get(rows[a.shape], part)
            yield buffer.data[:size]


def _split(section: Iterable[_Layer], data: U8) -> Iterator[tuple[_Layer, U8]]:
    """Yield each array of a section with its part of the section's bytes."""
    at = 0
    for array in section:
        yield array, data[at : at + array.nbytes]
        at += array.nbytes


def _parts(kv: KVCache, places: DevicePlaces | None) -> dict[int, _Part]:
    """Return the parts by the identity of their places. `places`: of the arrays that are not numpy's."""

    def array(x: F16 | F32 | U8, shape: KVShape | None = None) -> _Layer:
        if isinstance(x, np.ndarray):
            return _Array(x.reshape(len(x), -1).view(np.uint8), shape)
        assert places is not None, "somebody can read what is on a device"
        return _DeviceArray(places.flat(x), places)

    parts: dict[int, _Part] = {}
    for p, (window, pool) in enumerate(zip(kv.windows, kv.pools, strict=True)):
        arrays: list[_Layer] = []
        for layer in kv.layers_of(window):
            each = (layer.k,) if layer.shape.latent else (layer.k, layer.v)
            arrays += (array(x, layer.shape) for x in each)
        parts[id(pool)] = _Part.of(f"k{p}", arrays)
    if kv.states is not None:
        parts[id(kv.states)] = _Part.of("s0", map(array, kv.states.layers.values()))
    return parts


class PromptCache:
    def __init__(self, kv: KVCache, settings: PromptCacheSettings) -> None:
        self.counts = PromptCacheCounts()
        self._kv, self._files, self._places = kv, settings.files, settings.places
        both = (settings.copies, settings.files)
        self._stores: tuple[PromptCopies | PromptFiles, ...] = tuple(s for s in both if s is not None)
        self._parts = _parts(kv, settings.places)
        self._largest = max(max(part.sizes, default=0) for part in self._parts.values())
        self._buffers = threading.local()
        self._restores: list[Restore] = []
        self._lock, self._read = threading.Lock(), threading.Event()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="prompt-cache")
        self._named: SimpleQueue[tuple[NamedPlaces | None, bytes, int] | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write_all, name="prompt-cache-writer", daemon=True)
        self._writer.start()
        kv.keeper = self

    # ---- what is stored

    def begin(self, table: BlockTable, ids: list[int], names: Sequence[bytes], tokens: int) -> Restore | None:
        """Begin to read what is stored of a request's prefix, into blocks of its table; None: nothing more.

        `names`: of the blocks that it can take, `tokens`: the positions that it may need.
        """
        had, end = table.sealed, self._reach(names, table.sealed)
        if end <= had:
            return None
        if self._places is not None:
            self._places.settle()
        missing = self._kv.expect(table, names[:end])
        made = Restore(table, ids, tokens, missing, had, len(missing))
        self._restores.append(made)
        for one in missing:
            self._readers.submit(self._fill, made, one)
        if not missing:
            self._read.set()
        return made

    def _reach(self, names: Sequence[bytes], had: int) -> int:
        """Return the most blocks that can be had of a text, from memory and stores together."""
        kv = self._kv

        @cache
        def there(pool: int, i: int) -> bool:
            places = kv.pools[pool]
            return names[i] in places or self._stored(places, names[i])

        windowed = [p for p, pool in enumerate(kv.pools) if pool.window is not None]
        whole = [p for p, pool in enumerate(kv.pools) if pool.window is None]
        most = len(names)
        for p in whole:
            most = next((i for i in range(most) if not there(p, i)), most)
        for end in range(most, had, -1):
            if not self._has_state(names[end - 1]):
                continue
            near = ((p, kv.pools[p].first(end * kv.block)) for p in windowed)
            if all(there(p, i) for p, first in near for i in range(end - 1, first - 1, -1)):
                return end
        return had

    def _has_state(self, name: bytes) -> bool:
        """Return whether the recurrent state after a text can be had, if there is one."""
        states = self._kv.states
        return states is None or name in states or self._stored(states, name)

    def _stored(self, places: NamedPlaces, name: bytes) -> bool:
        part = self._parts[id(places)].name
        return any(store.has(name, part) for store in self._stores)

    def over(self, restore: Restore) -> bool:
        """Return whether all files of a prefix were read, or found to be bad."""
        with self._lock:
            return restore.left == 0

    def settle(self, restore: Restore) -> bool:
        """Name what was read. Where a file was bad, give back the rest: the table has what memory holds.

        Return False if there is no room for that any more: then the table has nothing.
        Raises DeviceFailure, and names nothing, where a copy to a device failed.
        """
        if restore.failure is not None:
            raise restore.failure
        self._restores.remove(restore)
        self._read.clear()
        bad, room = set(restore.bad), True
        for one in restore.missing:
            if one not in bad:
                one.places.publish(one.place, one.name)
        if bad:
            for one in restore.bad:
                if self._files is not None:
                    self._files.drop(one.name, self._parts[id(one.places)].name)
            room = self._kv.open_again(restore.table, restore.ids, restore.tokens)
        if (gained := restore.table.sealed - restore.begun) > 0:
            self.counts.restored += 1
            self.counts.tokens += gained * self._kv.block
        return room

    def abandon(self, restore: Restore) -> None:
        """Leave a request's blocks to those that write to them; they give them back."""
        restore.abandoned = True

    def give_back(self) -> None:
        """Release the blocks of prefixes that nobody waits for, where nothing writes to them any more."""
        for restore in [r for r in self._restores if r.abandoned and self.over(r)]:
            self._restores.remove(restore)
            self._read.clear()
            self._kv.close(restore.table)

    @property
    def abandoned(self) -> int:
        """The number of prefixes that nobody waits for, and that something may still write to."""
        return sum(restore.abandoned for restore in self._restores)

    @property
    def busy(self) -> bool:
        """Whether a prefix is being read."""
        return bool(self._restores)

    def wait(self) -> None:
        """Wait a moment for what is being read."""
        self._read.wait(WAIT_S)

    def _fill(self, restore: Restore, one: Missing) -> None:
        """Read a file or a copy into its place, on a reader's thread."""
        good = False
        try:
            good = not restore.abandoned and self._filled(one)
        except DeviceFailure as e:
            restore.failure = e
        finally:
            with self._lock:
                if not good:
                    restore.bad.append(one)
                restore.left -= 1  # the last one that looks at it may end it
                if restore.left == 0:
                    self._read.set()

    def _filled(self, one: Missing) -> bool:
        part = self._parts[id(one.places)]
        buffer = self._buffer()
        for store in self._stores:
            try:
                part.put(one.place, store.sections(one.name, part.name, part.sizes, buffer.data))
            except BadFile as e:
                log.warning(f"{e}; this part of a prompt is computed again")
                with self._lock:
                    self.counts.damaged += 1
                return False
            except FileNotFoundError:
                continue  # it is in the next one, or another process needed the space
            except OSError as e:
                log.warning(f"prompt cache: {e}; this part of a prompt is computed again")
                return False
            with self._lock:
                self.counts.read_bytes += sum(part.sizes)
            return True
        return False

    def _buffer(self) -> U8:
        """Return the thread's own place for a section."""
        found: U8 | None = getattr(self._buffers, "own", None)
        if found is None:
            found = self._buffers.own = np.empty(self._largest, np.uint8)
        return found

    # ---- what comes to the stores

    def keep(self, places: NamedPlaces, name: bytes, depth: int, used_ns: int) -> None:
        """Write a place that was named, soon. A text's end is older than its beginning, and goes first."""
        self._named.put((places, name, used_ns - 1000 * depth))

    def used(self, names: Sequence[bytes], used_ns: int) -> None:
        """Say that a request has used its prefix."""
        for depth, name in enumerate(names):
            self._named.put((None, name, used_ns - 1000 * depth))

    def close(self) -> None:
        """Write what is still to be written, and end the threads. Nothing may be submitted after that."""
        for restore in self._restores:
            restore.abandoned = True
        self._stores = () if self._files is None else (self._files,)  # copies end with the session
        self._readers.shutdown(cancel_futures=True)
        self._named.put(None)
        self._writer.join()
        self._kv.keeper = None

    def _write_all(self) -> None:
        paused = 0.0
        while (one := self._named.get()) is not None:
            places, name, used_ns = one
            for store in self._stores:
                if places is None:
                    for part in self._parts.values():
                        store.use(name, part.name, used_ns)
                elif store is not self._files or time.monotonic() >= paused:
                    try:
                        self._write(store, places, name, used_ns)
                    except OSError as e:
                        assert self._files is not None, "RAM refuses nothing"
                        paused = time.monotonic() + PAUSE_S
                        log.warning(
                            f"{self._files.directory}: prompts are not kept on disk for {PAUSE_S:.0f} s: "
                            f"{e.strerror or e}"
                        )
                    except DeviceFailure as e:  # the next step meets it, too
                        log.warning(f"prompts are not kept any more: {e}")
                        return

    def _write(
        self, store: PromptCopies | PromptFiles, places: NamedPlaces, name: bytes, used_ns: int
    ) -> None:
        part, found = self._parts[id(places)], places.find(name)
        if store.has(name, part.name):
            store.use(name, part.name, used_ns)
        elif found is not None:
            place, turn = found
            sections, valid = part.got(place, self._buffer()), partial(places.unchanged, place, turn)
            written = store.write(name, part.name, sections, part.sizes, used_ns, valid)
            self.counts.written_bytes += written
