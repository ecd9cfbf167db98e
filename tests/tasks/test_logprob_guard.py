"""Which steps the difference of engine and trainer log-probabilities can refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.megatron.rank import TrainerRank
from millrace.core.config import RunConfig
from millrace.core.errors import RefusedStepError
from millrace.tasks.context import IterationContext
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.train_step import train_step

LIMIT, CLOSE, FAR = 0.02, 0.001, 0.5


class Trainer:
    """Stands where the ranks do: applies their check to a gap of each version."""

    def __init__(self, gaps: dict[int, float]) -> None:
        self.gaps = gaps
        self.made: list[int] = []

    async def call(self, method: str, version: int, url: str, guard: float | None) -> list[dict[str, Any]]:
        assert method == "train"
        gap = self.gaps[version]
        TrainerRank({}, 0, 1)._check(
            {"loss": 0.0, "logprob_gap_mean": gap, "logprob_gap_max": gap}, version, guard
        )
        self.made.append(version)
        return [{"version": version}]


class TrainerOnly(Runtime):
    """A run's live parts of which only the trainer lives."""

    def __init__(self, config: RunConfig, trainer: Trainer) -> None:
        super().__init__(config)
        self.only = trainer

    async def trainer(self, version: int, ahead: int = 0) -> Any:
        return self.only


def live(root: Path, trainer: Trainer, **algorithm: Any) -> Runtime:
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
    return TrainerOnly(config, trainer)


async def test_a_gap_in_a_later_iteration_of_a_process_is_refused(tmp_path: Path) -> None:
    trainer = Trainer({1: CLOSE, 2: FAR, 3: FAR})
    held = live(tmp_path, trainer)
    await train_step.fn(IterationContext(held.config, 0, held))
    with pytest.raises(RefusedStepError, match=r"step 3: .*sync.max_logprob_gap is 0.02"):
        await train_step.fn(IterationContext(held.config, 1, held))
    assert trainer.made == [1, 2]


async def test_reference_answers_were_sampled_by_nobody(tmp_path: Path) -> None:
    trainer = Trainer({1: FAR, 2: FAR})
    held = live(tmp_path, trainer, loss="sft")
    await train_step.fn(IterationContext(held.config, 0, held))
    assert trainer.made == [1, 2]
