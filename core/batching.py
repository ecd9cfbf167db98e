"""How a global batch is cut into packs and ranks. Pure, deterministic.

Packs hold nearly equal numbers of tokens, which bound their memory. Ranks get nearly equal work and the same number of
packs. Both are split by the largest differencing method (Karmarkar and Karp 1982).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from millrace.core.errors import ConfigError

Packs = list[list[int]]  # indices of samples


def plan_packs(
    lengths: Sequence[int], *, ranks: int, max_tokens: int, cost: Sequence[float] | None = None
) -> list[Packs]:
    """packs[rank][pack] = indices of samples. `lengths`: tokens of each sample; `cost`: its work, by default its tokens.

    Uses the fewest packs of at most `max_tokens` each, whatever the cost. No rank has more work than it would have if
    packs were dealt by tokens alone. A rank may get empty packs when there are fewer samples than packs. Raises
    ConfigError if a sample alone is longer than a pack.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ConfigError(
            f"a sample has {longest} tokens",
            where=f"trainer.max_pack_tokens = {max_tokens}",
            remedy="raise it, or lower rollout.sampling.max_new_tokens or data.max_prompt_tokens",
        )
    per_rank = max(1, -(-sum(lengths) // (max_tokens * ranks)))
    while True:
        packs = karmarkar_karp(lengths, per_rank * ranks)
        if _heaviest(packs, lengths) <= max_tokens:
            break
        per_rank += 1
    plans = [_dealt(packs, ranks, lengths)]
    if cost is not None:
        plans.append(_dealt(packs, ranks, cost))
        of_ranks = [_split(samples, per_rank, lengths) for samples in karmarkar_karp(cost, ranks)]
        if all(_heaviest(packs, lengths) <= max_tokens for packs in of_ranks):
            plans.append(of_ranks)
    work = lengths if cost is None else cost
    best = min(plans, key=lambda plan: _heaviest([sum(packs, []) for packs in plan], work))
    # heavy packs first, so that ranks that wait for each other in a pack, as expert parallel ones do, have similar packs
    return [sorted(map(sorted, packs), key=lambda pack: (-_total(pack, work), pack)) for packs in best]


def _total(samples: Sequence[int], weights: Sequence[float]) -> float:
    return sum(weights[i] for i in samples)


def _heaviest(sets: Sequence[Sequence[int]], weights: Sequence[float]) -> float:
    return max(_total(samples, weights) for samples in sets)


def _dealt(packs: Packs, ranks: int, weights: Sequence[float]) -> list[Packs]:
    """Packs of each rank. Heavy ones are dealt first; the heaviest of a round goes to the rank with the least so far."""
    remaining = sorted(packs, key=lambda pack: (-_total(pack, weights), pack))
    of_ranks: list[Packs] = [[] for _ in range(ranks)]
    while remaining:
        order = sorted(range(ranks), key=lambda rank: _total(sum(of_ranks[rank], []), weights))
        for rank, pack in zip(order, remaining[:ranks], strict=True):
            of_ranks[rank].append(pack)
        remaining = remaining[ranks:]
    return of_ranks


def _split(samples: Sequence[int], count: int, weights: Sequence[float]) -> Packs:
    """These samples in `count` packs."""
    return [[samples[i] for i in pack] for pack in karmarkar_karp([weights[i] for i in samples], count)]


def karmarkar_karp(weights: Sequence[float], bins: int) -> list[list[int]]:
    """Indices split into `bins` sets of nearly equal total weight."""
    if bins == 1:
        return [list(range(len(weights)))]
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for index, weight in enumerate(weights):
        sets = [(weight, [index])] + [(0.0, [])] * (bins - 1)
        heap.append((-weight, index, sets))
    heapq.heapify(heap)
    if not heap:
        return [[] for _ in range(bins)]
    order = len(weights)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [
            (a[0] + b[0], a[1] + b[1]) for a, b in zip(first, sorted(second, key=lambda s: s[0]), strict=True)
        ]
        merged.sort(key=lambda s: -s[0])
        heapq.heappush(heap, (-(merged[0][0] - merged[-1][0]), order, merged))
        order += 1
    return [members for _, members in heap[0][2]]
