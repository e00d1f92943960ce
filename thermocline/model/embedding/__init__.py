"""Models whose answer is a vector: encoders, and how the hidden states of any model become one."""
