"""The covering set: few runs of many features each, in which each pair that goes together occurs."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import combinations

from tests.pairs.features import FEATURES
from tests.pairs.outcomes import pair, together

Pair = frozenset[str]
TRIES = 8  # of which the one that covers most is taken
AHEAD = 0.3  # what a pair counts that a feature may cover later
NOISE = 4.0


def covering(wanted: Iterable[Pair], kept: Iterable[list[str]] = ()) -> list[list[str]]:
    """Runs in which each wanted pair occurs: greedy, with several tries a run, and the same each time.

    kept: runs that there are, which come first.
    """
    missing, order, numbers = set(wanted), list(FEATURES).index, random.Random(1)
    runs = list(kept)
    for run in runs:
        missing -= _pairs(run)
    while missing:
        starts = sorted(sorted(both, key=order) for both in missing)
        tries = [_grown(numbers.choice(starts), missing, numbers) for _ in range(TRIES)]
        best = max(tries, key=lambda run: len(missing & _pairs(run)))
        missing -= _pairs(best)
        runs.append(sorted(best, key=order))
    return runs


def accepted(one: str, other: str) -> bool:
    """Whether the rules take both at once."""
    first, second = sorted((one, other), key=list(FEATURES).index)
    return pair(first, second).accepted


def _pairs(run: Iterable[str]) -> set[Pair]:
    return {frozenset(both) for both in combinations(run, 2)}


def _grown(start: list[str], missing: set[Pair], numbers: random.Random) -> list[str]:
    """Features added to a pair one by one: first those that cover much, and keep others possible."""
    chosen = list(start)
    left = [name for name, feature in FEATURES.items() if feature.elsewhere is None and name not in chosen]
    noise = {name: NOISE * numbers.random() for name in left}
    while True:
        left = [name for name in left if all(accepted(name, other) for other in chosen)]
        gains = {name: sum(frozenset((name, other)) in missing for other in chosen) for name in left}
        left = [name for name in left if gains[name]]
        if not left:
            return chosen
        best = max(left, key=lambda name: gains[name] + AHEAD * _later(name, left, missing) + noise[name])
        left.remove(best)
        if together(sorted([*chosen, best], key=list(FEATURES).index)).accepted:
            chosen.append(best)


def _later(name: str, left: Iterable[str], missing: set[Pair]) -> int:
    return sum(
        frozenset((name, other)) in missing and accepted(name, other) for other in left if other != name
    )
