"""An iteration from its parts to its step, with trainer ranks: the same bits whichever groups finish first and whatever dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.core.config import RunConfig
from millrace.core.contracts.task_records import StepRequest
from millrace.tasks.train_step import train_step
from tests.support.asked_here import RanksHere
from tests.support.eager_iteration import EACH, NEED, Iteration
from tests.support.trainer_ranks import Group, Workers, configuration

VARIES = ("seconds", "tokens_per_second", "scored_tokens", "settings", "packs", "chunks")
LR = 1e-3  # of `configuration`
DRAWING_ORDER = [0, 1, 2, 3, 4, 5, 6]


class Ranks(RanksHere):
    """A Trainer whose ranks are processes of the test's."""

    def __init__(self, group: Group, lost_after: int | None = None) -> None:
        """lost_after: after so many passes the ranks are as new ones, once."""
        self.group = group
        self.lost_after = lost_after
        self.passes: list[int] = []  # chunks held after each

    async def at(self, version: int, ahead: int = 0) -> Ranks:
        if len(self.passes) == self.lost_after:
            self.lost_after = None
            await asyncio.to_thread(self.group.run, drop)
        return self

    async def pass_chunk(self, *arguments: Any) -> int:
        held: list[int] = await asyncio.to_thread(self.group.call, "pass_chunk", *arguments)
        self.passes.append(held[0])
        return held[0]

    async def train(self, step: StepRequest) -> Any:
        return (await asyncio.to_thread(self.group.call, "train", step))[0]


def drop(rank: Any) -> None:
    rank.chunks.drop()


def weights(rank: Any) -> dict[str, list[float]]:
    return {name: p.detach().flatten().tolist() for name, p in rank.policy.named_parameters()}


def made(
    workers: Workers,
    folder: Path,
    model: Path,
    world: int,
    *,
    order: list[int] = DRAWING_ORDER,
    waits: int = 0,
    lost_after: int | None = None,
    eager: bool = True,
) -> tuple[dict[str, Any], list[Any], list[int]]:
    """The step's figures, every rank's weights and the passes. waits: chunks that must be held before the last group lands."""
    config = configuration(model, world)
    config["storage"]["root"] = str(folder)
    config["rollout"] |= {"prompts": NEED, "samples_per_prompt": EACH}
    config["filter"]["drop_zero_variance"] = True
    config["reward"]["function"] = "millrace.core.rewards.text:contains"
    config["sync"]["max_logprob_gap"] = 100.0  # of tokens that no model made
    config["pipeline"] |= {"eager": eager, "eager_groups": 2 if eager else None}
    with workers.group(config) as group:
        ranks = Ranks(group, lost_after)
        it = Iteration(RunConfig.model_validate(config), ranks, index=0)

        async def iteration() -> Any:
            try:
                it.ctx.records["filter"] = await it.run(
                    order, lambda landed: landed < 6 or (ranks.passes or [0])[-1] >= waits
                )
                return await train_step.fn(it.ctx)
            finally:
                it.ctx.runtime.scoring.close()

        (step,) = asyncio.run(iteration())["steps"]
        figures = {name: value for name, value in step.items() if name not in VARIES}
        return figures, group.run(weights), ranks.passes


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_an_iteration_in_chunks_is_one_step_whatever_finishes_first_and_whatever_is_lost(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, world: int
) -> None:
    whole = made(workers, tmp_path / "early", model(), world, waits=2)
    assert whole[2] == [1, 2]
    last_first = made(workers, tmp_path / "late", model(), world, order=DRAWING_ORDER[::-1])
    assert last_first[:2] == whole[:2]
    lost = made(workers, tmp_path / "lost", model(), world, waits=2, lost_after=1)
    assert lost[2] == [1, 0, 1, 2]
    assert lost[:2] == whole[:2]
    plain = made(workers, tmp_path / "plain", model(), world, eager=False)
    assert plain[2] == []
    assert whole[0] == pytest.approx(plain[0], rel=1e-6, abs=1e-6)
    for one, other in zip(whole[1], plain[1], strict=True):
        assert one.keys() == other.keys()
        for name in one:  # answers of equal tokens: some gradients are near AdamW's epsilon, and it magnifies their last bits
            assert one[name] == pytest.approx(other[name], rel=1e-6, abs=LR / 100), name
