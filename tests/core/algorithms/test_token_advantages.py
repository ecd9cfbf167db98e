"""Token-level estimators against walks in plain Python, and whitening against the statistics module."""

from __future__ import annotations

import math
import statistics

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.algorithms import token_advantages as advantages


def brute_gae(r: list[float], v: list[float], m: list[int], gamma: float, lam: float) -> list[float]:
    """Walks back over unmasked tokens only."""
    out, last, following = [0.0] * len(r), 0.0, 0.0
    for t in reversed(range(len(r))):
        if not m[t]:
            continue
        delta = r[t] + gamma * following - v[t]
        last = delta + gamma * lam * last
        out[t], following = last, v[t]
    return out


@st.composite
def batches(draw: st.DrawFn, longest: int = 9):  # type: ignore[no-untyped-def]
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=5))
    n = sum(lengths)
    mask = draw(st.lists(st.sampled_from([0, 1, 1]), min_size=n, max_size=n))
    numbers = st.lists(st.floats(-3, 3), min_size=n, max_size=n)
    return lengths, mask, draw(numbers), draw(numbers)


@given(batches(), st.floats(0.5, 1), st.floats(0, 1))
def test_gae_matches_a_walk_over_unmasked_tokens(batch, gamma: float, lam: float) -> None:  # type: ignore[no-untyped-def]
    lengths, mask, r, v = batch
    poisoned = torch.tensor([x if m else math.nan for x, m in zip(v, mask, strict=True)], dtype=torch.float64)
    a, returns = advantages.gae(
        torch.tensor(r, dtype=torch.float64),
        poisoned,
        torch.tensor(mask),
        torch.tensor(lengths),
        gamma=gamma,
        lam=lam,
    )
    expected, at = [], 0
    for length in lengths:
        part = slice(at, at + length)
        expected += brute_gae(r[part], v[part], mask[part], gamma, lam)
        at += length
    torch.testing.assert_close(a, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    shown = torch.tensor(mask, dtype=torch.float64)
    torch.testing.assert_close(
        returns, (a + torch.tensor(v, dtype=torch.float64)) * shown, rtol=1e-9, atol=1e-9
    )


def test_gae_is_exact_across_chunks_of_long_samples() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([700, 1, 129, 128, 256])
    n = int(lengths.sum())
    mask = (torch.rand(n) > 0.2).long()
    r, v = torch.randn(n, dtype=torch.float64), torch.randn(n, dtype=torch.float64)
    a, _ = advantages.gae(r, v, mask, lengths, gamma=0.99, lam=0.95)
    at = 0
    for length in lengths.tolist():
        part = slice(at, at + length)
        expected = brute_gae(r[part].tolist(), v[part].tolist(), mask[part].tolist(), 0.99, 0.95)
        torch.testing.assert_close(a[part], torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)
        at += length


def test_gae_with_lambda_one_and_no_values_is_the_return() -> None:
    r, lengths = torch.tensor([0.0, 0, 1, 0, 2]), torch.tensor([3, 2])
    a, returns = advantages.gae(r, torch.zeros(5), torch.ones(5), lengths, gamma=0.5, lam=1.0)
    torch.testing.assert_close(a, torch.tensor([0.25, 0.5, 1, 1, 2]))
    torch.testing.assert_close(returns, a)


@given(batches(), st.floats(0.5, 1), st.floats(0, 1))
def test_reinforce_plus_plus_matches_a_walk_over_all_tokens(batch, gamma: float, coef: float) -> None:  # type: ignore[no-untyped-def]
    lengths, mask, kl, scores = batch
    rewards = scores[: len(lengths)]
    found = advantages.reinforce_plus_plus(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor([x if m else math.nan for x, m in zip(kl, mask, strict=True)], dtype=torch.float64),
        torch.tensor(mask),
        torch.tensor(lengths),
        gamma=gamma,
        kl_coef=coef,
    )
    expected, at = [], 0
    for number, length in enumerate(lengths):
        m, part = mask[at : at + length], kl[at : at + length]
        r = [-coef * k * on for k, on in zip(part, m, strict=True)]
        if any(m):
            r[max(t for t in range(length) if m[t])] += rewards[number]
        total, walked = 0.0, []
        for x in reversed(r):
            total = x + gamma * total
            walked.append(total)
        expected += walked[::-1]
        at += length
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_baseline_variant_takes_the_kl_of_each_token_off_the_centred_reward() -> None:
    centred = torch.tensor([1.0, -1.0])
    found = advantages.reinforce_plus_plus_baseline(
        centred,
        torch.tensor([0.1, 0.2, math.nan, 0.4]),
        torch.tensor([1, 1, 0, 1]),
        torch.tensor([2, 2]),
        kl_coef=0.5,
    )
    torch.testing.assert_close(found, torch.tensor([0.95, 0.9, 0.0, -1.2]))


def test_a_reward_lands_on_the_last_unmasked_token_and_nowhere_in_a_masked_sample() -> None:
    found = advantages.token_rewards(
        torch.tensor([5.0, 7.0, math.nan]),
        None,
        torch.tensor([1, 1, 0, 0, 0, 1]),
        torch.tensor([3, 2, 1]),
        kl_coef=0.0,
    )
    assert found.tolist() == [0, 5, 0, 0, 0, 0]


@given(batches())
def test_whitened_values_have_mean_zero_and_variance_one(batch) -> None:  # type: ignore[no-untyped-def]
    _, mask, x, _ = batch
    valid = [value for value, m in zip(x, mask, strict=True) if m]
    values = torch.tensor([v if m else math.nan for v, m in zip(x, mask, strict=True)], dtype=torch.float64)
    found = advantages.whiten(values, torch.tensor(mask))
    if len(valid) < 2 or statistics.variance(valid) < 1e-3:
        assert bool(torch.isfinite(found).all())
        return
    mean, std = statistics.fmean(valid), math.sqrt(statistics.variance(valid) + 1e-8)
    expected = [(v - mean) / std if m else 0.0 for v, m in zip(x, mask, strict=True)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-7, atol=1e-9)


def test_whitening_a_single_or_no_valid_entry_gives_zeros() -> None:
    assert advantages.whiten(torch.tensor([4.0, 9.0]), torch.tensor([1, 0])).tolist() == [0, 0]
    assert advantages.whiten(torch.tensor([math.nan, 9.0]), torch.tensor([0, 0])).tolist() == [0, 0]


@settings(max_examples=20)
@given(batches())
def test_broadcast_shows_a_sample_on_each_of_its_tokens(batch) -> None:  # type: ignore[no-untyped-def]
    lengths = batch[0]
    found = advantages.broadcast(torch.arange(len(lengths)).float(), torch.tensor(lengths))
    assert found.tolist() == [number for number, length in enumerate(lengths) for _ in range(length)]
