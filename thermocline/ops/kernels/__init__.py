"""A GPU's kernels, in plain torch and in Triton. They know shapes and formats, not layers or steps."""
