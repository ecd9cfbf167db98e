"""Levels, pools and stages: what is drawn follows from the scores of committed iterations, and from nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.accounts.curriculum import Mastery, SourcePlan, source_and_level
from millrace.core.accounts.history import GroupOutcome, IterationHistory
from millrace.core.accounts.ledger import Draw, Ledger
from millrace.core.accounts.staleness import Ahead
from millrace.core.config.data import CurriculumStage, Levels, Pools
from millrace.core.contracts.sample import Verdict

VERDICTS: list[Verdict] = ["kept", "dropped", "returned"]


def scored(iteration: int, draws: list[Draw], score: Callable[[Draw], float | None]) -> IterationHistory:
    """A committed iteration that kept these groups with these scores."""
    return IterationHistory.of(
        iteration,
        [
            GroupOutcome(**vars(draw), verdict="kept", steps=[iteration + 1], score=score(draw))
            for draw in draws
        ],
    )


def levelled(levels: Levels, rows: int = 1000) -> dict[str, SourcePlan]:
    return {"sums": SourcePlan(1.0, dict.fromkeys(range(levels.first, levels.last + 1), rows), levels)}


@pytest.mark.parametrize(
    ("scores", "highest"),
    [
        ([1.0] * 3, 0),  # too few groups
        ([1.0] * 4, 1),
        ([1.0] * 8, 2),
        ([1.0, 1.0, 0.5, 0.25], 0),  # a mean below 0.75
        ([0.0] * 4 + [1.0] * 4, 1),  # failures are forgotten
        ([1.0, 1.0, 0.5, 0.5], 1),  # a mean of exactly 0.75
        ([1.0] * 40, 3),  # there is none above the last
    ],
)
def test_the_highest_level_rises_with_its_mean_reward(scores: list[float], highest: int) -> None:
    levels, mastery = Levels(first=0, last=3, groups=4, raise_from=0.75), Mastery(0)
    for score in scores:
        mastery = mastery.after(score, levels)
    assert mastery.highest == highest


def test_prompts_come_from_the_window_below_the_highest_level() -> None:
    levels = Levels(first=1, last=9, window=3, groups=8, raise_from=0.8)
    ledger = Ledger(3, levelled(levels))
    seen: list[set[int]] = []
    for iteration in range(12):
        draws = ledger.draw(iteration, 40)
        drawn = Counter(source_and_level(draw.source)[1] for draw in draws)
        highest = ledger.progress.at(iteration).mastery["sums"].highest
        window = set(range(max(1, highest - 2), highest + 1))
        assert drawn.keys() == window
        assert min(drawn.values()) >= 40 / len(window) / 3, "each level of the window has its part"
        seen.append(window)
        # the policy can do what is below 6
        ledger.apply(
            scored(iteration, draws, lambda draw: float((source_and_level(draw.source)[1] or 0) < 6))
        )
    assert seen[0] == {1}
    assert seen[-1] == {4, 5, 6}, "it stays where the policy does not do well yet"


def test_solved_and_unsolved_rows_rest_and_all_come_back() -> None:
    pools = Pools(solved_from=1.0, unsolved_to=0.0, solved_share=0.1, unsolved_share=0.5)
    ledger = Ledger(0, {"a": SourcePlan(1.0, 300, None, pools)})
    worth = {row: (1.0, 0.0, 0.5)[row % 3] for row in range(300)}
    passes: Counter[int] = Counter()
    epochs: dict[int, Counter[int]] = {}
    for iteration in range(60):
        draws = ledger.draw(iteration, 50)
        for draw in draws:
            passes[draw.row] += 1
            epochs.setdefault(draw.epoch, Counter())[draw.row % 3] += 1
        ledger.apply(scored(iteration, draws, lambda draw: worth[draw.row]))
    assert epochs[0] == {0: 100, 1: 100, 2: 100}, "the first pass takes every row"
    assert epochs[1][2] == 100, "those between are in every pass"
    assert epochs[1][0] < 25
    assert 30 < epochs[1][1] < 70
    assert sum(passes[row] > 1 for row in range(0, 300, 3)) > 60, "solved rows come back in time"


def test_a_pool_that_would_take_no_row_takes_all() -> None:
    pools = Pools(solved_share=1e-9, unsolved_share=1e-9)
    ledger = Ledger(0, {"a": SourcePlan(1.0, 4, None, pools)})
    for iteration in range(6):
        draws = ledger.draw(iteration, 4)
        assert sorted(draw.row for draw in draws) == [0, 1, 2, 3]
        ledger.apply(scored(iteration, draws, lambda _: 1.0))


def test_stages_end_by_iterations_or_by_reward() -> None:
    stages = [
        CurriculumStage(weights={"easy": 1}, iterations=2),
        CurriculumStage(weights={"easy": 1, "hard": 3}, reward=0.8, groups=8),
        CurriculumStage(weights={"hard": 1}),
    ]
    ledger = Ledger(0, {"easy": (1.0, 500), "hard": (1.0, 500), "other": (9.0, 500)}, stages=stages)
    shares = []
    for iteration in range(8):
        draws = ledger.draw(iteration, 8)
        shares.append(dict(Counter(draw.source for draw in draws)))
        score = 1.0 if iteration >= 4 else 0.5
        ledger.apply(scored(iteration, draws, partial(_always, score)))
    assert shares[:2] == [{"easy": 8}] * 2
    assert all(share == {"easy": 2, "hard": 6} for share in shares[2:5])
    assert shares[5:] == [{"hard": 8}] * 3


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_levels_and_stages_show_as_many_iterations_later_as_runs_may_be_ahead(ahead: int) -> None:
    stages = [
        CurriculumStage(weights={"sums": 1}, iterations=2),
        CurriculumStage(weights={"other": 1, "sums": 1}),
    ]
    sources = levelled(Levels(last=1, window=1, groups=4)) | {"other": SourcePlan(1.0, 500)}
    ledger = Ledger(0, sources, stages=stages, ahead=Ahead(((0, ahead),)))
    waiting: list[IterationHistory] = []
    seen = []
    for iteration in range(8):
        draws = ledger.draw(iteration, 4)
        ledger.open(iteration, [draw.key for draw in draws])
        waiting.append(scored(iteration, draws, partial(_always, 1.0)))
        seen.append({source_and_level(draw.source) for draw in draws})
        if len(waiting) > ahead:
            ledger.apply(waiting.pop(0))
    first, raised = 1 + ahead, 2 + ahead
    assert seen[:first] == [{("sums", 0)}] * first, "the first iteration raises the level"
    assert seen[first:raised] == [{("sums", 1)}], "the second ends the stage"
    assert all(found == {("sums", 1), ("other", None)} for found in seen[raised:])


def test_prompts_that_were_drawn_in_the_stage_before_do_not_end_a_stage() -> None:
    """Iterations under way count for the stage that drew them, else a stage would end before a prompt of it is scored."""
    stages = [
        CurriculumStage(weights={"easy": 1}, reward=0.8, groups=4),
        CurriculumStage(weights={"easy": 1, "hard": 1}, reward=0.8, groups=4),
        CurriculumStage(weights={"last": 1}),
    ]
    sources = {name: SourcePlan(1.0, 500) for name in ("easy", "hard", "last")}
    ledger = Ledger(0, sources, stages=stages, ahead=Ahead(((0, 1),)))
    waiting: list[IterationHistory] = []
    seen = []
    for iteration in range(7):
        draws = ledger.draw(iteration, 4)
        ledger.open(iteration, [draw.key for draw in draws])
        learned = {"easy"} if iteration < 3 else {"easy", "hard", "last"}
        waiting.append(scored(iteration, draws, partial(_among, learned)))
        seen.append({draw.source for draw in draws})
        if len(waiting) > 1:
            ledger.apply(waiting.pop(0))
    assert seen == [{"easy"}] * 2 + [{"easy", "hard"}] * 3 + [{"last"}] * 2


def _among(learned: set[str], draw: Draw) -> float:
    return float(draw.source in learned)


def _always(score: float, _: Draw) -> float:
    return score


policies_ = st.sampled_from(
    [
        {"a": SourcePlan(1.0, dict.fromkeys(range(5), 7), Levels(last=4, groups=2, window=2))},
        {"a": SourcePlan(1.0, 9, None, Pools()), "b": SourcePlan(2.0, 5)},
        {
            "a": SourcePlan(1.0, dict.fromkeys(range(3), 6), Levels(last=2, groups=1), Pools()),
            "b": SourcePlan(3.0, 4, None, Pools(solved_share=0.3)),
        },
    ]
)
stages_ = st.sampled_from(
    [
        [],
        [
            CurriculumStage(weights={"a": 1}, iterations=2),
            CurriculumStage(weights={"a": 1, "b": 1}, reward=0.5, groups=4),
        ],
    ]
)


@settings(max_examples=30, deadline=None)
@given(
    policies_,
    stages_,
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=2, max_size=9),
    st.integers(0, 2),
    st.data(),
)
def test_over_any_history_a_restarted_process_draws_the_same(
    plans: dict[str, SourcePlan],
    stages: list[CurriculumStage],
    sizes: list[tuple[int, int]],
    lag: int,
    data: Any,
) -> None:
    """Also where iterations are drawn before the ones before them are committed."""
    stages = stages if "b" in plans else []
    early, late = (Ledger(7, plans, stages=stages, ahead=Ahead(((0, lag),))) for _ in range(2))
    history: list[IterationHistory] = []
    for iteration, (need, reserve) in enumerate(sizes):
        late.extend(history[: max(late.iterations, iteration - lag)])
        early.extend(history)
        draws = late.draw(iteration, need, reserve)
        assert early.draw(iteration, need, reserve) == draws
        assert late.draw(iteration, need, reserve + 3)[: len(draws)] == draws, "a longer draw begins the same"
        late.open(iteration, [draw.key for draw in draws])
        groups = []
        for draw in draws:
            verdict = data.draw(st.sampled_from(VERDICTS))
            groups.append(
                GroupOutcome(
                    **vars(draw),
                    verdict=verdict,
                    reason="zero variance" if verdict == "dropped" else None,
                    steps=[iteration + 1] if verdict == "kept" else [],
                    score=None
                    if verdict == "returned"
                    else data.draw(st.sampled_from([0.0, 0.5, 1.0, None])),
                )
            )
        history.append(IterationHistory.of(iteration, groups))
    late.extend(history)
    stored = [IterationHistory.model_validate_json(part.model_dump_json()) for part in history]
    fresh = Ledger(7, plans, stages=stages, ahead=Ahead(((0, lag),))).extend(stored)
    assert fresh.counts == late.counts
    assert fresh.draw(len(sizes), 20) == late.draw(len(sizes), 20)
    done = Counter(
        key
        for part in stored
        for key, verdict in zip(part.keys(), part.verdict, strict=True)
        if verdict != "returned"
    )
    assert max(done.values(), default=1) == 1, "a row is trained or dropped once a pass"
