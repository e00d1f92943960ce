"""The speed of a disk, by scripted disks: where it is read, and which of its speeds count."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thermocline import _native
from thermocline.machine import disk_speed
from thermocline.machine.disk_speed import BLOCK, LIMIT, SEQUENTIAL_DEPTH, TimedReads, measure_file

GB = 10**9


class Disk:
    """A disk that reads at `held` GB/s what was read before, and the rest at `new`; in a round at less."""

    def __init__(self, *, held: float, new: float, slow_rounds: tuple[int, ...] = ()) -> None:
        self.held, self.new, self.slow_rounds = held, new, slow_rounds
        self.calls: list[list[int]] = []  # the blocks of each measurement
        self.seen: set[int] = set()

    def __call__(self, path: Path, offsets: Any, nbytes: int, depth: int, seconds: float) -> TimedReads:
        in_round = (len(self.calls) + 2) // 3  # after what was read first: in order, small, in pieces
        gbs = self.held / 4 if in_round in self.slow_rounds else self.held
        took, blocks = 0.0, []
        for n, block in enumerate((offsets // BLOCK).tolist()):
            if took >= seconds and n >= depth:
                break
            took += nbytes / GB / (gbs if block in self.seen else self.new)
            self.seen.add(block)
            blocks.append(block)
        self.calls.append(blocks)
        return TimedReads(len(blocks), took, True)


def measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, disk: Disk, size: int = 14 << 30
) -> disk_speed.DiskSpeed:
    (file := tmp_path / "weights").touch()
    os.truncate(file, size)
    monkeypatch.setattr(disk_speed, "_measure", disk)
    return measure_file(file)


def test_a_file_that_the_host_does_not_hold_has_the_speed_that_it_gets_once_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Plans on a new virtual machine were 3 times too low: random reads hardly met a block twice."""
    found = measured(monkeypatch, tmp_path, Disk(held=2.0, new=0.2))
    assert found.sequential_gbs == pytest.approx(2.0) and found.pieces_gbs == pytest.approx(2.0)
    assert found.random_iops == pytest.approx(2e9 / 4096)
    assert found.why == (
        "this disk's speed varies: 0.20 where nobody has read it lately to 2.00 GB/s in order; 2.00 counts"
    )


def test_a_steady_disk_needs_no_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = measured(monkeypatch, tmp_path, Disk(held=2.0, new=1.1))
    assert found.sequential_gbs == pytest.approx(2.0) and found.why is None


def test_one_slow_round_is_said_and_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = measured(monkeypatch, tmp_path, Disk(held=2.0, new=2.0, slow_rounds=(2,)))
    assert found.sequential_gbs == pytest.approx(2.0) and found.pieces_gbs == pytest.approx(2.0)
    for said in (
        "varies: 0.50 to 2.00 GB/s in order; 2.00 counts",
        "varies: 0.50 to 2.00 GB/s in pieces of 256 KiB; 2.00 counts",
        "varies: 122,070 to 488,281 reads/s of 4 KiB; 488,281 counts",
    ):
        assert said in (found.why or "")


def test_a_disk_that_becomes_slow_is_as_slow_as_it_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = measured(monkeypatch, tmp_path, Disk(held=2.0, new=2.0, slow_rounds=(2, 3)))
    assert found.sequential_gbs == pytest.approx(0.5)
    assert "0.50 to 2.00 GB/s in order; 0.50 counts" in (found.why or "")


@pytest.mark.parametrize("new", [2.0, 0.02])  # a slow one reads 40 MB before, and those are measured
def test_the_sample_lies_all_over_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, new: float
) -> None:
    disk, size = Disk(held=2.0, new=new), 14 << 30
    measured(monkeypatch, tmp_path, disk, size)
    first, *rounds = disk.calls
    assert len(first) == len(set(first)) <= LIMIT // BLOCK
    parts = 16 if new == 2.0 else 3
    assert set(np.array(first) * parts * BLOCK // size) == set(range(parts))
    assert all(set(blocks) <= set(first) for blocks in rounds) and len(rounds) == 9


@pytest.mark.parametrize("blocks", [1, 3, 5, 128, 131])
def test_of_a_small_file_all_blocks_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, blocks: int
) -> None:
    disk = Disk(held=2.0, new=2.0)
    measured(monkeypatch, tmp_path, disk, blocks * BLOCK + 100)
    read = set(disk.calls[0])
    assert max(read) == blocks - 1 and (blocks > LIMIT // BLOCK or read == set(range(blocks)))


def test_where_the_page_cache_helps_it_is_emptied_before_each_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else a sample that was read before would be read from memory."""
    done: list[str] = []

    class Through:
        alignment = 1

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def measure(self, offsets: Any, nbytes: int, seconds: float) -> tuple[int, int]:
            done.append("read")
            return SEQUENTIAL_DEPTH, 0

    monkeypatch.setattr(_native, "Reader", Through)
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: done.append("forget"), raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_DONTNEED", 4, raising=False)
    (file := tmp_path / "weights").touch()
    os.truncate(file, LIMIT)
    found = measure_file(file, times=1)
    assert done == ["forget", "read"] * 4
    assert not found.direct and "upper bound" in (found.why or "")
