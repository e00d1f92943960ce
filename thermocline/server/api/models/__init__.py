"""Several models in one server: those of a directory by name, loaded on request within one memory budget."""
