"""Bounded reading of untrusted files."""
