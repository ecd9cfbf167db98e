"""The filter over stored parts: what its filters see of rollouts, a filter that fails, and the same verdicts again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from millrace.connectors.storage.parts import write_part
from millrace.core.config import RunConfig
from millrace.core.contracts import schema
from millrace.core.contracts.sample import DrawnGroup, GeneratedSample, ScoredSample
from millrace.core.contracts.task_records import FilterRecord
from millrace.core.errors import BudgetError
from millrace.core.hooks.group_filters import KINDS
from millrace.core.hooks.protocols import GroupSample
from millrace.tasks.context import IterationContext
from millrace.tasks.filter import filter_groups
from millrace.tasks.publish import _filter_metrics
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.stream import Stream
from tests.support.slow_members import slow_but
from tests.support.stored_samples import drawn_group, sample_of

pytestmark = pytest.mark.usefixtures("one_credit_worker")

DRAWN, EACH = 4, 4


def drawn(number: int) -> DrawnGroup:
    return drawn_group(number, metadata=json.dumps({"level": number}))


def rollout(number: int, index: int) -> GeneratedSample:
    """Group 0 is cut at the limit, group 1 long, the others short."""
    length = {0: 3, 1: 2}.get(number, 1)
    status = "truncated" if number == 0 else "completed"
    return sample_of(drawn(number), index, f"response {index}", length, status=status)


def score(number: int, index: int) -> ScoredSample:
    return ScoredSample(
        sample_id=f"g{number}-{index:04d}",
        group_id=f"g{number}",
        reward=float(index == 0),
        reward_parts=[("exact", 0.5)],
        scoring="scored",
        reason=None,
        scoring_s=0.0,
    )


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Up to how many groups of the draw were released, one after the other."""
    seen: list[int] = []
    release = Stream.release

    async def noting(stream: Stream, groups: int) -> None:
        seen.append(groups)
        await release(stream, groups)

    monkeypatch.setattr(Stream, "release", noting)
    return seen


@pytest.fixture
def judged(make_config: Callable[..., RunConfig]) -> Callable[..., Any]:
    """await judged(**filter): the record and the stored reasons by group, of a filter that needs two of four groups."""

    async def run(**settings: Any) -> tuple[FilterRecord, dict[str, str | None]]:
        config = make_config(filter={"refill_factor": 1.0, **settings})
        ctx = IterationContext(Runtime(config), 1, Stream(released=2))
        if not ctx.folder.exists("prompts.parquet"):
            groups = [drawn(number) for number in range(DRAWN)]
            ctx.folder.write_table("prompts.parquet", schema.to_table(groups, "prompts"), "prompts")
            for number in range(DRAWN):
                made = [rollout(number, index) for index in range(EACH)]
                write_part(ctx.folder, "rollouts", schema.to_table(made, "rollouts"), "rollouts")
                scored = [score(number, index) for index in range(EACH)]
                write_part(ctx.folder, "rewards", schema.to_table(scored, "rewards"), "rewards")
        try:
            record = await filter_groups.fn(ctx)
        finally:
            ctx.runtime.scoring.close()
        verdicts = ctx.folder.read_table("verdicts.parquet", "verdicts").to_pylist()
        return record, {row["group_id"]: row["reason"] for row in verdicts}

    return run


def sees(samples: Sequence[GroupSample]) -> str | None:
    first = samples[0]
    assert (first.sample_id, first.reward, first.scoring, first.parts) == (
        f"{first.sample_id[:2]}-0000",
        1.0,
        "scored",
        {"exact": 0.5},
    )
    assert (first.input.response, first.input.label, first.input.prompt) == ("response 0", "2", "1+1=")
    assert first.truncated == (first.input.metadata["level"] == 0)
    assert first.response_length == {0: 3, 1: 2}.get(first.input.metadata["level"], 1)
    return "too easy" if first.input.metadata["level"] == 1 else None


def drops_ends(samples: Sequence[GroupSample]) -> str | None:
    return "an end" if samples[0].sample_id[:2] in ("g0", "g3") else None


def fails_on_the_first(samples: Sequence[GroupSample]) -> str | None:
    if samples[0].sample_id.startswith("g0"):
        raise KeyError("points")
    return None


@pytest.fixture(autouse=True)
def my_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_filters", sys.modules[__name__])


async def test_lengths_are_those_of_the_stored_rollouts(judged: Callable[..., Any]) -> None:
    record, reasons = await judged(max_truncated_share=0.5, max_mean_response_tokens=1)
    assert reasons == {
        "g0": "4 of 4 responses truncated, filter.max_truncated_share = 0.5",
        "g1": "2 tokens a response on average, filter.max_mean_response_tokens = 1",
        "g2": None,
        "g3": None,
    }
    assert record["dropped_by_kind"] == {**dict.fromkeys(KINDS, 0), "truncated": 1, "too_long": 1}


async def test_where_too_few_are_left_the_earliest_stand_in(
    judged: Callable[..., Any], make_config: Callable[..., RunConfig]
) -> None:
    record, reasons = await judged(reward_band=(0.5, 1.0))
    assert reasons["g0"] == "kept though mean reward 0.25 is outside 0.5 to 1"
    assert (record["groups_kept"], record["groups_dropped"]) == (2, 2)
    metrics = _filter_metrics(make_config().rollout.prompts, record)
    assert metrics["filter/dropped_reward_band"] == 2
    with pytest.raises(BudgetError, match="only 0 of 2 groups passed the filter"):
        await judged(reward_band=(0.5, 1.0), when_insufficient="stop")


@pytest.mark.parametrize(("oversample", "groups"), slow_but([(0.0, 3), (0.5, 4)], (0.5, 4)))
async def test_what_is_begun_before_it_is_needed_changes_no_verdict(
    judged: Callable[..., Any], released: list[int], oversample: float, groups: int
) -> None:
    """Group 0 is dropped, so that group 2 is needed. Group 3, which would be dropped too, is not judged."""
    record, reasons = await judged(group_filter="my_filters:drops_ends", oversample=oversample)
    assert reasons == {"g0": "an end", "g1": None, "g2": None, "g3": None}
    assert record["verdicts"] == {"dropped: an end": 4, "kept": 8, "returned": 4}
    assert (record["groups_kept"], record["groups_dropped"], record["groups_returned"]) == (2, 1, 1)
    assert max(released) == groups


async def test_an_own_filter_sees_what_the_reward_saw_and_judges_the_same_again(
    judged: Callable[..., Any],
) -> None:
    first = await judged(group_filter="my_filters:sees")
    assert first[1] == {"g0": None, "g1": "too easy", "g2": None, "g3": None}
    assert await judged(group_filter="my_filters:sees") == first


async def test_a_filter_that_fails_drops_its_group_within_the_budget(judged: Callable[..., Any]) -> None:
    record, reasons = await judged(group_filter="my_filters:fails_on_the_first", max_failed_share=0.5)
    line = fails_on_the_first.__code__.co_firstlineno + 2
    said = f"filter.group_filter failed: KeyError: 'points' in test_filter.py, line {line}"
    assert reasons == {"g0": said, "g1": None, "g2": None, "g3": None}
    assert record["dropped_by_kind"]["filter_failed"] == 1
    with pytest.raises(BudgetError) as caught:
        await judged(group_filter="my_filters:fails_on_the_first")
    assert str(caught.value).startswith(
        "iteration 2: 1 groups could not be judged by filter.group_filter.function = my_filters:fails_on_the_first, more than "
        f"filter.max_failed_share = 0.1 allows (0 of 2); most often: {said} (1 of 1, such as group g0); correct the function"
    )
