"""Data of a run's pictures: some metrics of every iteration, read once from the manifests, then added as iterations end."""

from __future__ import annotations

import re
from collections.abc import Mapping

from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.accounts.account import FATES

SHOWN = re.compile(
    r"^(reward/mean|train/loss|train/grad_norm|train/entropy|rollout/response_length_mean|tokens/[a-z]+|time/iteration_s"
    r"|eval/.+/(reward_mean|loss))$"
)


class Curves:
    """Metrics by name and iteration. Metrics from before training have iteration 0."""

    def __init__(self) -> None:
        self._points: dict[str, dict[int, float]] = {}
        self.moved: set[str] = set()  # names of all metrics that ever differed from 0

    def read(self, folder: RunFolder) -> None:
        """Add the metrics of the run's committed iterations."""
        for item in folder.committed():
            self.add(item.metrics, item.iteration + 1)
            if item.evaluated:
                self.add(item.evaluated["metrics"], item.evaluated["done"])

    def add(self, metrics: Mapping[str, float], step: int) -> None:
        """Add the metrics of an iteration."""
        for name, value in metrics.items():
            if value:
                self.moved.add(name)
            if SHOWN.match(name):
                self._points.setdefault(name, {})[step] = value

    def points(self, name: str) -> list[tuple[int, float]]:
        """Iterations and values of a metric, in order."""
        return sorted(self._points.get(name, {}).items())

    def named(self, pattern: str) -> list[str]:
        """Names of metrics whose start matches a regular expression, sorted."""
        return sorted(name for name in list(self._points) if re.match(pattern, name))

    def tokens(self) -> dict[str, int]:
        """The account of the run's tokens: generated tokens, and what became of them."""
        names = ("generated", *(fate for fate in FATES if fate != "in flight"))
        totals = {name: sum(value for _, value in self.points(f"tokens/{name}")) for name in names}
        return {
            name: int(value) for name, value in totals.items() if value or name in ("generated", "trained")
        }
