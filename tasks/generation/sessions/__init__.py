"""Rollouts of several turns: turns are generated on request, recorded at once, and found again after a crash."""
