"""Failures counted by reason: the error of a spent budget names the most frequent one, its count and an example."""

import logging
import re
from collections.abc import Callable
from pathlib import Path

from millrace.core.errors import BudgetError

log = logging.getLogger(__name__)
VARIES = re.compile(
    r"'[^']*'|\"[^\"]*\"|\d+"
)  # text in messages that differs by sample: quoted text, and numbers
LONGEST = 300


class Failures:
    """Failures by reason. Reasons that differ only in quoted text or numbers count as one."""

    def __init__(self) -> None:
        self.total = 0
        self._kinds: dict[str, tuple[int, str, str]] = {}  # count, first reason, first example

    def add(self, reason: str, example: str) -> None:
        """Count a failure. example: something to look up, such as a sample's id."""
        self.total += 1
        kind = VARIES.sub("…", reason)
        count, first, its_example = self._kinds.get(kind, (0, reason, example))
        self._kinds[kind] = (count + 1, first, its_example)

    def most_frequent(self) -> str:
        """The most frequent reason in one line, with its count and its first example; in a tie the first reason."""
        count, reason, example = max(self._kinds.values(), key=lambda kind: kind[0])
        line = " ".join(reason.split())
        shown = line if len(line) <= LONGEST else f"{line[:LONGEST]} …"
        return f"{shown} ({count} of {self.total}, such as {example})"


class RestartBudget:
    """How often one driver may restart the run's engines and router."""

    def __init__(self, allowed: int, logs: Callable[[], Path]) -> None:
        """allowed: engines.restarts. logs: gives the folder of the logs, NAME.log each."""
        self.allowed = allowed
        self.deaths = Failures()
        self._logs = logs

    def count(self, name: str, reason: str) -> None:
        """Count a death that a restart follows. Raises BudgetError if it is one too many."""
        self.deaths.add(reason, f"that of {name}, whose log is {self._logs() / name}.log")
        if self.deaths.total > self.allowed:
            raise BudgetError(
                f"{name} died and engines.restarts = {self.allowed} is spent; most often: {self.deaths.most_frequent()}",
                remedy="the end of the log has the cause: correct it or raise engines.restarts, and start the same command again: restarts then count from 0, and finished work is kept",
            )
        log.warning("%s died: %s; restart %d of %d", name, reason, self.deaths.total, self.allowed)
