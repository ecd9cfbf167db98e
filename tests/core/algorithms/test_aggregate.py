"""The loss of a global batch is the same number, with the same gradient, however the batch is split."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.algorithms import aggregate
from millrace.core.algorithms.aggregate import spread
from millrace.core.config.algorithm import Algorithm

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")


def test_the_samples_of_a_rollout_count_as_one_sequence() -> None:
    mask_sums = torch.tensor([4.0, 1.0, 3.0, 2.0, 0.0])
    rollouts = torch.tensor([0, 1, 1, 2, 3])
    whole = torch.tensor([4.0, 4.0, 2.0, 0.0])
    for how in AGGREGATIONS:
        config = Algorithm.model_validate({"aggregation": how})
        weights = aggregate.sample_weights(mask_sums, config, max_length=8, rollouts=rollouts)
        joined = aggregate.sample_weights(whole, config, max_length=8)
        present = mask_sums > 0
        assert torch.equal(weights[present], joined[rollouts][present])
        alone = aggregate.sample_weights(mask_sums, config, max_length=8, rollouts=torch.arange(5))
        assert torch.equal(alone, aggregate.sample_weights(mask_sums, config, max_length=8))


@st.composite
def batches(draw: st.DrawFn):  # type: ignore[no-untyped-def]
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    n = sum(lengths)
    mask = draw(st.lists(st.sampled_from([0, 1, 1]), min_size=n, max_size=n))
    values = draw(st.lists(st.floats(-5, 5), min_size=n, max_size=n))
    packs = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    return lengths, mask, values, packs


def by_hand(how, lengths, mask, values, budget: int) -> float:  # type: ignore[no-untyped-def]
    rows, at = [], 0
    for length in lengths:
        rows.append([v for v, m in zip(values[at : at + length], mask[at : at + length], strict=True) if m])
        at += length
    if how == "token_mean":
        flat = [v for row in rows for v in row]
        return sum(flat) / max(1, len(flat))
    if how == "sequence_mean":
        means = [sum(row) / len(row) for row in rows if row]
        return sum(means) / max(1, len(means))
    return sum(sum(row) for row in rows) / (len(rows) * budget)


@pytest.mark.parametrize("how", AGGREGATIONS)
@given(batch=batches())
def test_loss_is_split_invariant_and_equals_brute_force(how: str, batch) -> None:  # type: ignore[no-untyped-def]
    lengths, mask, values, packs = batch
    counts, at = [], 0
    for length in lengths:
        counts.append(sum(mask[at : at + length]))
        at += length
    loss = torch.tensor(
        [v if m else math.nan for v, m in zip(values, mask, strict=True)],
        dtype=torch.float64,
        requires_grad=True,
    )
    per_sample = aggregate.sample_weights(
        torch.tensor(counts, dtype=torch.float64),
        Algorithm(aggregation=how),
        max_length=11,
    )
    weights = spread(per_sample, torch.tensor(lengths))
    where = torch.repeat_interleave(torch.tensor(packs), torch.tensor(lengths))
    on = torch.tensor(mask)
    whole = aggregate.reduce(loss, on, weights)
    parts = [aggregate.reduce(loss[where == p], on[where == p], weights[where == p]) for p in range(4)]
    assert float(sum(parts).detach()) == pytest.approx(float(whole.detach()), rel=1e-12, abs=1e-12)
    assert float(whole.detach()) == pytest.approx(by_hand(how, lengths, mask, values, 11), rel=1e-9, abs=1e-9)
    (gradient,) = torch.autograd.grad(sum(parts), loss)
    torch.testing.assert_close(gradient, weights * on)


def test_a_fully_masked_sample_is_no_sample_of_the_sequence_mean() -> None:
    assert aggregate.sequence_mean(torch.tensor([0.0, 2.0])).tolist() == [0.0, 0.5]


def test_a_batch_without_tokens_has_loss_zero() -> None:
    for how in AGGREGATIONS:
        config = Algorithm(aggregation=how)
        per_sample = aggregate.sample_weights(torch.zeros(2), config, max_length=5)
        weights = spread(per_sample, torch.tensor([1, 2]))
        assert float(aggregate.reduce(torch.full((3,), math.nan), torch.zeros(3), weights)) == 0.0
        assert aggregate.sample_weights(torch.zeros(0), config, max_length=5).shape == (0,)


def test_constant_needs_a_length() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        aggregate.sample_weights(torch.ones(2), Algorithm(aggregation="constant"))


def test_constant_length_of_the_config_comes_before_the_budget() -> None:
    config = Algorithm(aggregation="constant", constant_length=10)
    assert aggregate.sample_weights(torch.ones(2), config, max_length=99).tolist() == pytest.approx(
        [0.05, 0.05]
    )


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.lists(st.integers(1, 3), min_size=12, max_size=12),
    st.sampled_from(AGGREGATIONS),
    st.integers(0, 12),
)
def test_weights_of_a_part_over_the_denominator_of_the_whole_are_those_of_the_whole(
    counts: list[int], sizes: list[int], how: str, cut: int
) -> None:
    """The part ends where a rollout does."""
    config = Algorithm.model_validate({"aggregation": how})
    numbers = [rollout for rollout, size in enumerate(sizes) for _ in range(size)][: len(counts)]
    sums, rollouts = torch.tensor(counts, dtype=torch.float64), torch.tensor(numbers)
    whole = aggregate.sample_weights(sums, config, max_length=9, rollouts=rollouts)
    first = rollouts < cut
    parts = [
        aggregate.undivided_weights(
            sums[part], config, max_length=9, rollouts=rollouts[part] - rollouts[part].min()
        )
        for part in (first, ~first)
        if part.any()
    ]
    divided = torch.cat(parts) / aggregate.denominator(sums, config, rollouts)
    torch.testing.assert_close(divided, whole, rtol=1e-12, atol=0)
