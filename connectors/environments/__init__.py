"""Environments of other packages, as environments of a rollout. Each needs an extra of its own name."""
