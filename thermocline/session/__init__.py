"""A pack in memory, on the tiers it was given: RAM, disk, GPU."""
