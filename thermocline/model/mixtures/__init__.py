"""Mixtures of experts: readers of their families' configs and GGUFs, for the tables in the room above.

Knows how each family names its router's rule; everything else is `hf_config.py`'s and `gguf_metadata.py`'s.
"""
