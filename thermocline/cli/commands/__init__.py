"""One file for each command or family of small ones: its options, what it does, what it prints."""
