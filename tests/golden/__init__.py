"""Losses and gradient norms of fifty steps a family, kept as files: `python -m tests.golden --help`."""
