"""Which steps the difference of engine and trainer log-probabilities can refuse, and what they are held against."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from millrace.core.config import RunConfig
from millrace.core.contracts.task_records import FileRecord, FilterRecord, SampleSupervisedRecord, StepRequest
from millrace.core.logprob_gap import LogprobGuard
from millrace.tasks.context import IterationContext
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.train_step import train_step
from tests.support.asked_here import RanksHere

BATCH: FileRecord = {"path": "batch.parquet", "sha256": "aa", "size": 1, "rows": 8, "table": "batch"}
FLOOR = 0.03


class Ranks(RanksHere):
    """Trainer ranks that train nothing, and measure a floor where the run knows none."""

    def __init__(self) -> None:
        self.held: dict[int, LogprobGuard | None] = {}

    async def train(self, step: StepRequest) -> dict[str, Any]:
        assert step.batch_sha256 == BATCH["sha256"]
        assert not step.stores
        version, guard = step.version, step.guard
        self.held[version] = guard
        measures = guard is not None and guard.limit is None
        floor = FLOOR if guard is None or guard.floor is None else guard.floor
        return {"version": version, **({"logprob_gap_floor": floor} if measures else {})}


def runtime_with(root: Path, ranks: Ranks, limit: float | str = "auto", **algorithm: Any) -> Runtime:
    config = RunConfig.model_validate(
        {
            "run": {"name": "a", "iterations": 2},
            "model": {"path": "model"},
            "data": {"sources": [{"path": "train.jsonl"}]},
            "storage": {"root": str(root)},
            "rollout": {"prompts": 2, "samples_per_prompt": 4},
            "trainer": {"global_batch": 4},
            "algorithm": algorithm,
            "sync": {"max_logprob_gap": limit},
        }
    )
    runtime = Runtime(config)
    runtime.memory._trainer = ranks  # type: ignore[assignment]
    return runtime


def context(runtime: Runtime, index: int) -> IterationContext:
    """An iteration whose batch is recorded."""
    ctx = IterationContext(runtime, index)
    ctx.records["filter"] = cast(FilterRecord, {"files": [BATCH]})
    ctx.records["sample_supervised"] = cast(SampleSupervisedRecord, {"files": [BATCH]})
    return ctx


async def test_the_first_step_of_an_iteration_is_compared(tmp_path: Path) -> None:
    ranks = Ranks()
    runtime = runtime_with(tmp_path, ranks, limit=0.02)
    for index in (0, 1):
        await train_step.fn(context(runtime, index))
    assert ranks.held == {1: LogprobGuard(0.02), 2: None, 3: LogprobGuard(0.02), 4: None}


async def test_what_rounding_does_is_measured_once_a_run(tmp_path: Path) -> None:
    ranks = Ranks()
    runtime = runtime_with(tmp_path, ranks)
    for index in (0, 1):
        await train_step.fn(context(runtime, index))
    assert ranks.held[1] == LogprobGuard()
    assert ranks.held[3] == LogprobGuard(floor=FLOOR)


@pytest.mark.parametrize("measured", [0.5, None])
async def test_another_start_takes_it_from_the_iteration_before(
    tmp_path: Path, measured: float | None
) -> None:
    """An iteration in which nothing was compared, or whose limit was a number, says nothing: it is measured then."""
    ranks = Ranks()
    runtime = runtime_with(tmp_path, ranks)
    step = {"version": 2} if measured is None else {"version": 2, "logprob_gap_floor": measured}
    write_record(runtime, 0, {"steps": [step]})
    await train_step.fn(context(runtime, 1))
    assert ranks.held[3] == LogprobGuard(floor=measured)


async def test_reference_answers_have_no_gap_to_an_engine(tmp_path: Path) -> None:
    ranks = Ranks()
    runtime = runtime_with(tmp_path, ranks, loss="sft")
    await train_step.fn(context(runtime, 0))
    assert ranks.held == {1: None, 2: None}


def write_record(runtime: Runtime, index: int, result: dict[str, Any]) -> None:
    folder = runtime.run_folder.store.child(runtime.run_folder.iteration_path(index))
    folder.write_sealed("results/train_step.json", {"result": json.dumps(result)})
