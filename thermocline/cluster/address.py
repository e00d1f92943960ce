"""The address of a Ray cluster, as a person writes it. Nothing heavy is imported: `--help` reads this."""

from __future__ import annotations

import re

LOCAL = "local"  # a Ray that is started on this machine
_ADDRESS = re.compile(r"(?:ray://)?(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})")


def ray_address(text: str) -> str:
    """Parse the value of --ray, which may be missing."""
    if not text:
        return LOCAL
    if text in (LOCAL, "auto") or ((found := _ADDRESS.fullmatch(text)) and 0 < int(found[2]) < 1 << 16):
        return text
    raise ValueError("must be HOST:PORT of a cluster's head, ray://HOST:PORT, auto, or local")


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of an address that has them."""
    found = _ADDRESS.fullmatch(address)
    assert found is not None, "the option was parsed"
    return found[1].strip("[]"), int(found[2])
