"""Recipes and deployment files that ship with the flows."""
