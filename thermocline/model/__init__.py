"""The description of a model: its spec, its family, its tensors and their formats."""
