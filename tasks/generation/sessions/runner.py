"""Runs rollouts of several turns in worker processes, with retries, and makes samples of the results.

A rollout whose process was ended by another rollout is run again from its record, which has its turns and answers. A rollout
that ended its process fails with the reason; if one of its tool calls did, the rollout continues with the reason as the answer.
A rollout that may be the cause, since a signal ended its process, is first run once more by itself.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.connectors.huggingface.dialogue import Dialogues
from millrace.connectors.user_code.session_pool import SessionLostError, SessionPool
from millrace.core.config.rollout import Sampling, SessionSection
from millrace.core.contracts.ids import branch_id
from millrace.core.contracts.sample import Figures, Status, Texts, split_parts
from millrace.core.contracts.turns import TurnRow
from millrace.core.hooks.loading import written_for_slime
from millrace.core.hooks.rollout_selection import rollout_functions
from millrace.core.plain_text import json_text
from millrace.core.sessions.interface import Task
from millrace.core.sessions.pipe import End, SlimeStart, Start
from millrace.core.sessions.tree import Branch, BranchReward, inherited
from millrace.core.sharding import WHOLE, Share
from millrace.tasks.generation.sessions.rollout_record import RolloutEvents
from millrace.tasks.generation.sessions.session_rollout import Opening, SessionRollout
from millrace.tasks.generation.single_samples import SampleGenerator

TOGETHER = 2  # processes that a rollout may lose before it gets a separate one
TRIES = 5  # tries in all

Write = Callable[[TurnRow], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class MadeSample:
    """One branch of a finished rollout, with the values of its row. For a failed rollout: the prompt, and the reason."""

    sample_id: str
    samples: int  # samples of the rollout
    role: str | None = None
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    trained_mask: list[int] | None = None  # None: loss_mask
    logprobs: list[float]
    policy_versions: list[Any]
    engine_id: str
    turns: int
    status: Status
    reason: str | None
    response: str  # text of the last turn
    dialogue: str | None
    reward: float | None = None
    parts: Figures | None = None
    texts: Texts | None = None
    answer: str | None = None
    routed: bytes | None = None  # stored experts of its first tokens


class SessionRunner:
    """Runs the sessions of one task."""

    def __init__(
        self,
        settings: SessionSection,
        sampling: Sampling,
        pool: SessionPool,
        dialogues: Dialogues,
        generator: SampleGenerator,
        arguments: Mapping[str, Any],
        share: Share = WHOLE,
    ) -> None:
        """arguments: args of functions written for slime. share: this process's share of concurrent rollouts and calls."""
        self._settings, self._sampling, self._arguments = settings, sampling, arguments
        self._pool, self._dialogues, self._generator = pool, dialogues, generator
        self._rollouts = asyncio.Semaphore(share.part_of(settings.max_rollouts))
        self._calls = asyncio.Semaphore(share.part_of(settings.max_calls))

    async def run(
        self, opening: Opening, task: Task, rows: Sequence[TurnRow], write: Write
    ) -> tuple[list[MadeSample], float, float]:
        """The samples of one rollout, its start (Unix time) and its seconds of generation.

        rows: of an earlier attempt. write: keeps a row. Errors: BudgetError if too many rollouts failed.
        """
        async with self._rollouts:
            started = time.time()
            kept = list(rows)

            async def keep(row: TurnRow) -> None:
                kept.append(row)
                await write(row)

            opening = opening.of_row(task.metadata, self._sampling.max_new_tokens)
            rollout = SessionRollout(
                opening,
                self._settings,
                self._sampling,
                self._dialogues,
                self._generator,
                self._calls,
                RolloutEvents(rows),
                keep,
            )
            slime = any(f and written_for_slime(f.function) for _, f in rollout_functions(self._settings))
            start = Start(
                task=task,
                messages=list(opening.messages),
                seed=opening.seed,
                sampling={**self._sampling.model_dump(mode="json"), **opening.sampling},
                slime=SlimeStart(self._arguments, list(opening.prompt_ids)) if slime else None,
            )
            await rollout.open()
            suspected = False
            for attempt in range(TRIES):
                try:
                    alone = suspected or attempt >= TOGETHER
                    end = await self._pool.run(start, rollout.handle, alone=alone)
                    break
                except SessionLostError as error:
                    # a run by itself shows whether this rollout is the cause
                    blamed = error.blamed and (error.certain or suspected)
                    suspected = suspected or error.blamed
                    if not await rollout.lost(str(error), blamed):
                        end = End("failed", str(error))
                        break
                    end = End("failed", f"{error}, {TRIES} times")
                    rollout = rollout.restart(RolloutEvents(kept))
            # calls that the function did not wait for
            await rollout.lost("", False)
            samples = made_samples(rollout, end)
            if samples[0].status == "failed" and rollout.failure is None:
                self._generator.fail(samples[0].reason or "failed", opening.rollout_id)
            return samples, started, rollout.seconds


