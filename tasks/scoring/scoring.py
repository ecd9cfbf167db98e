"""Scores samples in worker processes, for reward and evaluate.

A sample whose generation or scoring failed has no reward but a reason: that is not a zero.
"""

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from millrace.connectors.user_code.pool import Outcome
from millrace.core.contracts.sample import Figures, Scorable, Scoring, Texts, Unscored, split_parts
from millrace.core.hooks.reward_selection import Selected, UnknownRewardError
from millrace.core.rewards.scoring import Scored
from millrace.core.waits import beat
from millrace.tasks.runtime.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Score:
    """Result of scoring a sample. `reward` is None unless it was scored; `reason` says why it was not."""

    scoring: Scoring
    reward: float | None = None
    parts: Figures = field(default_factory=list)
    reason: str | None = None
    seconds: float = 0.0
    texts: Texts | None = None
    answer: str | None = None


def scored_by_group(runtime: Runtime, sample: Scorable, own: Selected | None) -> bool:
    """Whether one call scores the sample together with the others of its prompt. own: its source's or set's reward."""
    try:
        return runtime.scoring.selected(sample, own).function.group
    except UnknownRewardError:
        return False


def scored_as_one(runtime: Runtime, rows: Iterable[Unscored], groups: Collection[str]) -> set[str]:
    """The groups among these whose samples are scored together in one call. rows: of samples."""
    return {
        row["group_id"]
        for row in rows
        if row["group_id"] in groups
        and scored_by_group(runtime, row, runtime.scoring.of_sources.get(row["source"]))
    }


async def score(runtime: Runtime, sample: Scorable, own: Selected | None) -> Score:
    """Score a sample, unless there is nothing to score. own: its source's or set's reward."""
    settled = _settled(sample)
    if settled:
        return settled
    try:
        selected = runtime.scoring.selected(sample, own)
    except UnknownRewardError as error:
        return Score("failed", reason=str(error))
    started = time.perf_counter()
    outcome = await runtime.scoring.score(selected, sample)
    beat()
    seconds = time.perf_counter() - started
    if outcome.kind != "done":
        return _failed(outcome, seconds)
    return _scored(outcome.value, seconds)


async def score_group(runtime: Runtime, samples: Sequence[Scorable], own: Selected | None) -> list[Score]:
    """Score the samples of a prompt in one call, except samples with nothing to score.

    The seconds of a call are divided among its samples.
    """
    settled = [_settled(sample) for sample in samples]
    open_ = [sample for sample, done in zip(samples, settled, strict=True) if done is None]
    if not open_:
        return [done for done in settled if done]
    started = time.perf_counter()
    outcome = await runtime.scoring.score(runtime.scoring.selected(open_[0], own), list(open_))
    beat()
    seconds = (time.perf_counter() - started) / len(open_)
    if outcome.kind == "done":
        made = iter([_scored(value, seconds) for value in outcome.value])
    else:
        made = iter([_failed(outcome, seconds)] * len(open_))
    return [done or next(made) for done in settled]


def _settled(sample: Scorable) -> Score | None:
    """The score of a sample for which no reward is called."""
    if sample["status"] in ("failed", "aborted"):
        return Score("skipped")
    given = sample["session_reward"]
    if given is not None:  # the rollout scored itself
        return Score(
            "scored",
            given,
            list(sample["session_parts"] or ()),
            texts=sample["session_texts"],
            answer=sample["session_answer"],
        )
    return None


def _scored(value: Scored, seconds: float) -> Score:
    parts, texts = split_parts(value["parts"])
    return Score("scored", value["reward"], parts, None, seconds, texts or None, value["answer"])


def _failed(outcome: Outcome, seconds: float) -> Score:
    scoring: Scoring = "timed_out" if outcome.kind == "timed_out" else "failed"
    return Score(scoring, reason=outcome.reason, seconds=seconds)
