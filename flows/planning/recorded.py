"""Input of a replay: the groups that a run generated, the seconds of its phases, and the speed of its engines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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

    draw: prompts. ready: until engines have the GPUs back and serve the weights, and the trainer has them again. score: from
    the last answer to the batch. rest: outside of all tasks.
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
    """Seconds a token of one request while n requests, with t tokens so far, run on its engine: base + each n + context t.

    Prompts are not among the t tokens: their cost is part of `each`.
    """

    base: float
    each: float
    context: float = 0.0

    def seconds(self, running: int, tokens: float) -> float:
        """Seconds of the next token of each of `running` requests."""
        return self.base + self.each * running + self.context * tokens

    def time_of(self, made: float, running: int, tokens: float) -> float:
        """Seconds in which each of `running` requests makes this many tokens after its first `tokens`."""
        return self.seconds(running, tokens) * made + self.context * running * made**2 / 2

    def made_in(self, seconds: float, running: int, tokens: float) -> float:
        """Tokens that each of `running` requests makes in that time: the inverse of `time_of`."""
        pace, growth = self.seconds(running, tokens), self.context * running
        return 2 * seconds / (pace + math.sqrt(pace**2 + 2 * growth * seconds))

    def scaled(self, factor: float) -> Speed:
        """A speed whose tokens take `factor` times as long."""
        return Speed(self.base * factor, self.each * factor, self.context * factor)


@dataclass(frozen=True)
class RecordedRequest:
    """One recorded answer."""

    engine: str
    interval: Interval
    tokens: int


def fit_speed(requests: Sequence[RecordedRequest]) -> Speed:
    """The speed that explains the recorded answers best: least squares without a negative term, long answers weigh more.

    The load on a request is the mean number of requests on its engine during its interval, and of their tokens so far. Raises
    ValueError without tokens.
    """
    met: list[tuple[float, float]] = []
    taken: list[float] = []
    weights: list[float] = []
    for engine in sorted({request.engine for request in requests}):
        of_engine = [request for request in requests if request.engine == engine and request.tokens > 0]
        of_engine = [request for request in of_engine if request.interval[1] > request.interval[0]]
        if of_engine:
            met += _met(of_engine)
            taken += [(r.interval[1] - r.interval[0]) / r.tokens for r in of_engine]
            weights += [float(r.tokens) for r in of_engine]
    if not taken:
        raise ValueError("no answers with tokens and seconds")
    root = np.sqrt(np.array(weights))
    terms = np.column_stack([np.ones(len(met)), np.array(met)]) * root[:, None]
    base, each, context = _least_squares(terms, np.array(taken) * root)
    return Speed(base, each, context)


def _least_squares(terms: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> list[float]:
    """Factors of the terms, none below zero. Between equal fits, fewer terms win."""
    best, least = [0.0] * terms.shape[1], math.inf
    for count in range(1, terms.shape[1] + 1):
        for chosen in itertools.combinations(range(terms.shape[1]), count):
            found, _, rank, _ = np.linalg.lstsq(terms[:, chosen], values, rcond=1e-9)
            error = float(np.sum((terms[:, chosen] @ found - values) ** 2))
            if rank == count and min(found) >= 0 and error < least * (1 - 1e-6) - 1e-18:
                best, least = [0.0] * terms.shape[1], error
                for index, factor in zip(chosen, found, strict=True):
                    best[index] = float(factor)
    return best


def _met(requests: Sequence[RecordedRequest]) -> list[tuple[float, float]]:
    """For each request: the mean number of requests during its interval, itself included, and of their tokens.

    Requests are assumed to make their tokens evenly.
    """
    starts, ends = np.array([request.interval for request in requests]).T
    tokens = np.array([float(request.tokens) for request in requests])
    pace = tokens / (ends - starts)
    times = np.concatenate([starts, ends])
    order = np.argsort(times, kind="stable")
    times, pauses = times[order], np.diff(times[order])
    running = np.cumsum(np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])[order])[:-1]
    growth = np.cumsum(np.concatenate([pace, -pace])[order])[:-1]
    gone = np.cumsum(np.concatenate([np.zeros(len(starts)), tokens])[order])[:-1]
    made = np.concatenate([[0.0], np.cumsum(growth * pauses)[:-1]])
    means = []
    for area in (running * pauses, (made - gone) * pauses + growth * pauses**2 / 2):
        so_far = np.concatenate([[0.0], np.cumsum(area)])
        means.append((np.interp(ends, times, so_far) - np.interp(starts, times, so_far)) / (ends - starts))
    return list(zip(*(mean.tolist() for mean in means), strict=True))
