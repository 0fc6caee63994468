"""A small serving loop for the demo, the tests and the benchmarks."""
