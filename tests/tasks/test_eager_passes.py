"""Chunks are passed in drawing order as their groups are judged, with the rows of the batch that the filter then commits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.storage.run_folder import EAGER
from millrace.connectors.storage.store import Store
from millrace.connectors.trainers.chunks import hash_of
from millrace.connectors.trainers.packing import read_rows
from millrace.core.config import RunConfig
from millrace.core.contracts.task_records import StepRequest
from millrace.tasks.train_step import train_step
from tests.support.asked_here import RanksHere
from tests.support.eager_iteration import EACH, NEED, Iteration
from tests.support.slow_members import slow_but

pytestmark = pytest.mark.usefixtures("one_credit_worker")


class Ranks(RanksHere):
    """Trainer ranks that hold version 1, keep the hash of each chunk's rows and train nothing."""

    def __init__(self, lost_after: int | None = None) -> None:
        """lost_after: after so many passes they are built again, once, and hold none."""
        self.lost_after = lost_after
        self.held: list[str] = []
        self.passes = 0
        self.trained: list[Any] = []

    async def at(self, version: int, ahead: int = 0) -> Ranks:
        assert version == 1
        if self.passes == self.lost_after:
            self.lost_after, self.held = None, []
        return self

    async def pass_chunk(self, version: int, number: int, url: str, sha256: str) -> int:
        assert version == 2
        folder, _, name = url.rpartition("/")
        digest = hash_of(read_rows(Store(folder).read_table(name, "batch", sha256=sha256)), 0)
        if number == len(self.held):
            self.held.append(digest)
            self.passes += 1
        return len(self.held)

    async def train(self, step: StepRequest) -> dict[str, Any]:
        self.trained.append(step)
        return {"version": step.version}


@pytest.fixture
async def begin(make_config: Callable[..., RunConfig]) -> AsyncIterator[Callable[..., Iteration]]:
    begun: list[Iteration] = []

    def iteration(ranks: Ranks | None = None, **pipeline: Any) -> Iteration:
        config = make_config(
            rollout={"prompts": NEED, "samples_per_prompt": EACH},
            filter={"drop_zero_variance": True},
            pipeline={"eager": True, "eager_groups": 2, **pipeline},
        )
        begun.append(Iteration(config, ranks or Ranks()))
        return begun[-1]

    yield iteration
    for each in begun:
        each.ctx.runtime.scoring.close()


async def test_chunks_that_are_whole_are_passed_while_the_last_answer_is_generated(
    begin: Callable[..., Iteration],
) -> None:
    it = begin()
    held = {
        1: 0,
        2: 0,
        3: 1,
        4: 1,
        5: 2,
        6: 2,
    }  # chunks, by how many groups have landed: the second is dropped
    record = await it.run(range(7), lambda landed: landed not in held or len(it.ranks.held) == held[landed])
    assert record["chunks"] == [2 * EACH] * 3
    assert it.ranks.held == it.hashes(record["chunks"])[:2]
    assert it.ctx.times.seconds["eager"] > 0
    assert it.ctx.times.intervals["eager_passes"][1] <= it.ctx.stream.settled_at  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "order",
    slow_but([[6, 5, 4, 3, 2, 1, 0], [0, 2, 3, 1, 6, 4, 5], [4, 0, 6, 2, 5, 1, 3]], [6, 5, 4, 3, 2, 1, 0]),
)
async def test_whichever_groups_finish_first_chunks_are_of_the_draw_and_of_the_batch(
    begin: Callable[..., Iteration], order: list[int]
) -> None:
    it = begin()
    record = await it.run(order)
    committed = it.hashes(record["chunks"])
    assert it.ranks.held == committed[: len(it.ranks.held)]
    assert len(it.ranks.held) < len(committed)


async def test_ranks_that_were_built_again_are_given_every_chunk_again(
    begin: Callable[..., Iteration],
) -> None:
    it = begin(Ranks(lost_after=1))
    record = await it.run(range(7), lambda landed: landed < 6 or len(it.ranks.held) == 2)
    assert it.ranks.passes == 3
    assert it.ranks.held == it.hashes(record["chunks"])[:2]


async def test_the_step_is_told_the_chunks_and_removes_what_was_written_of_them(
    begin: Callable[..., Iteration],
) -> None:
    it = begin()
    it.ctx.records["filter"] = record = await it.run(
        range(7), lambda landed: landed < 6 or len(it.ranks.held) == 2
    )
    assert len(it.ctx.folder.list(EAGER)) == 2
    await train_step.fn(it.ctx)
    assert it.ranks.trained[0].chunks == record["chunks"]
    assert it.ctx.folder.list(EAGER) == []


async def test_without_it_the_record_and_the_folder_have_nothing_of_it(
    begin: Callable[..., Iteration], tmp_path: Path
) -> None:
    it = begin(eager=False, eager_groups=None)
    record = await it.run(range(7))
    assert "chunks" not in record
    assert it.ctx.stream.kept == ()
    assert not list(tmp_path.rglob(f"*{EAGER}*"))
