"""What a layer computes: in numpy (the specification), natively, on a GPU. Must not know requests."""
