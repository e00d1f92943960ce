"""Commands: their options, what they do, what they print. Must not know kernels or tensors."""
