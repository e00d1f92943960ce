"""Sockets, the guard in front of every route, bodies and limits. Must not know what routes do."""
