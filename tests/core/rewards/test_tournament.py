"""Tournaments: who meets whom, what a place is worth, and the same tournament again."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.errors import ConfigError
from millrace.core.hooks.protocols import RewardInput, RewardResult
from millrace.core.rewards.scoring import score_group
from millrace.core.rewards.tournament.group_reward import tournament
from millrace.core.rewards.tournament.schemes import SCHEMES, Pair, TournamentStanding, bracket_places

REWARD = "millrace.core.rewards.tournament.group_reward:tournament"
asked: list[tuple[str, str]] = []


def longer(first: RewardInput, second: RewardInput, *, scale: int = 1) -> float:
    asked.append((first.response, second.response))
    a, b = len(first.response) // scale, len(second.response) // scale
    return 0.5 if a == b else float(a > b)


async def longer_later(first: RewardInput, second: RewardInput) -> float:
    await asyncio.sleep(0)
    return longer(first, second)


def likes_the_first(first: RewardInput, second: RewardInput) -> float:
    return 1.0


def says(first: RewardInput, second: RewardInput, *, answer: Any) -> Any:
    return answer


@pytest.fixture(autouse=True)
def comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comparisons", sys.modules[__name__])
    asked.clear()


def play(lengths: Sequence[int], **options: Any) -> list[RewardResult]:
    samples = [RewardInput("Write.", "x" * length) for length in lengths]
    return asyncio.run(tournament(samples, **{"compare": "comparisons:longer", **options}))


def rewards(lengths: Sequence[int], **options: Any) -> list[float]:
    return [result.reward for result in play(lengths, **options)]


def test_a_round_robin_ranks_all() -> None:
    assert rewards([1, 4, 2, 3], scheme="round_robin") == pytest.approx([0, 1, 1 / 3, 2 / 3])
    assert len(asked) == 2 * 6
    assert rewards([1, 4, 2, 2], scheme="round_robin", reward="win_rate") == pytest.approx([0, 1, 0.5, 0.5])
    assert rewards([2, 2, 1], scheme="round_robin") == [0.75, 0.75, 0]  # equal ones share their places


def test_an_anchor_meets_each_once() -> None:
    played = play([1, 5, 2, 4, 3], scheme="anchor", both_orders=False)
    assert len(asked) == 4
    (anchor,) = set.intersection(*(set(pair) for pair in asked))
    for length, result in zip([1, 5, 2, 4, 3], played, strict=True):
        better = len(anchor) < length
        assert result.parts["meetings"] == (4 if length == len(anchor) else 1)
        assert length == len(anchor) or result.parts["win_rate"] == float(better)


@pytest.mark.parametrize("n", range(2, 18))
def test_an_elimination_finds_the_best_with_few_comparisons(n: int) -> None:
    played = rewards(range(1, n + 1), scheme="elimination", both_orders=False)
    assert played[-1] == 1.0
    assert len(asked) == 2 * (n - 1)
    assert sum(played) == pytest.approx(n / 2)


def test_the_strongest_seeds_meet_in_the_final() -> None:
    assert bracket_places(8) == [0, 7, 3, 4, 1, 6, 2, 5]
    for size in (2, 4, 8, 16):
        half = bracket_places(size)[: size // 2]
        assert (0 in half) != (1 in half)


def brute_force(lengths: Sequence[int]) -> list[float]:
    """Places by counting, for a comparison that is an order."""
    n = len(lengths)
    return [(sum(b < a for b in lengths) + (sum(b == a for b in lengths) - 1) / 2) / (n - 1) for a in lengths]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=2, max_size=9), st.sampled_from(sorted(SCHEMES)), st.integers(0, 3)
)
def test_rewards_average_one_half_and_a_round_robin_is_the_order(
    lengths: list[int], scheme: str, seed: int
) -> None:
    options: dict[str, Any] = {"scheme": scheme, "seed": seed}
    played = play(lengths, **options)
    places = [result.reward for result in played]
    assert sum(places) == pytest.approx(len(lengths) / 2)
    assert all(0 <= place <= 1 for place in places)
    assert played == play(lengths, **options)
    best = max(range(len(lengths)), key=lambda at: (places[at], lengths[at]))
    if scheme == "round_robin":
        assert places == pytest.approx(brute_force(lengths))
    if scheme == "elimination":
        assert lengths[best] == max(lengths)


def test_points_of_every_scheme_are_of_meetings() -> None:
    async def first_wins(pairs: Sequence[Pair]) -> list[float]:
        return [1.0] * len(pairs)

    for scheme, n in itertools.product(SCHEMES.values(), (1, 2, 5)):
        standing: TournamentStanding = asyncio.run(scheme(n, range(n), first_wins))
        assert sum(standing.points) == sum(standing.meetings) / 2


def test_both_orders_cancel_a_liking_for_the_first() -> None:
    fair = rewards([1, 2, 3], compare="comparisons:likes_the_first", scheme="round_robin")
    assert fair == [0.5, 0.5, 0.5]
    unfair = rewards(
        [1, 2, 3], compare="comparisons:likes_the_first", scheme="round_robin", both_orders=False
    )
    assert unfair != fair


def test_the_comparison_may_be_async_and_has_options() -> None:
    assert rewards([1, 3], compare="comparisons:longer_later") == [0.0, 1.0]
    scaled = {"function": "comparisons:longer", "options": {"scale": 10}}
    assert rewards([1, 3], compare=scaled) == [0.0, 1.0] or rewards([1, 3], compare=scaled) == [1.0, 0.0]
    assert rewards([1, 3], compare=scaled, scheme="round_robin") == [0.5, 0.5]
    assert rewards([7]) == [0.5]


def test_it_is_a_group_reward() -> None:
    rows = [
        {"prompt": '"Write."', "response": "x" * n, "label": None, "metadata": None, "response_length": n}
        | {"status": "completed"}
        for n in (1, 2)
    ]
    scored = score_group(REWARD, {"compare": "comparisons:longer"}, rows)
    assert [each["reward"] for each in scored] == [0.0, 1.0]
    assert scored[1]["parts"] == {"place": 1.0, "win_rate": 1.0, "meetings": 2.0}


def test_texts_of_comparisons_are_kept_for_both() -> None:
    answer = RewardResult(1.0, {"words": "The first."})
    first, second = play(
        [1, 2], compare={"function": "comparisons:says", "options": {"answer": answer}}, scheme="round_robin"
    )
    assert first.reward == second.reward == 0.5
    assert first.parts["words"].split("\n\n") == [  # type: ignore[union-attr]
        "As the first of two, against sample 2:\nThe first.",
        "As the second of two, against sample 2:\nThe first.",
    ]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"scheme": "swiss"},
            ConfigError,
            "reward.options.scheme: swiss is not a choice; give round_robin or",
        ),
        ({"reward": "elo"}, ConfigError, "reward.options.reward: elo is not a choice"),
        ({"compare": 3}, ConfigError, "reward.options.compare: it names no function"),
        ({"compare": "comparisons:nothing"}, ConfigError, "has no function nothing"),
        ({"compare": {"function": "comparisons:says", "options": {"answer": 2}}}, ValueError, "returned 2;"),
        (
            {"compare": {"function": "comparisons:says", "options": {"answer": "A"}}},
            TypeError,
            "returned a str; return 1, 0 or 0.5",
        ),
    ],
)
def test_wrong_options_and_answers_are_named(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        play([1, 2], **options)
