"""The ops of a layer: in numpy (the specification), natively, on GPUs."""
