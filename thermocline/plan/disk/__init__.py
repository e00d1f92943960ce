"""Models in too little memory: which neurons, or which experts, are left on disk."""
