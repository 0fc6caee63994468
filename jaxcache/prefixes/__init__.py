"""What is known: the prefix tree, its pages and snapshots, who holds them. No JAX."""
