"""Weights in few bits: the search for the best bytes, and the importance of columns."""
