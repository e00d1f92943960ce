"""Models by name: resolve, download, list and remove them."""
