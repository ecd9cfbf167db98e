"""The figures that publish logs and commits: the account of tokens is among them, whichever release stored the parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from millrace.connectors.storage.iteration_files import record_path
from millrace.connectors.storage.parts import write_part
from millrace.core.config import RunConfig
from millrace.core.contracts import schema
from millrace.core.contracts.sample import ScoredSample
from millrace.core.contracts.task_records import FileRecord
from millrace.core.errors import StorageError
from millrace.tasks.context import IterationContext
from millrace.tasks.filter import filter_groups
from millrace.tasks.publish import _figures
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.stream import Stream
from tests.support.stored_samples import drawn_group, sample_of

STEP = {"version": 3, "loss": 0.5, "lr": 1e-3, "logprob_gap_max": 0.0}
TOKENS = 3  # of each sample


@pytest.fixture
async def filtered(make_config: Callable[..., RunConfig]) -> tuple[IterationContext, list[FileRecord]]:
    """An iteration of two groups whose batch is fixed, and the entries of its rollout parts."""
    config = make_config()
    ctx = IterationContext(config, 1, Runtime(config), Stream(released=2))
    groups = [drawn_group(number) for number in range(2)]
    ctx.folder.write_table("prompts.parquet", schema.to_table(groups, "prompts"), "prompts")
    parts: list[FileRecord] = []
    for group in groups:
        made = [sample_of(group, index, "2", TOKENS) for index in range(4)]
        parts.append(
            write_part(ctx.folder, "rollouts", schema.to_table(made, "rollouts"), "rollouts").record()
        )
        scores = [
            ScoredSample(
                sample_id=sample.sample_id,
                group_id=group.group_id,
                reward=float(sample.index == 0),
                reward_parts=[],
                scoring="scored",
                reason=None,
                scoring_s=0.0,
            )
            for sample in made
        ]
        write_part(ctx.folder, "rewards", schema.to_table(scores, "rewards"), "rewards")
    try:
        record = await filter_groups.fn(ctx)
    finally:
        ctx.runtime.scoring.close()
    ctx.folder.write_json(record_path("filter"), {"result": json.dumps(record)})
    known: dict[str, Any] = {
        "sample_prompts": {},
        "rollout": {"seconds": 1.0, "files": parts},
        "reward": {},
        "filter": record,
        "train_step": {"steps": [STEP]},
    }
    ctx.records.update(known)  # type: ignore[typeddict-item]
    return ctx, parts


@pytest.mark.parametrize("named", [True, False], ids=["named by the record", "of an earlier release"])
async def test_every_generated_token_is_accounted_for(
    filtered: tuple[IterationContext, list[FileRecord]], named: bool
) -> None:
    ctx, _ = filtered
    if not named:
        del ctx.records["rollout"]["files"]
    metrics, account = _figures(ctx)
    assert metrics["tokens/generated"] == metrics["tokens/trained"] == metrics["rollout/tokens"] == 8 * TOKENS
    assert account.problems() == []


async def test_a_part_that_the_record_does_not_name_keeps_it_from_closing(
    filtered: tuple[IterationContext, list[FileRecord]],
) -> None:
    ctx, parts = filtered
    ctx.records["rollout"]["files"] = parts[:1]
    with pytest.raises(StorageError, match="the account of iteration 2 does not close"):
        _figures(ctx)
