"""Reports on a product's kernel, from what its objects say and a small product that the emulator has run."""
