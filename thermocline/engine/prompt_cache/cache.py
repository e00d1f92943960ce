"""A prompt cache on disk: writes what a `KVCache` names, and brings it back, both beside the engine's steps.

It owns the threads. What a file is, `files` knows. All methods are for the engine's thread.

**Written while it may be evicted.** The writer holds no block, so that no request waits for the disk. It
copies a named place and then asks whether somebody took the place meanwhile (`NamedPlaces.unchanged`). If
so, the copy is thrown away: the text will be computed and named again before anybody can need it.

**Read into places that a request holds.** A request that begins gets the blocks of its prefix as if it had
computed them (`KVCache.expect`), and is not scheduled until the readers have filled them. One that is
cancelled meanwhile leaves its blocks to the `Restore`, which gives them back when no reader writes any more.
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

import numpy as np

from thermocline.engine.kv_cache import BlockTable, KVCache, Missing
from thermocline.engine.named_places import NamedPlaces
from thermocline.engine.prompt_cache.files import PromptFiles
from thermocline.engine.prompt_cache.memory import NOTHING_KEPT, READERS, SECTION_BYTES, KeptText
from thermocline.errors import BadFile
from thermocline.ops.interface import F16, F32, I32, U8, KVShape

log = logging.getLogger(__name__)

PAUSE_S = 60.0  # without writing, after the disk refused
WAIT_S = 0.02  # for files, where there is nothing to compute: a request that comes waits no longer


@dataclass(frozen=True)
class PromptCacheSettings:
    """The text of finished requests that a cache has memory for, and the files of more."""

    text: KeptText = NOTHING_KEPT
    files: PromptFiles | None = None


NO_PROMPTS = PromptCacheSettings()


@dataclass
class PromptCacheCounts:
    """Figures since the engine was made."""

    restored: int = 0  # prompts that had a prefix on disk
    tokens: int = 0  # of these prefixes
    read_bytes: int = 0
    written_bytes: int = 0
    damaged: int = 0  # files that were not what was written


@dataclass
class Restore:
    """A prefix on its way from disk to the blocks of a request."""

    table: BlockTable
    ids: list[int]
    tokens: int  # positions that the request may need
    missing: list[Missing]
    begun: int  # blocks that it had before
    left: int  # files still to be read
    abandoned: bool = False  # nobody waits for it: nothing more is read
    bad: list[Missing] = field(default_factory=list)


@dataclass(frozen=True)
class _Array:
    """Keys or values of a layer's pages, or a layer's states."""

    bytes: U8  # [places, bytes of one]
    shape: KVShape | None = None  # of pages

    @cached_property
    def nbytes(self) -> int:
        """Return the bytes of one block or slot."""
        return int(self.bytes.shape[1]) * (1 if self.shape is None else self.shape.heads)


@dataclass(frozen=True)
class _Part:
    """The content of files of one kind: of one pool of blocks, or of the states."""

    name: str
    sections: tuple[tuple[_Array, ...], ...]  # arrays whose rows of a block are read and checked together

    @staticmethod
    def of(name: str, arrays: Iterable[_Array]) -> _Part:
        sections: list[list[_Array]] = []
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
                a.bytes[rows[a.shape]] = part

    def got(self, place: int, buffer: U8) -> Iterator[memoryview]:
        """Yield the sections of a block or a slot, in `buffer`, which the next one overwrites."""
        rows = self._rows(place)
        for section, size in zip(self.sections, self.sizes, strict=True):
            for a, part in _split(section, buffer[:size]):
                a.bytes.take(rows[a.shape], 0, part, "clip")
            yield buffer.data[:size]


def _split(section: Iterable[_Array], data: U8) -> Iterator[tuple[_Array, U8]]:
    """Yield each array of a section with its part of the section's bytes, [rows, bytes of one]."""
    at = 0
    for array in section:
        yield array, data[at : at + array.nbytes].reshape(-1, array.bytes.shape[1])
        at += array.nbytes


def _flat(x: F16 | F32 | U8) -> U8:
    return x.reshape(len(x), -1).view(np.uint8)


def _parts(kv: KVCache) -> dict[int, _Part]:
    """Return the parts by the identity of their places."""
    parts: dict[int, _Part] = {}
    for p, (window, pool) in enumerate(zip(kv.windows, kv.pools, strict=True)):
        arrays: list[_Array] = []
        for layer in kv.layers_of(window):
            each = (layer.k,) if layer.shape.latent else (layer.k, layer.v)
            arrays += (_Array(_flat(x), layer.shape) for x in each)
        parts[id(pool)] = _Part.of(f"k{p}", arrays)
    if kv.states is not None:
        parts[id(kv.states)] = _Part.of("s0", (_Array(_flat(x)) for x in kv.states.layers.values()))
    return parts


