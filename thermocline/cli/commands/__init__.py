"""A file for each command or family of small ones: its options, its work, its tables."""
