"""Scoring stored rows with a reward; runs in a worker process that may be killed.

Owns the step from a row to the reward's input, and from its answer to reward and parts; knows nothing of processes
or budgets.
"""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from millrace.core.errors import described
from millrace.core.hooks.protocols import RewardInput, RewardResult
from millrace.core.hooks.reward_forms import answer_of, awaited_answer_of, reward_of
from millrace.core.plain_text import whole
from millrace.core.rewards.code.answer import long_integers

Row = Mapping[str, Any]


class Scored(TypedDict):
    """The reward of a row, its parts, and the answer that it found."""

    reward: float
    parts: dict[str, float | str]
    answer: str | None


Ended = tuple[
    Literal["done", "failed", "timed_out"], Scored | list[Scored] | str
]  # with its score, or the reason why it has none


def sample_input(row: Row) -> RewardInput:
    """The reward's input from a stored row, whose prompt, label and metadata are JSON text."""
    with long_integers():
        return RewardInput(
            prompt=json.loads(row["prompt"]),
            response=row["response"],
            label=None if row["label"] is None else json.loads(row["label"]),
            metadata=json.loads(row["metadata"]) if row["metadata"] else {},
            response_length=row["response_length"],
            status=row["status"],
            messages=json.loads(row["dialogue"]) if row.get("dialogue") else (),
        )


def score_sample(path: str, options: Mapping[str, Any], row: Row, field: str = "reward") -> Scored:
    """Score one row by the reward at `path`, which `field` of the configuration names.

    Errors: of `reward_of`, of `read_score`, and of the reward.
    """
    return _scored(answer_of(reward_of(path, options, field), sample_input(row)), path)


def score_group(
    path: str, options: Mapping[str, Any], rows: Sequence[Row], field: str = "reward"
) -> list[Scored]:
    """Score the rows of a group in one call. One answer that is no score fails all rows.

    Errors: as of `score_sample`; TypeError and ValueError if it does not return a score for each row.
    """
    answer = answer_of(reward_of(path, options, field), [sample_input(row) for row in rows])
    return _scored_group(answer, len(rows), path)


def score_side_by_side(
    path: str, options: Mapping[str, Any], items: Sequence[Row | Sequence[Row]], field: str, timeout_s: float
) -> list[Ended]:
    """Score rows or groups at once in one event loop, each with its own deadline; returns how each ended, in order.

    A call that does not await blocks the others. A call that failed or was late has the reason.
    """

    async def result(item: Row | Sequence[Row]) -> Scored | list[Scored]:
        function = reward_of(path, options, field)
        if isinstance(item, Mapping):
            return _scored(await awaited_answer_of(function, sample_input(item)), path)
        answer = await awaited_answer_of(function, [sample_input(row) for row in item])
        return _scored_group(answer, len(item), path)

    async def ended(item: Row | Sequence[Row]) -> Ended:
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                return "done", await result(item)
        except TimeoutError as error:
            # the timeout is the reward's own
            if not deadline.expired():
                return "failed", described(error)
            return "timed_out", f"no answer within {timeout_s:g} s"
        except asyncio.CancelledError as error:
            return "failed", described(error)
        except Exception as error:  # noqa: BLE001 - a function of the user's may raise anything
            return "failed", described(error)

    async def all_ended() -> list[Ended]:
        return await asyncio.gather(*map(ended, items))

    return asyncio.run(all_ended())


def hint_of(path: str, options: Mapping[str, Any], row: Row, field: str) -> str | None:
    """The text that the hint at `path` returns for a row; None for no text, and for blank text.

    Errors: TypeError if it returns something else; errors of `reward_of` and of the hint.
    """
    answer = answer_of(reward_of(path, options, field), sample_input(row))
    if answer is not None and not isinstance(answer, str):
        raise TypeError(f"{path} returned a {type(answer).__name__}; return text, or None for no hint")
    return answer if answer and answer.strip() else None


def scored(result: RewardResult) -> Scored:
    """A result in the form that crosses processes."""
    return {"reward": result.reward, "parts": dict(result.parts), "answer": result.answer}


def read_score(answer: Any, path: str) -> RewardResult:
    """Read the answer of a reward function: a number, a RewardResult, or a mapping. Numbers become floats.

    In a mapping the key `reward` is the reward, a text at `answer` the answer, and every other key a part.
    Errors: TypeError for anything else, ValueError for a number that is not finite.
    """
    if isinstance(answer, Mapping):
        if "reward" not in answer:
            raise TypeError(
                f"{path} returned a mapping without the key reward, only {sorted(map(str, answer))}; "
                "name the reward `reward`, the other keys are its parts"
            )
        text = answer["answer"] if isinstance(answer.get("answer"), str) else None
        taken = ("reward", "answer") if text is not None or answer.get("answer") is None else ("reward",)
        parts = {str(key): value for key, value in answer.items() if key not in taken}
        answer = RewardResult(answer["reward"], parts, text)
    elif not isinstance(answer, RewardResult):
        answer = RewardResult(answer)
    if not isinstance(answer.answer, str | None):
        raise TypeError(
            f"{path} returned an answer of type {type(answer.answer).__name__}; return text, or None for no answer"
        )
    found = None if answer.answer is None else whole(answer.answer)
    parts = {
        whole(name): whole(value) if isinstance(value, str) else _finite(value, f"part {name}", path)
        for name, value in answer.parts.items()
    }
    return RewardResult(_finite(answer.reward, "reward", path), parts, found)


def read_group(answer: Any, count: int, path: str) -> list[RewardResult]:
    """Read the answer of a reward for a group: a list with a score for each of its `count` samples.

    Errors: TypeError if it is no list, ValueError if it has another length; errors of `read_score`.
    """
    if isinstance(answer, str | bytes | Mapping | RewardResult) or not hasattr(answer, "__len__"):
        raise TypeError(
            f"{path} returned a {type(answer).__name__} for a group; return a list with a score for each sample"
        )
    if len(answer) != count:
        raise ValueError(
            f"{path} returned {len(answer)} scores for {count} samples; return one for each sample"
        )
    return [read_score(each, path) for each in answer]


def _scored(answer: Any, path: str) -> Scored:
    return scored(read_score(answer, path))


def _scored_group(answer: Any, count: int, path: str) -> list[Scored]:
    return [scored(each) for each in read_group(answer, count, path)]


def _finite(value: Any, name: str, path: str) -> float:
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(
            f"{path} returned {name} of type {type(value).__name__}; "
            "return a number, a RewardResult, or a mapping with the key reward"
        )
    try:
        number = float(value)
    except (
        TypeError,
        ValueError,
        RuntimeError,
        OverflowError,
        # several values, such as an array or tensor
    ) as error:
        raise TypeError(
            f"{path} returned {name} of type {type(value).__name__}, which is no one number: {error}"
        ) from error
    if not math.isfinite(number):
        raise ValueError(f"{path} returned {name} = {number}; a reward is a finite number")
    return number
