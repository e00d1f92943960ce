"""Checkpoints whose tensors are not the matrices that a tensor map names: how they are read as if they were.

Knows how files hold ternary values, stacks of experts and 8-bit floats; which family does so is the tensor
map's.
"""
