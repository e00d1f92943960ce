"""Places that are held by counted holders, and found by the name of the text that they hold."""

from __future__ import annotations

from collections import OrderedDict


class NamedPlaces:
    """`n` places: blocks of keys and values, or slots of states.

    A place is free, used (somebody holds it), or cached (nobody does, but its text may come again). A place
    has a name when what it holds is complete. The least recently used cached one is given out first.
    """

    def __init__(self, n: int) -> None:
        self._refs = [0] * n
        self._turns = [0] * n  # how often each was given out
        self._free = list(range(n - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the first to go first
        self._by_name: dict[bytes, int] = {}
        self._name: dict[int, bytes] = {}

    def __contains__(self, name: bytes) -> bool:
        return name in self._by_name

    @property
    def available(self) -> int:
        """Return the number of places that can be given out: free ones, and cached ones by eviction."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return len(self._refs) - self.available

    def take(self) -> int:
        """Take a free place, or evict the first cached one."""
        if self._free:
            place = self._free.pop()
        else:
            place, _ = self._cached.popitem(last=False)
            self._unname(place)
        self._refs[place] = 1
        self._turns[place] += 1
        return place

    def find(self, name: bytes) -> tuple[int, int] | None:
        """Return the place of this name and its turn, to any thread; None: there is none."""
        place = self._by_name.get(name)
        if place is None:
            return None
        turn = self._turns[place]
        return (place, turn) if self._by_name.get(name) == place else None

    def unchanged(self, place: int, turn: int) -> bool:
        """Return, to any thread, whether a named place still holds what it held when `find` returned it.

        A place is written to after it was taken and before it is named, so its bytes were those of the name
        all the time if nobody has taken it since.
        """
        return self._turns[place] == turn

    def hold(self, name: bytes) -> int:
        """Hold the place of this name, too."""
        place = self._by_name[name]
        self._cached.pop(place, None)
        self._refs[place] += 1
        return place

    def publish(self, place: int, name: bytes) -> bool:
        """Name a place. Return False if there is an equal one: then this one stays private."""
        if name in self._by_name:
            return False
        self._by_name[name], self._name[place] = place, name
        return True

    def release(self, place: int) -> None:
        self._refs[place] -= 1
        assert self._refs[place] >= 0, f"place {place} released more often than held"
        if self._refs[place] == 0:
            if place in self._name:
                self._cached[place] = None
            else:
                self._free.append(place)

    def let_go_first(self, place: int) -> None:
        """Give a cached place out before others."""
        if place in self._cached:
            self._cached.move_to_end(place, last=False)

    def check_integrity(self) -> None:
        """Assert that every place has exactly one state, and that the index agrees."""
        free, cached = set(self._free), set(self._cached)
        used = {p for p, refs in enumerate(self._refs) if refs > 0}
        assert min(self._refs, default=0) >= 0, "negative reference count"
        assert len(free) == len(self._free), "a place is free twice"
        assert len(free) + len(used) + len(cached) == len(self._refs), "places lost"
        assert not (free & cached or free & used or cached & used), "a place is in two states"
        assert cached <= self._name.keys() and not free & self._name.keys(), "cached: findable; free: not"
        assert {place: name for name, place in self._by_name.items()} == self._name, "index disagrees"

    def _unname(self, place: int) -> None:
        del self._by_name[self._name.pop(place)]
