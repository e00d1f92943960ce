"""Texts of finished requests, in memory and on disk. It knows no request and no model's weights."""
