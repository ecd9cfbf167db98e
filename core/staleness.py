"""How old the policy was that generated a sample, in weight versions. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.core.contracts.sample import PolicySpan


def staleness(policy_versions: Sequence[PolicySpan], version: int) -> int:
    """Versions between a sample's oldest token and the weights `version` that are about to be trained; 0 if it has no token."""
    return version - min((span["version"] for span in policy_versions), default=version)
