"""Readers of models whose FFNs have ReLU by nature."""
