"""Figures of a held-out set from the rewards of its answers. Pure."""
