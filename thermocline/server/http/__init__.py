"""Sockets, the guard in front of every route, bodies and limits."""
