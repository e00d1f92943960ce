"""How routers pick experts: choices recorded from a model or read from a trace, and their statistics."""
