"""The figures that publish logs and commits: the account of tokens is among them, whichever release stored the parts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES

from millrace.connectors.storage.iteration_files import record_path
from millrace.connectors.storage.parts import write_part
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.contracts import schema
from millrace.core.contracts.sample import ScoredSample
from millrace.core.contracts.task_records import FileRecord
from millrace.core.errors import StorageError
from millrace.tasks.context import IterationContext
from millrace.tasks.filter import filter_groups
from millrace.tasks.publish import _commit, _figures, _manifest, _train_metrics, _without_advantage
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.stream import Stream
from tests.support.stored_samples import drawn_group, sample_of

pytestmark = pytest.mark.usefixtures("one_credit_worker")

SCORED = {"scored_tokens": 90, "seconds": {"scoring": 3.0}}
STEP = {"version": 3, "loss": 0.5, "grad_norm": 2.0, "lr": 1e-3, "logprob_gap_max": 0.0, **SCORED}
NO_SERVER = {PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_CLIENT_MAX_RETRIES: 0}
HELD_OUT = {"sets": [{"name": "sums", "path": "held_out.jsonl"}]}
TOKENS = 3  # of each sample


@pytest.fixture
async def filtered(make_config: Callable[..., RunConfig]) -> tuple[IterationContext, list[FileRecord]]:
    """An iteration of two groups whose batch is fixed, and the entries of its rollout parts."""
    config = make_config()
    ctx = IterationContext(Runtime(config), 1, Stream(released=2))
    groups = [drawn_group(number) for number in range(2)]
    ctx.folder.write_table("prompts.parquet", schema.to_table(groups, "prompts"), "prompts")
    parts: list[FileRecord] = []
    scored: list[FileRecord] = []
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
        scored.append(
            write_part(ctx.folder, "rewards", schema.to_table(scores, "rewards"), "rewards").record()
        )
    try:
        record = await filter_groups.fn(ctx)
    finally:
        ctx.runtime.scoring.close()
    ctx.folder.write_sealed(record_path("filter"), {"result": json.dumps(record)})
    known: dict[str, Any] = {
        "sample_prompts": {},
        "rollout": {"seconds": 5.0, "engines_s": 4.0, "files": parts},
        "reward": {"seconds": 2.0, "files": scored},
        "filter": record,
        "train_step": {"steps": [STEP]},
    }
    ctx.records.update(known)  # type: ignore[typeddict-item]
    return ctx, parts


async def test_every_generated_token_is_accounted_for(
    filtered: tuple[IterationContext, list[FileRecord]],
) -> None:
    ctx, _ = filtered
    metrics, counted = _figures(ctx)
    assert metrics["tokens/generated"] == metrics["tokens/trained"] == metrics["rollout/tokens"] == 8 * TOKENS
    assert counted.account.problems() == []


WORKED = {  # a start of 4 s: rollout, reward and filter wait for engines within their tasks
    "sample_prompts": ((0.0, 1.0), {"time/sample_prompts_s": 1.0}),
    "rollout": ((1.0, 6.0), {"time/rollout_s": 1.0, "time/engines_s": 4.0}),
    "reward": ((1.0, 6.5), {"time/reward_s": 1.5}),
    "filter": ((1.0, 7.0), {"time/filter_s": 2.0}),
    "train_step": ((7.0, 9.0), {"time/train_step_s": 0.5, "time/trainer_s": 1.5}),
    "sync_weights": ((9.0, 9.5), {"time/sync_weights_s": 0.5}),
    "checkpoint": ((9.0, 10.0), {"time/checkpoint_s": 1.0}),
    "evaluate": ((10.0, 12.0), {"time/evaluate_s": 2.0}),
}  # fmt: skip


async def test_no_figure_of_a_task_has_the_wait_for_engines_or_trainer_in_it(
    filtered: tuple[IterationContext, list[FileRecord]],
) -> None:
    ctx, _ = filtered
    ctx.times.intervals = {task: interval for task, (interval, _) in WORKED.items()}
    ctx.times.trainer_s = 1.5
    metrics, _ = _figures(ctx)
    expected = {name: value for _, figures in WORKED.values() for name, value in figures.items()}
    times = {name: value for name, value in metrics.items() if name.startswith("time/")}
    assert times == {**expected, "time/iteration_s": 12.0}
    assert metrics["rollout/tokens_per_second"] == 8 * TOKENS  # in 5 s, 4 of them for engines
    assert metrics["reward/tokens_per_second"] == 8 * TOKENS / 2.0
    assert metrics["train/scoring_tokens_per_second"] == 30.0
    assert {"rollout", "reward", "filter"} == {
        task for task, (start, _) in ctx.worked.items() if start == 5.0
    }


async def test_a_rollout_that_an_earlier_start_made_takes_no_time_now(
    filtered: tuple[IterationContext, list[FileRecord]],
) -> None:
    ctx, _ = filtered
    ctx.times.intervals = {"rollout": (1.0, 1.25)}
    assert ctx.worked == {"engines": (1.0, 1.25), "rollout": (1.25, 1.25)}


async def test_manifest_and_record_keep_when_each_task_worked(
    filtered: tuple[IterationContext, list[FileRecord]],
) -> None:
    ctx, parts = filtered
    step = ctx.folder.write_json("step.json", {"version": 3, "steps": [STEP]})
    records: dict[str, Any] = {
        "sample_prompts": {"files": [ctx.folder.entry("prompts.parquet").record()]},
        "rollout": {"files": parts},
        "reward": {"files": ctx.records["reward"]["files"]},
        "train_step": {"version": 3, "steps": [STEP], "files": [step.record()]},
    }
    for task, result in records.items():
        ctx.folder.write_sealed(record_path(task), {"result": json.dumps(result)})
    now = time.perf_counter()
    ctx.times.intervals = {"train_step": (now - 3, now - 1)}
    record = _commit(ctx, _manifest(ctx, {}))
    started, ended = record["worked"]["train_step"]
    assert ended - started == pytest.approx(2, abs=0.01)
    assert time.time() - ended == pytest.approx(1, abs=60)
    stored = RunFolder(ctx.config.storage.root, ctx.config.run.name).manifest(1)
    assert stored
    assert stored.tasks["worked"] == record["worked"]


async def test_a_part_that_the_record_does_not_name_keeps_it_from_closing(
    filtered: tuple[IterationContext, list[FileRecord]],
) -> None:
    ctx, parts = filtered
    ctx.records["rollout"]["files"] = parts[:1]
    with pytest.raises(StorageError, match="the account of iteration 2 does not close"):
        _figures(ctx)


@pytest.mark.parametrize(
    ("advantages", "samples"),
    [([0.0, 0.0], 2), ([1e-9, -1e-9], 2), ([0.0, 0.5], None), ([None, None], None), ([], None)],
)
def test_advantages_that_are_all_zero_are_told(advantages: list[float | None], samples: int | None) -> None:
    assert _without_advantage(pa.chunked_array([pa.array(advantages, pa.float32())])) == samples


@pytest.mark.parametrize(
    ("steps", "mean"),
    [
        ([(0.4, 1.0), (0.0, 0.0)], 0.4),
        ([(0.4, 0.5), (0.2, 0.1)], 0.3),
        ([(0.0, 0.0), (0.0, 0.0)], 0.0),
        ([(0.4, None), (0.2, None)], 0.3),  # supervised steps have no share
    ],
)
def test_steps_that_compared_nothing_are_left_out_of_the_mean_difference(
    steps: list[tuple[float, float | None]], mean: float
) -> None:
    made: list[Any] = [
        {**STEP, "logprob_gap_mean": gap, **({} if share is None else {"logprob_gap_share": share})}
        for gap, share in steps
    ]
    found = _train_metrics(made)
    assert found["train/logprob_gap_mean"] == pytest.approx(mean)
    assert found["train/loss"] == STEP["loss"]
