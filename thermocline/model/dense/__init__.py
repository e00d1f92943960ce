"""Readers of dense families that are no Llama: how their halves are normed, scaled, or stand side by side.

`model/families.py` has their table.
"""
