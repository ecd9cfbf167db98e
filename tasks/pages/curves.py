"""What pictures of a run are drawn from: some figures of every iteration, read from the manifests once and added to since."""

from __future__ import annotations

import re
from collections.abc import Mapping

from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.account.account import FATES

SHOWN = re.compile(
    r"^(reward/mean|train/loss|train/grad_norm|train/entropy|rollout/response_length_mean|tokens/[a-z]+|time/iteration_s"
    r"|eval/.+/(reward_mean|loss))$"
)


class Curves:
    """Figures by name and iteration. Those before training are at 0."""

    def __init__(self) -> None:
        self._points: dict[str, dict[int, float]] = {}
        self.moved: set[str] = set()  # names of all figures that were something else than 0

    def read(self, folder: RunFolder) -> None:
        """Add what the run's committed iterations hold."""
        for item in folder.committed():
            self.add(item.metrics, item.iteration + 1)
            if item.evaluated:
                self.add(item.evaluated["metrics"], item.evaluated["done"])

    def add(self, metrics: Mapping[str, float], step: int) -> None:
        """Add an iteration's."""
        for name, value in metrics.items():
            if value:
                self.moved.add(name)
            if SHOWN.match(name):
                self._points.setdefault(name, {})[step] = value

    def points(self, name: str) -> list[tuple[int, float]]:
        """Iterations and values of a figure, in order."""
        return sorted(self._points.get(name, {}).items())

    def named(self, pattern: str) -> list[str]:
        """Names of figures that match a regular expression from their beginning, sorted."""
        return sorted(name for name in list(self._points) if re.match(pattern, name))

    def tokens(self) -> dict[str, int]:
        """The account of the run's tokens: what was generated, and what became of it."""
        names = ("generated", *(fate for fate in FATES if fate != "in flight"))
        totals = {name: sum(value for _, value in self.points(f"tokens/{name}")) for name in names}
        return {
            name: int(value) for name, value in totals.items() if value or name in ("generated", "trained")
        }
