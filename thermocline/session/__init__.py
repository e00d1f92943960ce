"""A pack in memory, on the tiers it was given: RAM, disk, GPU. Must not know requests or flags."""
