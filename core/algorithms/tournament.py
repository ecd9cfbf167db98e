"""Rewards of a group by comparing its samples in pairs, where no absolute score is to be had.

Owns who meets whom and what a placing is worth; knows nothing of the judge. `compare` gets the pairs of a whole round, so
that a judge may answer them at once, and says of each pair how far the first is better: 1 better, 0 worse, 0.5 equal.
Rewards lie in [0, 1]; group_relative makes advantages of them. Source: ArenaRL (Zhang et al., PMLR 306).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Compare = Callable[[Sequence[tuple[int, int]]], Sequence[float]]


def round_robin(n: int, compare: Compare) -> Tensor:
    """Mean score of each of n samples over its meetings with all others [n], float64; n(n-1)/2 comparisons in one round.

    Errors: ValueError for fewer than two samples, or an answer of another length or outside [0, 1].
    """
    _check_size(n)
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    points = torch.zeros(n, dtype=torch.float64)
    for (i, j), score in zip(pairs, _answers(compare, pairs), strict=True):
        points[i] += score
        points[j] += 1 - score
    return points / (n - 1)


def single_elimination(seeds: Tensor, compare: Compare) -> Tensor:
    """Rewards [n] by placing in a seeded single-elimination bracket, float64; n - 1 comparisons in ceil(log2 n) rounds.

    seeds [n]: any score known beforehand, higher is stronger (ties: the earlier sample). The strongest meets the weakest,
    and the strongest have the byes. A level comparison is won by the stronger seed. Those who leave in one round share
    the mean of the placings they take: reward = 1 - mean placing / (n - 1), so the winner has 1 and rewards average 0.5.
    Errors: as round_robin.
    """
    n = seeds.numel()
    _check_size(n)
    order = torch.argsort(seeds.double(), descending=True, stable=True).tolist()  # strongest first
    bracket: list[int | None] = [
        order[place] if place < n else None for place in _bracket_places(1 << (n - 1).bit_length())
    ]
    strength = {sample: -rank for rank, sample in enumerate(order)}
    rewards = torch.zeros(n, dtype=torch.float64)
    left = n
    while len(bracket) > 1:
        meetings = list(zip(bracket[::2], bracket[1::2], strict=True))
        pairs = [(a, b) for a, b in meetings if a is not None and b is not None]
        scores = dict(zip(pairs, _answers(compare, pairs), strict=True))
        bracket, losers = [], []
        for a, b in meetings:
            if a is None or b is None:
                bracket.append(b if a is None else a)
                continue
            score = scores[a, b]
            first = score > 0.5 or (score == 0.5 and strength[a] > strength[b])
            bracket.append(a if first else b)
            losers.append(b if first else a)
        placing = left - (len(losers) + 1) / 2  # mean of the placings left - len(losers) .. left - 1
        rewards[losers] = 1 - placing / (n - 1)
        left -= len(losers)
    winner = bracket[0]
    assert winner is not None
    rewards[winner] = 1.0
    return rewards


def _bracket_places(size: int) -> list[int]:
    """Seeds in bracket order, so that 0 and 1 can meet only in the final: [0, 7, 3, 4, 1, 6, 2, 5] for 8."""
    places = [0]
    while len(places) < size:
        last = 2 * len(places) - 1
        places = [seed for place in places for seed in (place, last - place)]
    return places


def _check_size(n: int) -> None:
    if n < 2:
        raise ValueError(f"a tournament needs at least two samples, not {n}")


def _answers(compare: Compare, pairs: Sequence[tuple[int, int]]) -> list[float]:
    scores = [float(score) for score in compare(pairs)]
    if len(scores) != len(pairs) or not all(0 <= score <= 1 for score in scores):
        raise ValueError(
            f"compare must answer one score in [0, 1] for each of {len(pairs)} pairs, not {scores}"
        )
    return scores
