"""Decide where a model lies and how fast a token then is, before a weight is read."""
