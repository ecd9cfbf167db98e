"""How old the policy was that generated a token, in weight versions, and which versions may generate what. Pure.

Iteration i is trained on the weights that iteration i-1 made. With L iterations ahead it opens when iteration i-L-1 is
trained and its weights are served. So each of its tokens is made by a version at most L iterations older than the weights it
trains, and nothing need be dropped for its age. Each deferral makes tokens one version older.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.core.contracts.sample import PolicySpan

LOW_IN_A_ROW = 3  # iterations: one odd batch says little about the setting


@dataclass(frozen=True)
class VersionRange:
    """Weight versions that may generate something, both ends included."""

    oldest: int
    newest: int

    @classmethod
    def only(cls, version: int) -> VersionRange:
        """One version."""
        return cls(version, version)

    def __contains__(self, version: object) -> bool:
        return isinstance(version, int) and self.oldest <= version <= self.newest

    def nearest(self, version: int) -> int:
        """The version of the range that is nearest to another."""
        return min(max(version, self.oldest), self.newest)


@dataclass(frozen=True)
class Ahead:
    """How many iterations may be open ahead of the trained one, for each drawn iteration: `pipeline.ahead` over a run's life.

    spans: the first iteration of each setting, and its value, in order. Iterations before the first have 0.
    """

    spans: tuple[tuple[int, int], ...] = ()

    def at(self, iteration: int) -> int:
        """Iterations that might be open before this one when it was drawn."""
        return next((ahead for since, ahead in reversed(self.spans) if since <= iteration), 0)

    def since(self, iteration: int, ahead: int) -> Ahead:
        """A copy with another value from an iteration on; itself if it has that value already."""
        before = tuple(span for span in self.spans if span[0] < iteration)
        kept = Ahead(before)
        return kept if kept.at(iteration) == ahead else Ahead((*before, (iteration, ahead)))


def oldest_versions(policy_versions: pa.ChunkedArray, none: int) -> npt.NDArray[np.int64]:
    """Weight version that made the oldest token of each sample; `none` for a sample that no span covers."""
    found = np.full(len(policy_versions), none, np.int64)
    first = 0
    for lists in policy_versions.chunks:
        counts = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        versions = lists.flatten().field("version").to_numpy(zero_copy_only=False)
        covered = np.flatnonzero(counts)
        starts = (np.cumsum(counts) - counts)[covered]
        if len(covered):
            found[first + covered] = np.minimum.reduceat(versions, starts)
        first += len(lists)
    return found


def lowered(ahead: Ahead, iteration: int, ess: Mapping[int, float | None], min_ess: float) -> Ahead:
    """The setting for an iteration that is about to be drawn: `ahead`, or a lower value from this iteration on.

    ess: `train/ess` by iteration. Only iterations count that must be committed before this one may be drawn, and that were
    drawn under the present setting, so that a repeated decision is the same. See `ahead_after`.
    """
    now = ahead.at(iteration)
    since = max((first for first, _ in ahead.spans if first <= iteration), default=0)
    committed = range(max(since, iteration - now - LOW_IN_A_ROW), iteration - now)
    return ahead.since(iteration, ahead_after([ess.get(index) for index in committed], now, min_ess))


def admissible(oldest: int, iteration: int, max_staleness: int, steps: int) -> bool:
    """Whether a token may be trained in an iteration. oldest: the weight version that made it. steps: of an iteration."""
    return oldest >= (iteration - max_staleness) * steps


def token_ages(
    policy_versions: Sequence[PolicySpan], length: int, trained: int, steps: int
) -> npt.NDArray[np.int64]:
    """Age of each response token [length]: published versions between its own and `trained`, at least 0.

    One version is published an iteration, of `steps` optimizer steps. trained: the weight version that the iteration starts
    from. A version between two published ones, as after an iteration with another number of steps, counts as the older of them.
    Tokens that no span covers have age 0.
    """
    ages = np.zeros(length, np.int64)
    ends = [*(span["first_token"] for span in policy_versions[1:]), length]
    for span, end in zip(policy_versions, ends, strict=True) if policy_versions else ():
        ages[span["first_token"] : end] = max(0, -((span["version"] - trained) // steps))
    return ages


def ahead_after(ess_history: Sequence[float | None], ahead: int, min_ess: float) -> int:
    """How many iterations to be ahead from the next one on: `ahead`, or one less if the correction weights degenerate.

    ess_history: the effective sample size as a share (`train/ess`) of each iteration since `ahead` took effect, the newest
    last; None if it was not measured. One less if each of the last three is below `min_ess`; never below 0, and never
    more: a setting that was too much is not tried again.
    """
    last = ess_history[-LOW_IN_A_ROW:]
    low = len(last) == LOW_IN_A_ROW and all(ess is not None and ess < min_ess for ess in last)
    return max(0, ahead - 1) if low else ahead
