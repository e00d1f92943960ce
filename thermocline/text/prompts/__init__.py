"""Prompts of models that are asked in a form of their own, and what their answers say."""
