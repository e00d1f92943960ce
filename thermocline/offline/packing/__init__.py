"""The steps of `pack --format`: measuring a model's inputs, writing its pack, measuring what that cost."""
