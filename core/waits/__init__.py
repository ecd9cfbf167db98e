"""Waiting with a deadline that looks at progress. Knows nothing of what is waited for."""