class PromptCache:
    def __init__(self, kv: KVCache, files: PromptFiles) -> None:
        self.counts = PromptCacheCounts()
        self._kv, self._files, self._parts = kv, files, _parts(kv)
        self._largest = max(max(part.sizes, default=0) for part in self._parts.values())
        self._buffers = threading.local()
        self._restores: list[Restore] = []
        self._lock, self._read = threading.Lock(), threading.Event()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="prompt-cache")
        self._named: SimpleQueue[tuple[NamedPlaces | None, bytes, int] | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write_all, name="prompt-cache-writer", daemon=True)
        self._writer.start()
        kv.keeper = self

    # ---- what is on disk

    def begin(self, table: BlockTable, ids: list[int], names: Sequence[bytes], tokens: int) -> Restore | None:
        """Begin to read what a request's prefix has on disk, into blocks of its table; None: nothing more.

        `names`: of the blocks that it can take, `tokens`: the positions that it may need.
        """
        had, end = table.sealed, self._reach(names, table.sealed)
        if end <= had:
            return None
        missing = self._kv.expect(table, names[:end])
        made = Restore(table, ids, tokens, missing, had, len(missing))
        self._restores.append(made)
        for one in missing:
            self._readers.submit(self._fill, made, one)
        if not missing:
            self._read.set()
        return made

    def _reach(self, names: Sequence[bytes], had: int) -> int:
        """Return the most blocks that can be had of a text, from memory and disk together."""
        kv = self._kv

        @cache
        def there(pool: int, i: int) -> bool:
            places = kv.pools[pool]
            return names[i] in places or self._files.has(names[i], self._parts[id(places)].name)

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
        return states is None or name in states or self._files.has(name, self._parts[id(states)].name)

    def over(self, restore: Restore) -> bool:
        """Return whether all files of a prefix were read, or found to be bad."""
        with self._lock:
            return restore.left == 0

    def settle(self, restore: Restore) -> None:
        """Name what was read. Where a file was bad, give back the rest: the table has what memory holds."""
        self._restores.remove(restore)
        self._read.clear()
        bad = set(restore.bad)
        for one in restore.missing:
            if one not in bad:
                one.places.publish(one.place, one.name)
        if bad:
            for one in restore.bad:
                self._files.drop(one.name, self._parts[id(one.places)].name)
            self._kv.begin_again(restore.table, restore.tokens)
            self._kv.look_again(restore.table, restore.ids, restore.tokens)
        if (gained := restore.table.sealed - restore.begun) > 0:
            self.counts.restored += 1
            self.counts.tokens += gained * self._kv.block

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
    def busy(self) -> bool:
        """Whether files are being read."""
        return bool(self._restores)

    def wait(self) -> None:
        """Wait a moment for files that are being read."""
        self._read.wait(WAIT_S)

    def _fill(self, restore: Restore, one: Missing) -> None:
        """Read a file into its place, on a reader's thread."""
        good = False
        try:
            good = not restore.abandoned and self._filled(one)
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
        try:
            part.put(one.place, self._files.sections(one.name, part.name, part.sizes, buffer.data))
        except BadFile as e:
            log.warning(f"{e}; this part of a prompt is computed again")
            with self._lock:
                self.counts.damaged += 1
            return False
        except FileNotFoundError:
            return False  # another process needed the space
        except OSError as e:
            log.warning(f"prompt cache: {e}; this part of a prompt is computed again")
            return False
        with self._lock:
            self.counts.read_bytes += sum(part.sizes)
        return True

    def _buffer(self) -> U8:
        """Return the thread's own place for a section."""
        found: U8 | None = getattr(self._buffers, "own", None)
        if found is None:
            found = self._buffers.own = np.empty(self._largest, np.uint8)
        return found

    # ---- what comes to disk

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
        self._readers.shutdown(cancel_futures=True)
        self._named.put(None)
        self._writer.join()
        self._kv.keeper = None

    def _write_all(self) -> None:
        paused = 0.0
        while (one := self._named.get()) is not None:
            places, name, used_ns = one
            if places is None:
                for part in self._parts.values():
                    self._files.use(name, part.name, used_ns)
            elif time.monotonic() >= paused:
                try:
                    self._write(places, name, used_ns)
                except OSError as e:
                    paused = time.monotonic() + PAUSE_S
                    log.warning(
                        f"{self._files.directory}: prompts are not kept on disk for {PAUSE_S:.0f} s: "
                        f"{e.strerror or e}"
                    )

    def _write(self, places: NamedPlaces, name: bytes, used_ns: int) -> None:
        part, found = self._parts[id(places)], places.find(name)
        if self._files.has(name, part.name):
            self._files.use(name, part.name, used_ns)
        elif found is not None:
            place, turn = found
            copies, valid = part.got(place, self._buffer()), partial(places.unchanged, place, turn)
            written = self._files.write(name, part.name, copies, part.sizes, used_ns, valid)
            self.counts.written_bytes += written
