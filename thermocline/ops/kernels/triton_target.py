"""Device code: what the card that a kernel is compiled for can do."""

from __future__ import annotations

import triton
from triton.language.target_info import current_target


@triton.constexpr_function
def assembles():
    """Whether it takes PTX: neither the interpreter does nor AMD's compiler."""
    target = None if triton.knobs.runtime.interpret else current_target()
    return not triton.knobs.runtime.interpret and (target is None or target.backend == "cuda")


@triton.constexpr_function
def precision(wanted):
    """How f32 are multiplied: as `wanted` by NVIDIA's tensor cores, elsewhere whole."""
    return wanted if assembles() else "ieee"
