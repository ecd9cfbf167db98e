"""A buffer filter: train once more only what the policy gets right sometimes."""

from __future__ import annotations

from collections.abc import Sequence

from millrace import BufferedGroup


def undecided(groups: Sequence[BufferedGroup], *, low: float = 0.2, high: float = 0.8) -> list[BufferedGroup]:
    """Of the groups that may be trained once more, those whose mean reward is between `low` and `high`."""
    return [group for group in groups if group.reward is not None and low <= group.reward <= high]
