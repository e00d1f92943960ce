"""The memory that a prompt cache takes: what its options say, and how many blocks and states that is.

The part in RAM is more blocks, and more slots of states, than running requests need. So what finished
requests leave is found where it is, without a copy. Beside a GPU it is copies of as many bytes.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from thermocline.engine.kv_cache import BLOCK, blocks_for, layer_bytes
from thermocline.engine.state_pool import CHECKPOINT_TOKENS
from thermocline.errors import UsageError
from thermocline.model.modes import PLAIN, CacheTypes, PromptCacheLimits
from thermocline.model.spec import ModelSpec

READERS = 4  # threads that read files: a disk is at its best with several reads at a time
# Of a file, read, checked and copied at a time: few calls where layers are small, and little memory.
SECTION_BYTES = 1 << 20
_UNIT = CHECKPOINT_TOKENS // BLOCK  # blocks of text that can be continued at one place at least
_MOST_BLOCKS = 1 << 24  # so that block numbers of a layer's heads fit in 32 bits


@dataclass(frozen=True)
class KeptText:
    """The blocks and slots of states that a cache has beside those of running requests."""

    blocks: int = 0
    window_blocks: int = 0
    states: int = 0

    @staticmethod
    def of_text(spec: ModelSpec, blocks: int) -> KeptText:
        """Return what so many blocks of text need, that can be continued every `CHECKPOINT_TOKENS` tokens."""
        window = spec.sliding_window
        near = 0 if window is None else min(_UNIT, blocks_for(window) + 1)  # blocks that a window touches
        places = -(-blocks // _UNIT)
        return KeptText(blocks, -(-blocks * near // _UNIT), places if spec.recurrent is not None else 0)

    @staticmethod
    def within(spec: ModelSpec, limits: PromptCacheLimits, types: CacheTypes = PLAIN) -> KeptText:
        """Return the most that the RAM holds. Raises UsageError where that is not one block."""
        if not limits.ram_bytes:
            return NOTHING_KEPT

        def size(blocks: int) -> int:
            return KeptText.of_text(spec, blocks).nbytes(spec, types)

        blocks = bisect.bisect_right(range(1, _MOST_BLOCKS), limits.ram_bytes, key=size)
        if not blocks:
            least = math.ceil(size(1) / 2**30 * 1e4) / 1e4
            raise UsageError(
                f"--prompt-cache {limits.ram_bytes / 2**30:.4g}: {BLOCK} tokens of this model take more; "
                f"give at least {least:.4f}"
            )
        return KeptText.of_text(spec, blocks)

    def nbytes(self, spec: ModelSpec, types: CacheTypes = PLAIN) -> int:
        """Return the bytes that a cache takes for it."""
        total = 4 * self.states * sum(map(spec.state_floats, range(spec.n_layers)))
        for i in range(spec.n_layers):
            blocks = self.blocks if spec.window(i) is None else self.window_blocks
            total += layer_bytes(spec, i, blocks * BLOCK, types)
        return total


NOTHING_KEPT = KeptText()


def section_bytes(spec: ModelSpec, types: CacheTypes = PLAIN) -> int:
    """Return the bytes that no section of a file exceeds: a part of a block's layers, or a layer's state."""
    largest = max((spec.state_floats(i) * 4 for i in range(spec.n_layers)), default=0)
    return max([SECTION_BYTES, largest, *(layer_bytes(spec, i, BLOCK, types) for i in range(spec.n_layers))])


def prompt_cache_bytes(
    spec: ModelSpec, limits: PromptCacheLimits, types: CacheTypes = PLAIN, *, gpu: bool = False
) -> int:
    """Return the bytes of RAM that a prompt cache takes, with what passes between it and a disk or a GPU."""
    kept = KeptText.within(spec, limits, types)
    passes = limits.directory is not None or (gpu and kept != NOTHING_KEPT)
    return kept.nbytes(spec, types) + passes * (READERS + 1) * section_bytes(spec, types)
