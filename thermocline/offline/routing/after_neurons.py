"""A ReLU mixture's profile is made in two parts: of its neurons, then of its experts.

Ctrl-C in the second one leaves a pack with the first, and a checkpoint beside it that says so.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from thermocline.errors import ThermoclineError
from thermocline.offline.profiler import ProfileResult
from thermocline.offline.routing.route_checkpoint import UNFINISHED, RouteCheckpoint
from thermocline.pack.activity_profile import SAMPLES, open_profile, open_samples
from thermocline.pack.pack import Pack

if TYPE_CHECKING:
    from thermocline.offline.profiler import ProfileJob


def neurons_counted(r: ProfileJob) -> ProfileResult | None:
    """Return the result of a job whose neurons are counted, and whose experts are not; else None."""
    n = min(r.samples, r.corpus.tokens)
    if not (r.output / UNFINISHED).exists():
        return None
    try:
        pack = Pack.open(r.output)
        made = open_profile(pack)
        if made is None or (made.corpus, made.tokens) != (r.corpus.sha256, r.corpus.tokens):
            return None
        with open_samples(pack) or nullcontext() as samples:
            same = (0 if samples is None else samples.n) == n
    except ThermoclineError:
        return None
    if not same or not RouteCheckpoint(pack, r.corpus, r.context).begun:
        return None
    samples_bytes = (r.output / SAMPLES).stat().st_size if n else 0
    return ProfileResult(made, n, samples_bytes, None, made.tokens, ())
