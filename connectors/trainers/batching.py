"""How a global batch is cut into packs and ranks. Pure, deterministic.

Packs hold nearly equal numbers of tokens, which bound their memory. Ranks get nearly equal work and the same number of
packs. Both are split by the largest differencing method (Karmarkar and Karp 1982).
"""

import bisect
import heapq
from collections.abc import Sequence
from itertools import chain

from millrace.core.errors import ConfigError

Packs = list[list[int]]  # indices of samples
Sets = list[tuple[float, list[int]]]  # total weights, and indices of samples


def plan_packs(
    lengths: Sequence[int],
    *,
    ranks: int,
    max_tokens: int,
    cost: Sequence[float] | None = None,
    multiple: int = 1,
) -> list[Packs]:
    """packs[rank][pack] = indices of samples. `lengths`: tokens of each sample; `cost`: its work, by default its tokens.

    Uses the fewest packs of at most `max_tokens` each, at any cost, and of each rank a multiple of `multiple`. No rank has more work than it would have if
    packs were dealt by tokens alone. A rank may get empty packs when there are fewer samples than packs. Raises
    ConfigError if a sample alone is longer than a pack.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ConfigError(
            f"a sample has {longest} tokens",
            where=f"trainer.max_pack_tokens = {max_tokens}",
            remedy="raise it; a branch may lower rollout.sampling.max_new_tokens instead",
        )
    per_rank = multiple * max(1, -(-_fewest(lengths, max_tokens) // (ranks * multiple)))
    while True:
        packs = karmarkar_karp(lengths, per_rank * ranks)
        if _heaviest(packs, lengths) <= max_tokens:
            break
        per_rank += multiple
    plans = [_dealt(packs, ranks, lengths)]
    if cost is not None:
        plans.append(_dealt(packs, ranks, cost))
        of_ranks = [_split(samples, per_rank, lengths) for samples in karmarkar_karp(cost, ranks)]
        if all(_heaviest(packs, lengths) <= max_tokens for packs in of_ranks):
            plans.append(of_ranks)
    work = lengths if cost is None else cost
    best = min(plans, key=lambda plan: _heaviest([[*chain(*packs)] for packs in plan], work))
    # heavy packs first, so that ranks that wait for each other in a pack, as expert parallel ones do, have similar packs
    return [sorted(map(sorted, packs), key=lambda pack: (-_total(pack, work), pack)) for packs in best]


def _fewest(lengths: Sequence[int], max_tokens: int) -> int:
    """A lower bound on the number of packs: by tokens, by samples of a pack, and by samples that fit with no other."""
    if not lengths:
        return 0
    by_count = -(-len(lengths) // (max_tokens // min(lengths)))
    return max(-(-sum(lengths) // max_tokens), by_count, sum(2 * length > max_tokens for length in lengths))


def _total(samples: Sequence[int], weights: Sequence[float]) -> float:
    return sum(weights[i] for i in samples)


def _heaviest(sets: Sequence[Sequence[int]], weights: Sequence[float]) -> float:
    return max(_total(samples, weights) for samples in sets)


def _dealt(packs: Packs, ranks: int, weights: Sequence[float]) -> list[Packs]:
    """Packs of each rank. Heavy ones are dealt first; the heaviest of a round goes to the rank with the least so far."""
    remaining = sorted(packs, key=lambda pack: (-_total(pack, weights), pack))
    of_ranks: list[Packs] = [[] for _ in range(ranks)]
    totals: list[float] = [0] * ranks
    for at in range(0, len(remaining), ranks):
        order = sorted(range(ranks), key=totals.__getitem__)
        for rank, pack in zip(order, remaining[at : at + ranks], strict=True):
            of_ranks[rank].append(pack)
            totals[rank] = sum((weights[i] for i in pack), totals[rank])
    return of_ranks


def _split(samples: Sequence[int], count: int, weights: Sequence[float]) -> Packs:
    """These samples in `count` packs."""
    return [[samples[i] for i in pack] for pack in karmarkar_karp([weights[i] for i in samples], count)]


def karmarkar_karp(weights: Sequence[float], bins: int) -> list[list[int]]:
    """Indices split into `bins` sets of nearly equal total weight. Weights are above 0.

    Sets that are empty are left out of the lists: a single sample then joins a list by insertion, and the time is about
    n log(n) for n samples, however many sets there are.
    """
    if bins == 1:
        return [list(range(len(weights)))]
    heap: list[tuple[float, int, Sets]] = [
        (-float(weight), index, [(float(weight), [index])]) for index, weight in enumerate(weights)
    ]
    heapq.heapify(heap)
    if not heap:
        return [[] for _ in range(bins)]
    order = len(weights)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = _merged(first, second, bins)
        least = merged[-1][0] if len(merged) == bins else 0.0
        heapq.heappush(heap, (-(merged[0][0] - least), order, merged))
        order += 1
    found = [members for _, members in heap[0][2]]
    return found + [[] for _ in range(bins - len(found))]


def _merged(first: Sets, second: Sets, bins: int) -> Sets:
    """Merge two lists of sets, heaviest first: the heaviest sets of one are joined with the lightest of the other.

    Both lists are sorted heaviest first and have no empty sets. `first` may be changed.
    """
    if len(second) == 1 and len(first) < bins:
        bisect.insort_right(first, second[0], key=_lightness)
        return first
    rising = sorted(second, key=lambda each: each[0])
    # this many sets of the first list are joined with an empty set
    alone = bins - len(second)
    pairs = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first[alone:], rising, strict=False)]
    return sorted([*first[:alone], *pairs, *rising[len(pairs) :]], key=_lightness)


def _lightness(each: tuple[float, list[int]]) -> float:
    return -each[0]
