"""The inference cache for hybrid language models in JAX."""
