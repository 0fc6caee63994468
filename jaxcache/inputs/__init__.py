"""What the host gives a step: its shapes and its one packed array. NumPy only."""
