"""The steps of `pack --format` for which the model runs: measuring what its inputs are like, and what a pack cost."""
