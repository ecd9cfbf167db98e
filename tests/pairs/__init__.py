"""Every pair of features: refused with the reason, or run together. `python -m tests.pairs` prints the table and its size."""
