"""Answers as they come, split into content, thoughts and calls, in each form that templates have.

Knows nothing of requests and of HTTP.
"""
