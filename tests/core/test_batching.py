"""Packs: every sample once, no pack above the limit, as few as by tokens, and ranks with like amounts of work."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.connectors.trainers.batching import Packs, karmarkar_karp, plan_packs
from millrace.core.errors import ConfigError
from millrace.core.families.architecture import architecture
from tests.support.qwen3 import QWEN3_06B

SHAPE = architecture(QWEN3_06B)
batches = st.lists(st.integers(1, 16384), max_size=40)


def heaviest(plan: list[Packs], cost: list[int]) -> int:
    return max(sum(cost[i] for pack in packs for i in pack) for packs in plan)


@given(lengths=batches, ranks=st.integers(1, 8), room=st.integers(16384, 40000))
def test_packs_are_a_whole_cut_within_the_limit_and_no_worse_than_by_tokens(
    lengths: list[int], ranks: int, room: int
) -> None:
    cost = [SHAPE.flops(length) for length in lengths]
    plan = plan_packs(lengths, ranks=ranks, max_tokens=room, cost=cost)
    assert sorted(i for packs in plan for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in pack) <= room for packs in plan for pack in packs)
    by_tokens = plan_packs(lengths, ranks=ranks, max_tokens=room)
    assert {len(packs) for packs in plan} == {len(packs) for packs in by_tokens} == {len(plan[0])}
    assert len(plan) == ranks
    assert heaviest(plan, cost) <= heaviest(by_tokens, cost)
    assert plan == plan_packs(lengths, ranks=ranks, max_tokens=room, cost=cost)


@pytest.mark.parametrize(("samples", "above"), [(256, 1.01), (64, 1.1)])
def test_the_slowest_rank_works_about_as_long_as_the_others(samples: int, above: float) -> None:
    draw = random.Random(5)
    lengths = [round(2 ** draw.uniform(8, 14)) for _ in range(samples)]
    cost = [SHAPE.flops(length) for length in lengths]
    mean = sum(cost) / 8
    assert heaviest(plan_packs(lengths, ranks=8, max_tokens=16384, cost=cost), cost) < above * mean
    assert heaviest(plan_packs(lengths, ranks=8, max_tokens=16384), cost) > 1.03 * mean


def test_a_ranks_heavy_packs_come_first() -> None:
    lengths = [16384, 300, 9000, 8000, 700, 5000]
    cost = [SHAPE.flops(length) for length in lengths]
    for packs in plan_packs(lengths, ranks=2, max_tokens=16384, cost=cost):
        work = [sum(cost[i] for i in pack) for pack in packs]
        assert work == sorted(work, reverse=True)


def test_ranks_without_samples_get_as_many_packs() -> None:
    assert plan_packs([], ranks=2, max_tokens=8) == [[[]], [[]]]
    assert plan_packs([4], ranks=2, max_tokens=8, cost=[9]) == [[[0]], [[]]]


@pytest.mark.parametrize("samples", [0, 1, 9, 40])
def test_each_rank_gets_a_multiple_of_so_many_packs(samples: int) -> None:
    plan = plan_packs([5] * samples, ranks=3, max_tokens=12, multiple=4)
    assert {len(packs) % 4 for packs in plan} == {0}
    assert sorted(i for packs in plan for pack in packs for i in pack) == list(range(samples))


def test_a_sample_longer_than_a_pack_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.max_pack_tokens = 8: a sample has 9 tokens"):
        plan_packs([1, 9], ranks=1, max_tokens=8)


def test_operations_grow_with_weights_and_the_square_of_the_length() -> None:
    norms = SHAPE.layers * 2 * (SHAPE.hidden + SHAPE.head_dim) + SHAPE.hidden
    weights = SHAPE.parameters - norms
    assert SHAPE.flops(1) == 2 * (weights + 28 * 2048)
    assert SHAPE.flops(4096) - 4096 * 2 * weights == 2 * 28 * 2048 * 4096**2


@given(weights=batches | st.lists(st.integers(1, 3), max_size=40), bins=st.integers(2, 50))
def test_sets_are_those_of_the_method_as_it_is_described(weights: list[int], bins: int) -> None:
    """Every partial solution as a list of all its sets, the empty ones too: so it took seconds for a thousand samples."""
    solutions = [
        (-float(weight), at, [(float(weight), [at]), *[(0.0, [])] * (bins - 1)])
        for at, weight in enumerate(weights)
    ]
    order = len(weights)
    while len(solutions) > 1:
        (_, _, first), (_, _, second), *rest = sorted(solutions, key=lambda each: each[:2])
        rising = sorted(second, key=lambda each: each[0])
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, rising, strict=True)]
        merged.sort(key=lambda each: -each[0])
        solutions = [*rest, (merged[-1][0] - merged[0][0], order, merged)]
        order += 1
    expected = [members for _, members in solutions[0][2]] if solutions else [[] for _ in range(bins)]
    assert karmarkar_karp(weights, bins) == expected


def test_no_pack_is_tried_that_cannot_hold_its_samples() -> None:
    """16,384 samples of one length, of which seven fill a pack: it was tried with every number from the sum of tokens on."""
    plan = plan_packs([4224] * 16384, ranks=1, max_tokens=32768)
    assert len(plan[0]) == -(-16384 // 7)
