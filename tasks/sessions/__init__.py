"""Rollouts of several turns: what a session asks for is generated, recorded as it happens, and found again after a crash."""
