"""Waiting with a deadline that depends on progress. Knows nothing of what is waited for."""
