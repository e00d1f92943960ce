"""Models by name: resolve, download, list and remove them. Must not know what is in them."""
