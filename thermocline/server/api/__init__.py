"""Routes: what clients may send, and the answers that they get."""
