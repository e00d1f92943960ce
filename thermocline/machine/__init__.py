"""What this machine is and how fast each tier of it is. Must not know models."""
