"""How a global batch is cut into packs and ranks. Pure, deterministic.

Every data parallel rank gets the same number of packs. Loads are balanced by the largest differencing method
(Karmarkar and Karp 1982).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from core.errors import ConfigError


def plan_packs(
    lengths: Sequence[int], *, ranks: int, max_tokens: int, cost: Sequence[float] | None = None
) -> list[list[list[int]]]:
    """packs[rank][pack] = indices of samples. `lengths`: tokens of each sample; `cost`: its load, by default its tokens.

    Uses the fewest packs whose every pack holds at most `max_tokens`. A rank may get empty packs when there are fewer
    samples than packs. Raises ConfigError if a sample alone is longer than a pack.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ConfigError(
            f"trainer.max_pack_tokens = {max_tokens}: a sample has {longest} tokens; raise it, or lower "
            "rollout.sampling.max_new_tokens or data.max_prompt_tokens"
        )
    weights = list(cost) if cost is not None else [float(length) for length in lengths]
    per_rank = max(1, -(-sum(lengths) // (max_tokens * ranks)))
    while True:
        bins = karmarkar_karp(weights, per_rank * ranks)
        if all(sum(lengths[i] for i in members) <= max_tokens for members in bins):
            break
        per_rank += 1
    bins.sort(key=lambda members: (-sum(weights[i] for i in members), members))
    packs: list[list[list[int]]] = [[] for _ in range(ranks)]
    for at, members in enumerate(bins):  # snake order: heavy and light packs spread over ranks
        turn, place = divmod(at, ranks)
        packs[place if turn % 2 == 0 else ranks - 1 - place].append(sorted(members))
    return packs


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
