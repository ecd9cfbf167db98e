"""The budget of samples that fail to be generated or scored, for rollout, reward and evaluate alike.

Owns the error of a spent budget. Knows nothing of rows or files.
"""

from collections.abc import Callable

from millrace.core.contracts.failures import Failures
from millrace.core.errors import BudgetError


class FailureBudget:
    """Counts failed samples, or groups, each once. More than a share of all samples ends the task."""

    def __init__(
        self,
        field: str,
        share: float,
        of: int,
        *,
        what: str,
        where: str,
        remedy: str,
        unit: str = "sample",
        also: Callable[[str, str], None] | None = None,
    ) -> None:
        """field: the configuration's field with the share of `of` units. what: text after their number in the error.

        also: called with the reason and the id of each failure.
        """
        self.allowed = share * of
        self.failures = Failures()
        self._limit = f"{field} = {share:g} allows ({self.allowed:.0f} of {of})"
        self._what, self._where, self._remedy, self._unit = what, where, remedy, unit
        self._also = also
        self._counted: set[str] = set()

    @property
    def spent(self) -> bool:
        """Whether more units failed than are allowed."""
        return self.failures.total > self.allowed

    def add(self, reason: str, failed: str) -> None:
        """Count a failure. failed: the id of the sample or group."""
        if failed in self._counted:
            return
        self._counted.add(failed)
        self.failures.add(reason, f"{self._unit} {failed}")
        if self._also:
            self._also(reason, failed)

    def check(self) -> None:
        """Raise BudgetError if too many units failed."""
        if self.spent:
            raise BudgetError(
                f"{self.failures.total} {self._unit}s {self._what}, more than {self._limit}; most often: "
                f"{self.failures.most_frequent()}",
                where=self._where,
                remedy=self._remedy,
            )
