"""Routes: what clients may send and what they are answered. Must not know sockets or who may call."""
