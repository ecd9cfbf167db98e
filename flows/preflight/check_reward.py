"""Call each reward twice on a real row, with the label as response and with none, and show its scores.

A user's reward is called in a worker process under a deadline, so that a reward that hangs or ends its process does not end
the command. millrace's rewards are called in this process.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from millrace.connectors.user_code.pool import Outcome, WorkerPool
from millrace.core.config import RunConfig
from millrace.core.config.parts.problems import Problem
from millrace.core.contracts.references import scrubbed
from millrace.core.contracts.rows.prompts import PromptRow
from millrace.core.contracts.sample import Scorable
from millrace.core.hooks.reward_selection import (
    MIXTURE,
    TOURNAMENT,
    Selected,
    UnknownRewardError,
    own_rewards,
    select,
)
from millrace.core.plain_text import json_text
from millrace.core.rewards.trial import Trial, try_reward
from millrace.flows.preflight.check_data import unknown_names
from millrace.flows.preflight.first_rows import CheckedRows

PATIENCE_S = 5.0  # for one answer; reward.timeout_s if that is shorter
OURS = "millrace.core."
CALL_OTHERS = (MIXTURE, TOURNAMENT)  # rewards that call functions of the user


@dataclass
class RewardAnswers:
    """Answers of a reward on one row, by the name of the response: the trial, or why it did not end."""

    function: str = ""
    selected: str = ""  # the field that names it
    row: PromptRow | None = None
    given: dict[str, Trial | str] = field(default_factory=dict)


def check_rewards(
    config: RunConfig, data: Sequence[CheckedRows], wrong: Sequence[str], answers: list[RewardAnswers]
) -> Iterator[Problem]:
    """Problems of rows with an unknown reward, and of calling each reward on the first row that it scores; fills `answers`.

    wrong: fields that have a problem. A reward whose field is among them is not called.
    """
    called: set[str] = set()
    for rows in data:
        own = _own(config, rows)
        unknown: list[tuple[PromptRow, str]] = []
        for row in rows.usable:
            try:
                selected = select(config.reward, own, row.metadata)
            except UnknownRewardError as error:
                unknown.append((row, str(error)))
                continue
            if selected.field not in called:
                called.add(selected.field)
                if not any(
                    name.startswith((f"{selected.field}.function", f"{selected.field}.options"))
                    for name in wrong
                ):
                    answers.append(RewardAnswers(selected.function.function, selected.field))
                    yield from _called(config, selected, row, answers[-1])
        yield from unknown_names(
            rows, unknown, "reward", "correct the rows, or add the reward to reward.named"
        )


def check_majority(
    config: RunConfig, data: Sequence[CheckedRows], answers: Sequence[RewardAnswers]
) -> Iterator[Problem]:
    """A problem if the best checkpoint is chosen by the majority of a set whose reward returned no answer for any response.

    answers: as `check_rewards` filled them. A session may bring an answer that only a run sees.
    """
    name = config.checkpoint.keep_best or ""
    held_out = [rows for rows in data if name == f"eval/{rows.source.name}/majority"]
    if config.rollout.session or not held_out:
        return
    (rows,) = held_out
    try:
        fields = {select(config.reward, _own(config, rows), row.metadata).field for row in rows.usable}
    except UnknownRewardError:
        # `check_rewards` reports it
        return
    asked = [tried for tried in answers if tried.selected in fields]
    trials = [trial for tried in asked for trial in tried.given.values()]
    if {tried.selected for tried in asked} != fields or not trials:
        return
    if all(
        not isinstance(trial, str) and not trial["problem"] and trial["answer"] is None for trial in trials
    ):
        yield Problem(
            "checkpoint.keep_best",
            name,
            f"{asked[0].function} gives a score alone, and a majority is of answers",
            f"return RewardResult(..., answer=...) from it, or keep the best by eval/{rows.source.name}/reward_mean",
        )


def _own(config: RunConfig, rows: CheckedRows) -> Selected | None:
    """The reward that a source or a held-out set sets."""
    sources, sets = own_rewards(config)
    return (sources if rows.field.startswith("data.") else sets).get(rows.source.name)


def _called(
    config: RunConfig, selected: Selected, row: PromptRow, answers: RewardAnswers
) -> Iterator[Problem]:
    """Problems of calling a reward on this row."""
    answers.row = row
    ours = selected.function.function.startswith(OURS) and selected.function.function not in CALL_OTHERS
    pool = None if ours else WorkerPool(1)
    try:
        for name, response in _responses(row).items():
            problem = _tried(config, selected, row, name, response, pool, answers)
            if problem:
                yield problem
            if problem or isinstance(answers.given.get(name), str):
                # the next call would fail again, or take as long
                break
    finally:
        if pool:
            pool.close()


def _tried(
    config: RunConfig,
    selected: Selected,
    row: PromptRow,
    name: str,
    response: str,
    pool: WorkerPool | None,
    answers: RewardAnswers,
) -> Problem | None:
    reward, timeout_s = selected.function, config.reward.timeout_s
    sample = _sample(row, response)
    scored = [sample, sample] if reward.group else sample
    where = f"row {row.row} of {row.source} with {name} as response"
    if pool is None:
        outcome = Outcome("done", try_reward(reward.function, reward.options, scored, selected.field))
    else:
        patience = min(PATIENCE_S, timeout_s)
        call = pool.call(
            try_reward, reward.function, reward.options, scored, selected.field, timeout_s=patience, again=1
        )
        outcome = asyncio.run(call)
        if outcome.kind == "timed_out" and timeout_s > patience:
            answers.given[name] = f"no answer within {patience:g} s; a run waits {timeout_s:g} s"
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
    return Problem(f"{selected.field}.function", reward.function, f"{reason}, for {where}", remedy)


def _responses(row: PromptRow) -> dict[str, str]:
    """The responses to try, by name."""
    label = {} if row.label is None else {"the label": _text(row.label)}
    return {**label, "an empty text": ""}


def _text(label: object) -> str:
    return label if isinstance(label, str) else json_text(label)


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
        session_texts=None,
        session_answer=None,
    )
