"""A reward tried once on a row, before a run depends on it; runs in a worker process that may be killed."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from millrace.core.errors import described
from millrace.core.hooks.loading import load
from millrace.core.hooks.reward_forms import answer_of, reward_of
from millrace.core.rewards import scoring

WANTED = "return a number, a RewardResult, or a mapping with the key reward"
WANTED_OF_GROUP = "return a list with a score for each sample, or leave out reward.group"


class Trial(TypedDict):
    """A reward's result: a number, its parts and its answer; or the reason for none, and the remedy."""

    reward: float | None
    parts: dict[str, float | str]
    answer: str | None
    problem: str
    remedy: str


def try_reward(
    path: str,
    options: Mapping[str, Any],
    row: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    field: str = "reward",
) -> Trial:
    """Score a stored row, or a group of rows, of which the first counts. Errors of the reward are described, not raised.

    Errors: ConfigError when it cannot be loaded.
    """
    load(path, f"{field}.function")
    alone = isinstance(row, Mapping)
    try:
        function = reward_of(path, options, field)
        samples = scoring.sample_input(row) if isinstance(row, Mapping) else [*map(scoring.sample_input, row)]
        answer = answer_of(function, samples)
    except Exception as error:  # noqa: BLE001 - a function of the user's may raise anything
        return _failed(f"it raised {described(error)}", "correct the function")
    try:
        score = scoring.read_score(answer, path) if alone else scoring.read_group(answer, len(row), path)[0]
    except (TypeError, ValueError) as error:
        wanted = WANTED if alone else WANTED_OF_GROUP
        return _failed(str(error).partition(";")[0].removeprefix(f"{path} "), wanted)
    return Trial(**scoring.scored(score), problem="", remedy="")


def _failed(problem: str, remedy: str) -> Trial:
    return Trial(reward=None, parts={}, answer=None, problem=problem, remedy=remedy)
