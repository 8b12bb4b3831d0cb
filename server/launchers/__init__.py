"""Ways to start the workers of a pool."""
