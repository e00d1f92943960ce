"""Whether a card may be trusted: its answers for a miniature of a model, beside the CPU's.

It knows no plans and no requests. `verdicts` needs no torch; a child process runs `comparison`.
"""
