"""Reference models (Flax NNX) that run from the cache."""
