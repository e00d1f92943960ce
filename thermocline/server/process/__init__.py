"""The engine's process, seen from both sides, and the messages between them."""
