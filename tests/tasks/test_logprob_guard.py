"""Which steps the difference of engine and trainer log-probabilities can refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from millrace.connectors.megatron.refusals import check_metrics
from millrace.core.config import RunConfig
from millrace.core.contracts.task_records import FileRecord, FilterRecord, SampleSupervisedRecord
from millrace.core.errors import RefusedStepError
from millrace.tasks.context import IterationContext
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.train_step import train_step

LIMIT, CLOSE, FAR = 0.02, 0.001, 0.5
BATCH: FileRecord = {"path": "batch.parquet", "sha256": "aa", "size": 1, "rows": 8, "table": "batch"}


class Ranks:
    """Trainer ranks that apply their check to a given gap of each version, and train nothing."""

    def __init__(self, gaps: dict[int, float]) -> None:
        self.gaps = gaps
        self.made: list[int] = []

    async def at(self, version: int, ahead: int = 0) -> Ranks:
        return self

    async def train(
        self, version: int, url: str, max_logprob_gap: float | None, recorded: None, sha256: str, chunks: None
    ) -> dict[str, Any]:
        assert sha256 == BATCH["sha256"]
        gap = self.gaps[version]
        metrics = {"loss": 0.0, "logprob_gap_mean": gap, "logprob_gap_max": gap}
        check_metrics(metrics, version, max_logprob_gap)
        self.made.append(version)
        return {"version": version}


def runtime_with(root: Path, ranks: Ranks, **algorithm: Any) -> Runtime:
    config = RunConfig.model_validate(
        {
            "run": {"name": "a", "iterations": 2},
            "model": {"path": "model"},
            "data": {"sources": [{"path": "train.jsonl"}]},
            "storage": {"root": str(root)},
            "rollout": {"prompts": 2, "samples_per_prompt": 4},
            "trainer": {"global_batch": 4},
            "algorithm": algorithm,
            "sync": {"max_logprob_gap": LIMIT},
        }
    )
    runtime = Runtime(config)
    runtime.memory._trainer = ranks  # type: ignore[assignment]
    return runtime


def context(runtime: Runtime, index: int) -> IterationContext:
    """An iteration whose batch is recorded."""
    ctx = IterationContext(runtime.config, index, runtime)
    ctx.records["filter"] = cast(FilterRecord, {"files": [BATCH]})
    ctx.records["sample_supervised"] = cast(SampleSupervisedRecord, {"files": [BATCH]})
    return ctx


async def test_a_gap_in_a_later_iteration_of_a_process_is_refused(tmp_path: Path) -> None:
    ranks = Ranks({1: CLOSE, 2: FAR, 3: FAR})
    runtime = runtime_with(tmp_path, ranks)
    await train_step.fn(context(runtime, 0))
    with pytest.raises(RefusedStepError, match=r"step 3: .*sync.max_logprob_gap is 0.02"):
        await train_step.fn(context(runtime, 1))
    assert ranks.made == [1, 2]


async def test_reference_answers_have_no_gap_to_an_engine(tmp_path: Path) -> None:
    ranks = Ranks({1: FAR, 2: FAR})
    runtime = runtime_with(tmp_path, ranks, loss="sft")
    await train_step.fn(context(runtime, 0))
    assert ranks.made == [1, 2]
