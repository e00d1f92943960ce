"""What a model is: its spec, its families, its tensors and their formats. Must not know packs."""