def session_task(
    prompt: str,
    label: str | None,
    metadata: str | None,
    source: str,
    index: int,
    evaluation: bool = False,
) -> Task:
    """The task that a session sees, from its row, whose prompt, label and metadata are JSON text."""
    return Task(
        prompt=json.loads(prompt),
        label=None if label is None else json.loads(label),
        metadata=json.loads(metadata) if metadata else {},
        source=source,
        index=index,
        evaluation=evaluation,
    )


def made_samples(rollout: SessionRollout, end: End) -> list[MadeSample]:
    """The samples of a rollout with this end."""
    first = rollout.tree[0]
    if rollout.failure or end.status == "failed" or not any(b.generated for b in rollout.tree.branches):
        reason = rollout.failure or end.reason or "it generated nothing"
        return [_failed(rollout, first, reason)]
    rewards = inherited(rollout.tree, end.rewards)
    branches = rollout.tree.samples()
    return [_sample(rollout, branch, len(branches), rewards.get(branch.number), end) for branch in branches]


def _sample(
    rollout: SessionRollout,
    branch: Branch,
    samples: int,
    reward: BranchReward | None,
    end: End,
) -> MadeSample:
    said = rollout.said[branch.number]
    parts, texts = split_parts(reward.parts) if reward else (None, None)
    cut = end.status == "truncated" or (bool(said.turns) and said.turns[-1].truncated)
    cut = cut or branch.number in end.cut
    return MadeSample(
        sample_id=branch_id(rollout.opening.rollout_id, branch.number),
        samples=samples,
        role=branch.name,
        prompt_ids=branch.prompt_ids,
        response_ids=branch.response_ids,
        loss_mask=branch.loss_mask,
        trained_mask=_trained_mask(branch, end.left_out.get(branch.number)),
        logprobs=branch.logprobs,
        policy_versions=branch.spans,
        engine_id=rollout.engine_id,
        turns=branch.turns,
        status="truncated" if cut else "completed",
        reason=end.reason,
        response=said.turns[-1].content if said.turns else "",
        dialogue=json_text(said.messages),
        reward=reward.value if reward else None,
        parts=parts,
        texts=texts,
        answer=reward.answer if reward else None,
        routed=branch.routed or None,
    )


def _trained_mask(branch: Branch, left_out: Sequence[int] | None) -> list[int] | None:
    """The loss mask of a branch without the tokens at these positions among all its tokens; None if none is left out."""
    if not left_out:
        return None
    first = len(branch.prompt_ids)
    mask = list(branch.loss_mask)
    for place in left_out:
        mask[place - first] = 0
    return mask


def _failed(rollout: SessionRollout, branch: Branch, reason: str) -> MadeSample:
    return MadeSample(
        sample_id=rollout.opening.rollout_id,
        samples=1,
        prompt_ids=list(rollout.opening.prompt_ids),
        response_ids=[],
        loss_mask=[],
        logprobs=[],
        policy_versions=[],
        engine_id=rollout.engine_id,
        turns=branch.turns,
        status="failed",
        reason=reason,
        response="",
        dialogue=json_text(rollout.said[0].messages),
    )
