"""Many samples, or groups, at once in one scoring process, for rewards that mostly wait.

Owns which samples go together, and that no sample fails because of another: if a batch's process dies or the batch is late,
each of its samples is scored again by itself.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial

from millrace.connectors.user_code.pool import Outcome, WorkerPool
from millrace.core.contracts.ids import rollout_of
from millrace.core.contracts.sample import Scorable, Unscored
from millrace.core.hooks.reward_selection import Selected
from millrace.core.rewards.scoring import score_side_by_side

GRACE_S = 5.0  # time that a batch has beyond the deadline of its samples

Item = Scorable | list[Scorable]
"""A sample, or the samples of a group, which one call scores."""
Alone = Callable[[Selected, Item], Awaitable[Outcome]]
_Waiting = tuple[Item, asyncio.Future[Outcome]]


class ScoringBatches:
    """Batches samples or groups that are scored at the same time by the same reward."""

    def __init__(self, pool: WorkerPool, workers: int, most: int, timeout_s: float, alone: Alone) -> None:
        """most: samples, or groups, of a batch. alone: scores one item in a process that does nothing else."""
        self._pool, self._workers, self._most = pool, workers, most
        self._timeout_s, self._alone = timeout_s, alone
        self._waiting: dict[str, tuple[Selected, list[_Waiting]]] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def score(self, selected: Selected, item: Item) -> Outcome:
        """The outcome of a sample or a group."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._start)
        self._waiting.setdefault(selected.field, (selected, []))[1].append((item, future))
        return await future

    def _start(self) -> None:
        """Start batches of waiting items, spread over the processes."""
        waiting, self._waiting = self._waiting, {}
        for selected, items in waiting.values():
            size = min(self._most, math.ceil(len(items) / self._workers))
            for first in range(0, len(items), size):
                batch = items[first : first + size]
                task = asyncio.get_running_loop().create_task(self._score(selected, batch))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
                for _, future in batch:
                    future.add_done_callback(partial(_end, batch, task))

    async def _score(self, selected: Selected, batch: Sequence[_Waiting]) -> None:
        function = selected.function
        try:
            outcome = await self._pool.call(
                score_side_by_side,
                function.function,
                function.options,
                [item for item, _ in batch],
                selected.field,
                self._timeout_s,
                timeout_s=self._timeout_s + GRACE_S,
            )
            if outcome.kind == "done":
                for (_, future), (kind, value) in zip(batch, outcome.value, strict=True):
                    done = kind == "done"
                    _give(future, Outcome(kind, value if done else None, None if done else str(value)))
            else:
                await asyncio.gather(*(self._again(selected, waiting) for waiting in batch))
        except Exception as error:  # noqa: BLE001 - the pool's; each sample that waits raises it
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)

    async def _again(self, selected: Selected, waiting: _Waiting) -> None:
        item, future = waiting
        _give(future, await self._alone(selected, item))


def _give(future: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not future.done():
        future.set_result(outcome)


def _end(batch: Sequence[_Waiting], task: asyncio.Task[None], _: asyncio.Future[Outcome]) -> None:
    """End a batch that nobody waits for."""
    if all(future.cancelled() for _, future in batch):
        task.cancel()


class ScoringUnits:
    """Collects rows. A rollout's branches arrive together."""

    def __init__(self, rollouts: int, by_group: Callable[[Unscored], bool]) -> None:
        """rollouts: of a prompt. by_group: whether a row is scored together with the others of its prompt."""
        self._rollouts = rollouts
        self._by_group = by_group
        self._waiting: dict[str, list[Unscored]] = {}

    def add(self, rows: Sequence[Unscored], done: Collection[str]) -> list[list[Unscored]]:
        """Units that can be scored after these rows, in order. done: samples that have a score."""
        ready: list[list[Unscored]] = []
        for row in rows:
            if not self._by_group(row):
                ready.append([row])
                continue
            group = self._waiting.setdefault(row["group_id"], [])
            group.append(row)
            branches = row["samples"] or 1
            rollout = rollout_of(row["sample_id"])
            whole = sum(rollout_of(other["sample_id"]) == rollout for other in group) == branches
            if whole and len({rollout_of(other["sample_id"]) for other in group}) == self._rollouts:
                ready.append(sorted(self._waiting.pop(row["group_id"]), key=lambda row: row["sample_id"]))
        units = ([row for row in unit if row["sample_id"] not in done] for unit in ready)
        return [unit for unit in units if unit]
