"""Models with multi-head latent attention: readers of configs and GGUFs, for the tables in the room above.

Knows how DeepSeek's families name what `spec.Latent` says; mixtures' readers are the room beside.
"""
