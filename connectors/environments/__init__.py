"""Environments of other packages, wrapped for rollouts. Each needs the extra that has its name."""
