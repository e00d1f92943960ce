"""Bounded reading of files that nobody vouches for. Must not know models."""
