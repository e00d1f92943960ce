"""Gemma 2, 3 and 4: layers with and without a window, whose halves are normed on both sides.

It owns how their configs and GGUFs are read; the arithmetic is the spec's.
"""
