"""Whether engines answer fixed texts as the trainer does, and by the version that they were just given.

Pure: holds log-probabilities, and asks nobody for them.
"""

from dataclasses import dataclass

import numpy as np

Logprobs = list[list[float]]
"""For each text: log-probabilities of its tokens after the first; nats."""
MOVED = 3.0


def mean_gap(one: Logprobs, other: Logprobs) -> float:
    """Mean absolute difference over all tokens; NaN if an engine gave no number. Nats a token."""
    pairs = [pair for left, right in zip(one, other, strict=True) for pair in zip(left, right, strict=True)]
    return float(np.mean([abs(left - right) for left, right in pairs]))


@dataclass
class EarlierVersions:
    """The trainer's log-probabilities at the first sync of this process, and at the last one."""

    first: Logprobs | None = None
    last: Logprobs | None = None

    def note(self, expected: Logprobs) -> None:
        """Add the version that was just compared."""
        self.first, self.last = self.first or expected, expected

    def answer(self, expected: Logprobs, found: Logprobs) -> bool:
        """Whether an engine's log-probabilities fit an earlier version, where the trainer's are `expected`.

        They do if the trainer moved from there more than MOVED times as far as the engine is from there, or if the engine gave no
        numbers. Smaller moves hide in rounding, and pass; they grow with the steps since the first version.
        """
        earlier = [logprobs for logprobs in (self.first, self.last) if logprobs is not None]
        return any(not mean_gap(expected, at) <= MOVED * mean_gap(at, found) for at in earlier)
