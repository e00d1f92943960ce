"""What torch's caching allocator takes of a card: c10/cuda/CUDACachingAllocator.cpp, of one stream."""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 1 << 20
STEP, SMALL = 512, MIB  # bytes of the smallest block; of the largest one that lies among small ones
SMALL_SEGMENT, SEGMENT = 2 * MIB, 20 * MIB  # what it asks the card for; where 10 MiB and more are wanted,
LEAST_OWN, OWN_STEP = 10 * MIB, 2 * MIB  # as much, in steps of 2 MiB


@dataclass(eq=False)
class Block:
    nbytes: int
    used: bool = False


@dataclass(eq=False)
class Segment:
    nbytes: int
    small: bool
    blocks: list[Block] = field(default_factory=list)


class CachingAllocator:
    """Segments of blocks. Each block that is asked for is the smallest free one that is large enough."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    @property
    def held(self) -> int:
        """Bytes of the segments that something lies in; others go back before memory is said to be full."""
        return sum(s.nbytes for s in self.segments if any(b.used for b in s.blocks))

    def empty(self) -> None:
        self.segments = [s for s in self.segments if any(b.used for b in s.blocks)]

    def take(self, nbytes: int) -> Block:
        n = max(STEP, -(-nbytes // STEP) * STEP)
        small = n <= SMALL
        fit = [(b.nbytes, i, b) for i, s in enumerate(self.segments) if s.small == small
               for b in s.blocks if not b.used and b.nbytes >= n]  # fmt: skip
        if fit:
            _, at, block = min(fit, key=lambda x: x[:2])
            segment = self.segments[at]
        else:
            size = SMALL_SEGMENT if small else SEGMENT if n < LEAST_OWN else -(-n // OWN_STEP) * OWN_STEP
            block = Block(size)
            segment = Segment(size, small, [block])
            self.segments.append(segment)
        left = block.nbytes - n
        if left >= STEP if small else left > SMALL:
            segment.blocks.insert(segment.blocks.index(block) + 1, Block(left))
            block.nbytes = n
        block.used = True
        return block

    def free(self, block: Block) -> None:
        block.used = False
        for segment in self.segments:
            joined: list[Block] = []
            for b in segment.blocks:
                if joined and not (b.used or joined[-1].used):
                    joined[-1] = Block(joined[-1].nbytes + b.nbytes)
                else:
                    joined.append(b)
            segment.blocks = joined
