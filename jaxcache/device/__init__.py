"""The cache in device memory: pools, the functions on them, steps in place."""
