"""The chat page: its files, and the exact table of their paths."""
