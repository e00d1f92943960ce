"""Weights into few bits: the search for the best bytes, the importance of columns, a format for each tensor. It must not know how a model runs."""
