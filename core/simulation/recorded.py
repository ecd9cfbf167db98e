"""What a replay is made from: the groups that a run generated, how long its phases took, and how fast its engines were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

Interval = tuple[float, float]
"""Start and end of a request, in seconds."""


@dataclass(frozen=True)
class Group:
    """The samples of one prompt. lengths: tokens of each response. kept: whether its filter kept it."""

    lengths: tuple[int, ...]
    kept: bool = True


@dataclass(frozen=True)
class Seconds:
    """Seconds of the phases of one iteration besides generation.

    draw: prompts. ready: until engines serve the weights. score: from the last answer to the batch. rest: what no task accounts for.
    """

    draw: float = 0.0
    ready: float = 0.0
    score: float = 0.0
    train: float = 0.0
    sync: float = 0.0
    checkpoint: float = 0.0
    evaluate: float = 0.0
    rest: float = 0.0


@dataclass(frozen=True)
class Speed:
    """Seconds a token of one request while n requests run on its engine: base + each n."""

    base: float
    each: float

    def seconds(self, running: int) -> float:
        """Seconds a token of each of `running` requests."""
        return self.base + self.each * running

    def scaled(self, factor: float) -> Speed:
        """A speed whose tokens take `factor` times as long."""
        return replace(self, base=self.base * factor, each=self.each * factor)


@dataclass(frozen=True)
class Request:
    """One recorded answer."""

    engine: str
    interval: Interval
    tokens: int


def fit_speed(requests: Sequence[Request]) -> Speed:
    """The speed that explains the recorded answers best: least squares, long answers weigh more.

    What a request met is the mean number of requests on its engine during its interval. Raises ValueError without tokens.
    """
    met: list[float] = []
    taken: list[float] = []
    weights: list[float] = []
    for engine in sorted({request.engine for request in requests}):
        of_engine = [request for request in requests if request.engine == engine and request.tokens > 0]
        of_engine = [request for request in of_engine if request.interval[1] > request.interval[0]]
        if of_engine:
            met += _met([request.interval for request in of_engine])
            taken += [(r.interval[1] - r.interval[0]) / r.tokens for r in of_engine]
            weights += [float(r.tokens) for r in of_engine]
    if not taken:
        raise ValueError("no answers with tokens and seconds")
    n, seconds, weight = np.array(met), np.array(taken), np.array(weights)
    mean_n, mean_s = np.average(n, weights=weight), np.average(seconds, weights=weight)
    spread = np.average((n - mean_n) ** 2, weights=weight)
    slope = np.average((n - mean_n) * (seconds - mean_s), weights=weight) / spread if spread > 1e-9 else 0.0
    each = float(min(max(slope, 0.0), mean_s / mean_n))  # neither term below zero
    return Speed(base=float(mean_s - each * mean_n), each=each)


def _met(intervals: Sequence[Interval]) -> list[float]:
    """Mean number of intervals that are open during each of them, itself among them."""
    starts, ends = np.array(intervals).T
    times = np.concatenate([starts, ends])
    steps = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
    order = np.argsort(times, kind="stable")
    times, running = times[order], np.cumsum(steps[order])
    area = np.concatenate([[0.0], np.cumsum(running[:-1] * np.diff(times))])
    within = np.interp(ends, times, area) - np.interp(starts, times, area)
    return [float(value) for value in within / (ends - starts)]
