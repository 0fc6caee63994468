"""The cache seen from the host: requests, plans, prefixes, eviction. No JAX."""
