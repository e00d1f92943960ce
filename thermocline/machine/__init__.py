"""Facts about this machine and the speed of each of its tiers."""
