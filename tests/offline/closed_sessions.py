"""What sessions were, when they were closed: for commands that open their own."""

from __future__ import annotations

import pytest

from thermocline.session.session import Session

Closed = tuple[bool, int, int]  # whether it read from disk, its bytes, how often it missed


def watch_sessions(monkeypatch: pytest.MonkeyPatch) -> list[Closed]:
    """Return a list that gets each session that is closed from now on."""
    seen: list[Closed] = []
    unload = Session.unload

    def spied(session: Session) -> None:
        if session.store is not None:
            seen.append((session.from_disk, session.memory_bytes, session.store.counts().missed))
        unload(session)

    monkeypatch.setattr(Session, "unload", spied)
    return seen
