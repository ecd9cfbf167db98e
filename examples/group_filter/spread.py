"""A group filter: train only on prompts whose samples differ enough to say something."""

from __future__ import annotations

from collections.abc import Sequence

from millrace import GroupSample


def spread(samples: Sequence[GroupSample], *, least: float = 0.5) -> str | None:
    """Drop a group whose best and worst reward are less than `least` apart. The text is stored as the reason."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    apart = max(rewards) - min(rewards)
    return None if apart >= least else f"rewards are only {apart:g} apart"
