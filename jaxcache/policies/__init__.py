"""Where snapshots are taken, and what goes first when room is short. No JAX."""
