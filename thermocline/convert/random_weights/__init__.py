"""Random weights: the content of each tensor of a synthetic model, and its rows as formats store them.

Knows nothing of shapes, packs or files.
"""
