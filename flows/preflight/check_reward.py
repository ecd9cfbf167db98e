"""Call the reward twice on a real row, with the label as response and with none, and show what it gives.

A user's function is called in a worker process under a deadline, so that one that hangs or ends its process does not take
the command with it. One that ships with millrace is called here.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

from millrace.connectors.workers.pool import Outcome, WorkerPool
from millrace.core.config import RunConfig
from millrace.core.config.parts.problems import Problem
from millrace.core.contracts.prompts import PromptRow
from millrace.core.contracts.references import scrubbed
from millrace.core.contracts.sample import Scorable
from millrace.core.rewards.trial import Trial, try_reward

PATIENCE_S = 5.0  # for one answer; reward.timeout_s where that is shorter
OURS = "millrace."


@dataclass
class RewardAnswers:
    """What the reward gave on one row: for each response by what it is, the trial, or why it has no end."""

    row: PromptRow | None = None
    given: dict[str, Trial | str] = field(default_factory=dict)


def check_reward(config: RunConfig, row: PromptRow, answers: RewardAnswers) -> list[Problem]:
    """Problems of calling the reward on this row; fills `answers`."""
    answers.row = row
    pool = None if config.reward.function.startswith(OURS) else WorkerPool(1)
    problems: list[Problem] = []
    try:
        for name, response in _responses(row).items():
            problem = _tried(config, row, name, response, pool, answers)
            if problem:
                problems.append(problem)
            if problem or isinstance(answers.given.get(name), str):
                break  # it would fail again, or take as long
    finally:
        if pool:
            pool.close()
    return problems


def _tried(
    config: RunConfig,
    row: PromptRow,
    name: str,
    response: str,
    pool: WorkerPool | None,
    answers: RewardAnswers,
) -> Problem | None:
    reward, sample = config.reward, _sample(row, response)
    where = f"row {row.row} of {row.source} with {name} as response"
    if pool is None:
        outcome = Outcome("done", try_reward(reward.function, reward.options, sample))
    else:
        patience = min(PATIENCE_S, reward.timeout_s)
        call = pool.call(try_reward, reward.function, reward.options, sample, timeout_s=patience, again=1)
        outcome = asyncio.run(call)
        if outcome.kind == "timed_out" and reward.timeout_s > patience:
            answers.given[name] = f"no answer within {patience:g} s; a run waits {reward.timeout_s:g} s"
            return None
    reason, remedy = scrubbed(outcome.reason or "", reward.options), "correct the function"
    if outcome.kind == "timed_out":
        remedy = "make it faster, or raise reward.timeout_s"
    elif outcome.kind == "done":
        trial: Trial = outcome.value
        answers.given[name] = trial
        if not trial["problem"]:
            return None
        reason, remedy = scrubbed(trial["problem"], reward.options), trial["remedy"]
    return Problem("reward.function", reward.function, f"{reason}, for {where}", remedy)


def _responses(row: PromptRow) -> dict[str, str]:
    """The responses to try, by what they are."""
    label = {} if row.label is None else {"the label": _text(row.label)}
    return {**label, "an empty text": ""}


def _text(label: object) -> str:
    return label if isinstance(label, str) else json.dumps(label, ensure_ascii=False)


def _sample(row: PromptRow, response: str) -> Scorable:
    """The row as a stored sample with this response."""
    return Scorable(
        prompt=json.dumps(row.prompt),
        label=None if row.label is None else json.dumps(row.label),
        metadata=json.dumps(row.metadata),
        response=response,
        response_length=len(response.split()),
        status="completed",
        dialogue=None,
        session_reward=None,
        session_parts=None,
    )
