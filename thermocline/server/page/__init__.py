"""The chat page: its files, by an exact table of names."""
