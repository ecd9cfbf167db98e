"""How old the policy was that generated a token, in weight versions, and which versions may generate what. Pure.

An iteration i is trained on the weights that the one before it made. With L iterations ahead it opens when iteration i-L-1 is
trained and its weights are served. So each of its tokens is made by a version that is at most L iterations older than the
one that it trains, and nothing need be dropped for its age. What is deferred to a later iteration is one version older for each
time it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.core.contracts.sample import PolicySpan


@dataclass(frozen=True)
class VersionRange:
    """Weight versions that may generate something, both ends included."""

    oldest: int
    newest: int

    @classmethod
    def only(cls, version: int) -> VersionRange:
        """One version."""
        return cls(version, version)

    @property
    def is_one(self) -> bool:
        """Whether one version generates all of it."""
        return self.oldest == self.newest

    def __contains__(self, version: object) -> bool:
        return isinstance(version, int) and self.oldest <= version <= self.newest

    def nearest(self, version: int) -> int:
        """The version of the range that is nearest to another."""
        return min(max(version, self.oldest), self.newest)


@dataclass(frozen=True)
class Ahead:
    """How many iterations may be open ahead of the trained one, by the iteration that is drawn: `pipeline.ahead` over a run's life.

    spans: the first iteration of each setting, and its value, in order. Iterations before the first have 0.
    """

    spans: tuple[tuple[int, int], ...] = ()

    def at(self, iteration: int) -> int:
        """Iterations that might be open before this one when it was drawn."""
        return next((ahead for since, ahead in reversed(self.spans) if since <= iteration), 0)

    def since(self, iteration: int, ahead: int) -> Ahead:
        """The same with another value from an iteration on; itself if that is its value already."""
        before = tuple(span for span in self.spans if span[0] < iteration)
        kept = Ahead(before)
        return kept if kept.at(iteration) == ahead else Ahead((*before, (iteration, ahead)))


def staleness(policy_versions: Sequence[PolicySpan], version: int) -> int:
    """Versions between a sample's oldest token and the weights `version` that are about to be trained; 0 if it has no token."""
    return version - min((span["version"] for span in policy_versions), default=version)


def admissible(oldest: int, iteration: int, max_staleness: int, steps: int) -> bool:
    """Whether a token may be trained in an iteration. oldest: the weight version that made it. steps: of an iteration."""
    return oldest >= (iteration - max_staleness) * steps
