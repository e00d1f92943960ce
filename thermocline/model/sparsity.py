"""Neurons of an FFN that a step computes, as its user says it."""

from __future__ import annotations

# All that may matter ("exact": those whose gate is not zero, the same answer); of these, those that a
# predictor names; all. Each with its number in the native core.
SPARSITIES = {"exact": 1, "predict": 2, "off": 0}
