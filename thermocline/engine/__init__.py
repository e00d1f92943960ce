"""Requests into tokens: scheduling, the one forward pass, keys and values, sampling. Must not know files."""
