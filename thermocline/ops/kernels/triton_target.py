"""Device code: what the card that a kernel is compiled for can do, and launches that overlap.

A launch that overlaps (`launch_pdl`, sm_90 and later) may begin once every program of the one before it has
begun and called `follow`. There it waits until that one has ended and all that it wrote is seen. Every kernel
calls `follow` before it reads or writes anything, so a launch that has ended means that all before it have.
What comes earlier is `fetch_ahead` alone: the L2 stays coherent, so no answer can depend on it.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import current_target

from thermocline.options import switched

LINE: tl.constexpr = tl.constexpr(128)  # bytes of the L2's
AHEAD: tl.constexpr = tl.constexpr(128)  # lines of a program: one of each thread's, 16 KiB


@triton.constexpr_function
def assembles():
    """Whether it takes PTX: neither the interpreter does nor AMD's compiler."""
    target = None if triton.knobs.runtime.interpret else current_target()
    return not triton.knobs.runtime.interpret and (target is None or target.backend == "cuda")


@triton.constexpr_function
def precision(wanted):
    """How f32 are multiplied: as `wanted` by NVIDIA's tensor cores, elsewhere whole."""
    return wanted if assembles() else "ieee"


def overlaps() -> bool:
    """Whether launches overlap: that is asked for, and this thread's present GPU can."""
    if not switched(os.environ, "overlap"):
        return False
    target = current_target()
    return target is not None and target.backend == "cuda" and bool(target.arch >= 90)


def by_warpgroups() -> bool:
    """Return whether tiles are for products of four warps together, of 64 rows at least: sm_90 to sm_110
    have them, sm_120 has none. AMD's GPUs and the interpreter take such tiles, too: nothing is tuned there.
    """
    target = current_target()
    return target is None or target.backend != "cuda" or 90 <= target.arch < 120


@tl.core.extern
def overlapping(_semantic=None):
    """Whether what is compiled is for launches that overlap: `launch_pdl` is an option of a compilation."""
    return tl.constexpr(_semantic.builder.options.launch_pdl)


@triton.jit
def follow():
    """Wait for the launch before this one, then let the next one begin. Else nothing."""
    if assembles():
        if overlapping():
            gdc_wait()
            gdc_launch_dependents()


@triton.jit
def last_of(arrivals, programs):
    """Whether this program is the last of so many to come here. Then it sees what they wrote before that.

    They count in one i32 at `arrivals`, which is 0 again afterwards. What the last one does must not depend
    on which it is. It reads what others wrote from the L2 (".cg").
    """
    tl.debug_barrier()  # every thread has written
    last = tl.atomic_add(arrivals, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(arrivals, 0)
    return last


@triton.jit
def fetch_ahead(data, row, rows, stride):
    """Have the beginnings of rows `row` [R], of so many, brought to the L2; rows are `stride` bytes apart.

    Only where launches overlap, and only of what is read for certain.
    """
    if assembles():
        if overlapping():
            LINES: tl.constexpr = max(1, AHEAD // row.shape[0])
            row = tl.minimum(row, rows - 1).to(tl.int64)
            byte = tl.minimum(tl.arange(0, LINES) * LINE, stride - 1)
            at = (data + row[:, None] * stride + byte[None, :]).to(tl.uint64)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; // $0", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
            )
