"""A session takes no more of a card than its plan says, by the rules of torch's allocator."""

from __future__ import annotations

import weakref
from pathlib import Path

import fake_cuda
import pytest
import torch
from test_gpu_faults import GREEDY, PROMPT, here, measured_before, opened
from torch_memory import MIB, CachingAllocator

from thermocline.ops import cuda
from thermocline.ops.device_sizes import ROUNDING_BYTES, SLAB_STEP
from thermocline.plan.problem import GPU_LIBRARY_BYTES

pytestmark = pytest.mark.oracle
__all__ = ["here", "measured_before"]  # fixtures


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> CachingAllocator:
    """That of a card."""
    found = CachingAllocator()

    class Counting(fake_cuda.Card):
        def made(self, where: set[int], made: torch.Tensor) -> torch.Tensor:
            if where is self.there and made.nbytes:
                weakref.finalize(made.untyped_storage(), found.free, found.take(made.nbytes))
            return super().made(where, made)

        def emptied(self) -> None:
            found.empty()

    fake_cuda.install(monkeypatch, Counting())
    return found


def test_torchs_allocator_rounds_as_its_source_says() -> None:
    a = CachingAllocator()
    small = [
        a.take(n) for n in (1, 513, MIB, MIB)
    ]  # 512 + 1024 bytes + 1 MiB, and one that has no room there
    assert a.held == 4 * MIB
    a.take(3 * MIB), a.take(9 * MIB), a.take(7 * MIB)  # the last MiB is too little to be a block of its own
    assert a.held == 24 * MIB
    large = a.take(10 * MIB + 1)
    assert a.held == 36 * MIB
    a.free(large)
    assert a.held == 24 * MIB
    for block in small:
        a.free(block)
    assert a.held == 20 * MIB and [len(s.blocks) for s in a.segments] == [1, 1, 3, 1]


def test_a_slab_is_of_what_was_counted(memory: CachingAllocator) -> None:
    """8 tensors of a little more than 10 MiB would take 12 MiB each."""
    shapes = [((1000, 1000), torch.float16), ((3,), torch.int32), ((0, 7), torch.uint8)]
    shapes += [((10 * MIB + 999,), torch.uint8)] * 8
    counted = sum(torch.empty(s, dtype=d, device="meta").nbytes for s, d in shapes) + ROUNDING_BYTES
    device = cuda.Cuda(0)
    device.reserve(counted)
    made = [device.zeros(*one) for one in shapes]
    assert [(tuple(x.shape), x.dtype) for x in made] == shapes and not any(x.any() for x in made)
    assert 80 * MIB < memory.held <= counted
    for i, x in enumerate(made):
        x.fill_(i + 1)
    assert all(bool((x == i + 1).all()) for i, x in enumerate(made)), "none overlaps another"
    assert all(x.storage_offset() * x.itemsize % 256 == 0 for x in made)
    beside = device.zeros((11 * MIB,), torch.uint8)  # more than was counted
    assert memory.held > counted and not beside.any()
    device.close()
    del made, beside, x
    assert memory.held == 0


def test_a_session_takes_what_its_plan_says(tiny_pack: Path, memory: CachingAllocator) -> None:
    with opened(tiny_pack, 0.9) as llm:
        llm.generate(PROMPT, GREEDY)
        plan = llm.session.plan
        assert plan is not None and plan.share == 1
        promised = plan.used("gpu") - GPU_LIBRARY_BYTES
        assert promised - SLAB_STEP < memory.held <= promised
        assert sum(any(b.used for b in s.blocks) for s in memory.segments) == 1, "all of it is one slab"
    assert memory.held == 0
