"""The budget of samples that fail to be generated or scored, for rollout, reward and evaluate alike.

Owns the sentence of a budget that is spent. Knows nothing of rows or files.
"""

from __future__ import annotations

from millrace.core.contracts.failures import Failures
from millrace.core.errors import BudgetError


class FailureBudget:
    """Counts failed samples. More than a share of all samples are too many, and end the task."""

    def __init__(self, field: str, share: float, samples: int, *, what: str, where: str, remedy: str) -> None:
        """field: of the configuration, which sets the share. what: follows the number of failed samples in the error."""
        self.allowed = share * samples
        self.failures = Failures()
        self._limit = f"{field} = {share:g} allows ({self.allowed:.0f} of {samples})"
        self._what, self._where, self._remedy = what, where, remedy

    @property
    def spent(self) -> bool:
        """Whether more failed than are allowed."""
        return self.failures.total > self.allowed

    def add(self, reason: str, sample: str) -> None:
        """Count a failure. sample: its id."""
        self.failures.add(reason, f"sample {sample}")

    def check(self) -> None:
        """Raise BudgetError if too many failed."""
        if self.spent:
            raise BudgetError(
                f"{self.failures.total} samples {self._what}, more than {self._limit}; most often: "
                f"{self.failures.most_frequent()}",
                where=self._where,
                remedy=self._remedy,
            )
