"""The pairs of a tournament of n samples, and the standing after it. Pure except for `compare`, which is awaited.

`compare` gets the pairs of a whole round, which may be compared at once, and returns for each how much better the first is: 1
better, 0 worse, 0.5 level. Source: ArenaRL (Zhang et al., arXiv:2601.06487).
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

Pair = tuple[int, int]
Compare = Callable[[Sequence[Pair]], Awaitable[Sequence[float]]]


@dataclass
class TournamentStanding:
    """The standing of n samples. `level`: higher is better; equal levels share a place. `points`: of `meetings`; 0.5 for a
    draw.
    """

    level: list[float]
    points: list[float] = field(default_factory=list)
    meetings: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.points = self.points or [0.0] * len(self.level)
        self.meetings = self.meetings or [0] * len(self.level)

    def win_rates(self) -> list[float]:
        """Points a meeting; 0.5 without meetings."""
        return [p / m if m else 0.5 for p, m in zip(self.points, self.meetings, strict=True)]

    def places(self) -> list[float]:
        """1 for the best and 0 for the last, in equal steps; samples of one level share the mean of their places."""
        last = len(self.level) - 1
        if not last:
            return [0.5]
        below = [sum(other < own for other in self.level) for own in self.level]
        equal = [sum(other == own for other in self.level) - 1 for own in self.level]
        return [(b + e / 2) / last for b, e in zip(below, equal, strict=True)]

    async def meet(self, pairs: Sequence[Pair], compare: Compare) -> list[float]:
        """Compare pairs and add the points of both; returns the score of the first of each pair."""
        scores = list(await compare(pairs)) if pairs else []
        for (a, b), score in zip(pairs, scores, strict=True):
            for sample, won in ((a, score), (b, 1 - score)):
                self.points[sample] += won
                self.meetings[sample] += 1
        return scores


async def round_robin(n: int, order: Sequence[int], compare: Compare) -> TournamentStanding:
    """All pairs meet: n(n-1)/2 comparisons in one round. `level` is the share of meetings won."""
    standing = TournamentStanding([0.0] * n)
    await standing.meet([(a, b) for at, a in enumerate(order) for b in order[at + 1 :]], compare)
    standing.level = standing.win_rates()
    return standing


async def anchor(n: int, order: Sequence[int], compare: Compare) -> TournamentStanding:
    """All meet the first of `order`, the anchor: n - 1 comparisons in one round. The anchor's own level is 0.5."""
    standing = TournamentStanding([0.5] * n)
    others = list(order[1:])
    scores = await standing.meet([(other, order[0]) for other in others], compare)
    for other, score in zip(others, scores, strict=True):
        standing.level[other] = score
    return standing


async def elimination(n: int, order: Sequence[int], compare: Compare) -> TournamentStanding:
    """Seeded by meetings with an anchor, then a bracket of single elimination: 2(n - 1) comparisons.

    The strongest seeds have the byes, and the two strongest can meet only in the final. The stronger seed wins a draw; between
    equal seeds the earlier in `order` is the stronger. Samples that leave in one round share their places.
    """
    seeded = await anchor(n, order, compare)
    # sorting is stable: ties stay in order
    strongest = sorted(order, key=lambda sample: -seeded.level[sample])
    strength = {sample: -rank for rank, sample in enumerate(strongest)}
    size = 1 << (n - 1).bit_length()
    bracket = [strongest[place] if place < n else None for place in bracket_places(size)]
    standing = TournamentStanding([0.0] * n, seeded.points, seeded.meetings)
    rounds = 0.0
    while len(bracket) > 1:
        rounds += 1
        meetings = list(zip(bracket[::2], bracket[1::2], strict=True))
        pairs = [(a, b) for a, b in meetings if a is not None and b is not None]
        scores = dict(zip(pairs, await standing.meet(pairs, compare), strict=True))
        bracket = []
        for a, b in meetings:
            if a is None or b is None:
                bracket.append(b if a is None else a)
                continue
            score = scores[a, b]
            first = score > 0.5 or (score == 0.5 and strength[a] > strength[b])
            bracket.append(a if first else b)
            standing.level[b if first else a] = rounds - 1
    winner = bracket[0]
    assert winner is not None
    standing.level[winner] = rounds
    return standing


def bracket_places(size: int) -> list[int]:
    """Seeds in bracket order, so that 0 and 1 can meet only in the final: [0, 7, 3, 4, 1, 6, 2, 5] for 8."""
    places = [0]
    while len(places) < size:
        last = 2 * len(places) - 1
        places = [seed for place in places for seed in (place, last - place)]
    return places


SCHEMES = {"round_robin": round_robin, "anchor": anchor, "elimination": elimination}
