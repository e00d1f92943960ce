"""Readers of models with recurrent layers: configs, where their tensors are, and where a GGUF has them."""
