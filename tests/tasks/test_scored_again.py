"""Samples that could not be scored: what the spent budget says, and what the next start scores again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from millrace.connectors.storage.iteration_files import record_path
from millrace.connectors.storage.parts import read_parts, write_part
from millrace.core.config import RunConfig
from millrace.core.contracts import schema
from millrace.core.contracts.sample import GeneratedSample, ScoredSample, Scoring
from millrace.core.errors import BudgetError
from millrace.tasks.context import IterationContext
from millrace.tasks.filter import filter_groups
from millrace.tasks.reward import reward, take_back_failures
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.stream import Stream
from tests.support import failing_rewards
from tests.support.stored_samples import drawn_group, sample_of

pytestmark = pytest.mark.usefixtures("one_credit_worker")

MakeConfig = Callable[..., RunConfig]
FUSSY = "tests.support.failing_rewards:fussy"
GOOD, BAD, SLOW = "good", "bad", "slow"
HERE = ("evaluate_before", "sample_prompts", "rollout", "reward")


@pytest.fixture
def make_context(make_config: MakeConfig) -> Callable[..., IterationContext]:
    """make_context(corrected=..., **reward): the second iteration, of two groups of four, whose filter has settled."""

    def make(*, corrected: bool = False, **settings: Any) -> IterationContext:
        options = {"function": FUSSY, "options": {"corrected": corrected}}
        config = make_config(reward={**options, **settings})
        ctx = IterationContext(Runtime(config), 1, Stream(released=2))
        ctx.stream.settled = True
        return ctx

    return make


def sample(number: int, response: str) -> GeneratedSample:
    """A sample by its number among all of the iteration."""
    return sample_of(drawn_group(number // 4), number % 4, response)


def generated(ctx: IterationContext, *responses: str) -> list[GeneratedSample]:
    """Store samples with these responses as a part."""
    rows = [sample(number, response) for number, response in enumerate(responses)]
    write_part(ctx.folder, "rollouts", schema.to_table(rows, "rollouts"), "rollouts")
    return rows


def score(number: int, scoring: Scoring = "scored", value: float = 1.0) -> ScoredSample:
    made = sample(number, GOOD)
    return ScoredSample(
        sample_id=made.sample_id,
        group_id=made.group_id,
        reward=value if scoring == "scored" else None,
        reward_parts=[],
        scoring=scoring,
        reason=None if scoring == "scored" else "KeyError: 'points'",
        scoring_s=0.0,
    )


def stored(ctx: IterationContext, *parts: Sequence[ScoredSample]) -> None:
    for part in parts:
        write_part(ctx.folder, "rewards", schema.to_table(part, "rewards"), "rewards")


def rewards(ctx: IterationContext) -> list[dict[str, Any]]:
    return read_parts(ctx.folder, "rewards", "rewards").to_pylist()


@pytest.mark.parametrize(
    ("share", "responses", "limit", "reason"),
    [
        (
            0.25,
            [GOOD, BAD, BAD, BAD] + 4 * [GOOD],
            "3 samples could not be scored, more than reward.max_failed_share = 0.25 allows (2 of 8)",
            "KeyError: 'points' in failing_rewards.py, line {line} (3 of 3, such as sample g0-",
        ),
        (
            0.0,
            [GOOD, SLOW] + 6 * [GOOD],
            "1 samples could not be scored, more than reward.max_failed_share = 0 allows (0 of 8)",
            "no answer within 1 s (reward.timeout_s) (1 of 1, such as sample g0-",
        ),
    ],
    ids=["raises", "times out"],
)
async def test_a_spent_budget_names_the_reason_and_what_failed_is_scored_again(
    make_context: Callable[..., IterationContext], share: float, responses: list[str], limit: str, reason: str
) -> None:
    ctx = make_context(timeout_s=1, max_failed_share=share)
    generated(ctx, *responses)
    lines, start = inspect.getsourcelines(failing_rewards.fussy)
    line = start + next(number for number, text in enumerate(lines) if "points" in text)
    with pytest.raises(BudgetError) as caught:
        await reward.fn(ctx)
    ctx.runtime.scoring.close()
    said = str(caught.value)
    assert said.startswith(f"iteration 2: {limit}; most often: {reason.format(line=line)}")
    assert f"; correct {FUSSY} or the data" in said
    assert "`millrace discard a --from 2 --root " in said
    first = {row["sample_id"]: row for row in rewards(ctx)}
    outcomes = [row["scoring"] for row in first.values()]
    assert outcomes.count("failed") == responses.count(BAD)
    assert outcomes.count("timed_out") == responses.count(SLOW)

    ctx = make_context(corrected=True)
    await take_back_failures(ctx)
    record = await reward.fn(ctx)
    ctx.runtime.scoring.close()
    assert (record["scored"], record["failed"], record["timed_out"]) == (8, 0, 0)
    after = rewards(ctx)
    assert len(after) == len({row["sample_id"] for row in after}) == 8
    assert {file["path"] for file in record["files"]} == set(ctx.folder.list("rewards"))
    for row in after:
        before = first.get(row["sample_id"])
        if before and before["scoring"] == "scored":
            assert row == before
        else:
            assert row["reward"] in (0.5, -1.0)


FAILED, SCORED = score(1, "failed"), score(0)
PARTS = {
    "all of a part": ([SCORED], [FAILED, score(2, "timed_out")]),
    "some of a part": ([SCORED, FAILED], [score(2)]),
    "after a kill between the new part and the removal of the old one": ([SCORED, FAILED], [SCORED]),
    "none": ([SCORED], [score(2), score(3, "skipped")]),
}


@pytest.mark.parametrize("records", [(), HERE[:3], HERE])
@pytest.mark.parametrize("name", PARTS)
async def test_what_failed_is_taken_back_and_what_was_scored_stays_once(
    make_context: Callable[..., IterationContext], name: str, records: tuple[str, ...]
) -> None:
    ctx = make_context()
    stored(ctx, *PARTS[name])
    for task in records:
        ctx.folder.write_sealed(record_path(task), {})
    wanted = {row.sample_id for part in PARTS[name] for row in part if row.scoring in ("scored", "skipped")}
    before = ctx.folder.list()
    for _ in range(2):
        await take_back_failures(ctx)
        assert sorted(row["sample_id"] for row in rewards(ctx)) == sorted(wanted)
    if name == "none":
        assert ctx.folder.list() == before
    else:
        left = set(HERE[:2]) & set(records)
        assert set(ctx.folder.list("results")) == {record_path(task) for task in left}


@pytest.mark.parametrize(
    "fixed", ["filter", "train_step", "sync_weights", "checkpoint", "evaluate", "publish"]
)
async def test_once_the_batch_is_fixed_nothing_is_scored_again(
    make_context: Callable[..., IterationContext], fixed: str
) -> None:
    ctx = make_context()
    stored(ctx, [SCORED, FAILED])
    for task in (*HERE, fixed):
        ctx.folder.write_sealed(record_path(task), {})
    before = {path: ctx.folder.read(path) for path in ctx.folder.list()}
    await take_back_failures(ctx)
    assert {path: ctx.folder.read(path) for path in ctx.folder.list()} == before


async def test_groups_that_only_the_failures_called_for_are_returned(make_config: MakeConfig) -> None:
    """An earlier attempt drew a third group in place of one that could not be scored; it is not needed any more."""
    config = make_config()
    ctx = IterationContext(Runtime(config), 1, Stream(released=2))
    groups = [drawn_group(number) for number in range(4)]
    ctx.folder.write_table("prompts.parquet", schema.to_table(groups, "prompts"), "prompts")
    generated(ctx, *[GOOD] * 12)
    stored(ctx, [score(number, value=number % 2) for number in range(12)])
    try:
        record = await filter_groups.fn(ctx)
    finally:
        ctx.runtime.scoring.close()
    assert (record["groups_kept"], record["groups_dropped"], record["groups_returned"]) == (2, 0, 2)
    assert record["verdicts"] == {"kept": 8, "returned": 8}
