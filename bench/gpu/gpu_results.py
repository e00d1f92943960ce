"""The file of records that bench/gpu/gpu.py keeps: written after each, so that a call cut off loses one.

What could not be measured is a record, too: for good where it cannot be, tried again by the next call where
it might (a disk that was full, a card that failed), and by each call where RAM was too small. What was cut
off in its midst TRIES times is left out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_report import targets_json

from thermocline.errors import IOFailure, UsageError

KIND = "thermocline-gpu-bench"
TRIES = 2


@dataclass
class Results:
    path: Path
    facts: dict[str, Any]  # of every record
    items: dict[str, dict[str, Any]] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)  # how often, without an end
    private: tuple[Path, ...] = ()  # directories that no record names

    @staticmethod
    def of(path: Path, facts: dict[str, Any], private: tuple[Path, ...] = ()) -> Results:
        try:
            found = json.loads(path.read_text()) if path.exists() else {"kind": KIND, "items": {}}
        except ValueError:
            found = {}
        if not isinstance(found, dict) or found.get("kind") != KIND:
            raise UsageError(f"{path}: not written by bench/gpu/gpu.py; give another --results")
        made = Results(path, facts, found["items"], found.get("begun", {}), private)
        try:
            made._write()  # what is measured for minutes can be kept
        except OSError as e:
            raise IOFailure(f"{path}: cannot be written ({e.strerror}); give another --results") from None
        return made

    def wanted(self, key: str) -> bool:
        found = self.items.get(key)
        return found is None or bool(found.get("again"))

    def begin(self, key: str) -> bool:
        """False where it was begun too often and never ended: then there is a record of that."""
        tries = self.begun.get(key, 0)
        if tries >= TRIES:
            self.add(
                key, {"refused": f"cut off {tries} times in its midst: it needs longer calls (--budget-s)"}
            )
            return False
        self.begun[key] = tries + 1
        self._write()
        return True

    def add(self, key: str, record: Mapping[str, Any]) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.items[key] = {**self.facts, "time": now, **record}
        self.begun.pop(key, None)
        self._write()

    def refuse(
        self, key: str, why: BaseException | str, *, again: bool = False, always: bool = False
    ) -> None:
        """`again`: the next call is to try it, but not for ever; `always`: each call is."""
        tries = self.items.get(key, {}).get("tries", 0) + 1
        again = always or (again and tries < TRIES)
        self.add(key, {"refused": self.said(why), "tries": tries, "again": again})

    def said(self, why: BaseException | str) -> str:
        """One line, without the directories of the machine it was measured on."""
        text = str(why).strip() or type(why).__name__
        for directory in sorted(map(str, self.private), key=len, reverse=True):
            text = text.replace(directory, "…")
        return text.splitlines()[0]

    def _write(self) -> None:
        whole = {"kind": KIND, "items": self.items, "begun": self.begun, "targets": targets_json(self.items)}
        partial = self.path.with_suffix(".tmp")
        partial.write_text(json.dumps(whole, indent=1) + "\n")
        partial.replace(self.path)
