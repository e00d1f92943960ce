"""Conversion: Hugging Face and GGUF models into packs, packs into GGUF, and synthetic models."""
