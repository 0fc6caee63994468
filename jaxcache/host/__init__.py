"""The manager: requests, and plans of what each step does for them. No JAX."""
