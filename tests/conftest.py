"""Fixtures that several test files share. No network, no GPU, no global state."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Third-party data beside the repository; tests that use it carry the `shared` mark."""
    if not SHARED.is_dir():
        pytest.skip(f"needs {SHARED}, which is not here")
    return SHARED


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The person's own THERMOCLINE_ variables and cache stay out of the tests; ISA stays, so a level can be tested."""
    for name in list(os.environ):
        if name.startswith("THERMOCLINE_") and name != "THERMOCLINE_ISA":
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
