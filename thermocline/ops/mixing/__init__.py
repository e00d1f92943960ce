"""How layers mix tokens on GPUs otherwise than by heads of keys and values: latents, and states."""
