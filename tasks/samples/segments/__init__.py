"""Answers that were begun before: what is stored of them, and what follows on it."""
