"""The engine turns requests into tokens: scheduling, the forward pass, keys and values, sampling."""
