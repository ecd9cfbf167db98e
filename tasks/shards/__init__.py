"""Rollout and reward cut into shards, each a Ray task."""
