"""The pack directory and the files beside it. Must not know where packs come from or what computes them."""
