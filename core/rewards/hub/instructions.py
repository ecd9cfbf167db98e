"""Rows of IFEval's form: instructions that a program can verify, each with its arguments. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from millrace.core.errors import ConfigError, DataError
from millrace.core.hooks.protocols import RewardInput, RewardResult

NEEDED = ("instruction_id_list", "kwargs")
SCORES = ("strict", "loose", "share")
LONGEST = 30_000  # longest checked response in characters: some checks take quadratic time


class Instructions(NamedTuple):
    """A row's instructions: their names, the arguments of each, and the prompt that states them."""

    names: list[str]
    kwargs: list[dict[str, Any]]
    prompt: Any


def instructions_of(sample: RewardInput, known: Collection[str], benchmark: str) -> Instructions:
    """The instructions of a row. Errors: DataError for a row without any, or with one missing from `known`."""
    names, kwargs = (sample.metadata.get(key) for key in NEEDED)
    if not isinstance(names, list) or not names or not isinstance(kwargs, list) or len(kwargs) != len(names):
        raise DataError(
            "instruction_id_list and kwargs are no lists of one length, with an instruction or more",
            where="metadata of the row",
            remedy="name both columns in data.sources[].extra_keys, or correct the row",
        )
    unknown = [name for name in names if name not in known]
    if unknown:
        raise DataError(
            f"{unknown[0]!r} is no instruction of {benchmark}",
            where="metadata.instruction_id_list of the row",
            remedy="correct the row, or leave it out",
        )
    asked = sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1].get("content")
    return Instructions(names, [each or {} for each in kwargs], asked)


def answer_of(sample: RewardInput) -> str | None:
    """The response after its reasoning; None if it is too long to check, which counts as following no instruction."""
    answer = sample.response.rpartition("</think>")[2]
    return answer if len(answer) <= LONGEST else None


def follows_nothing(score: str) -> RewardResult:
    """The verdict on a response that is too long to be checked."""
    parts = dict.fromkeys(SCORES, 0.0)
    return RewardResult(parts[score], dict(parts))


def check_score(score: str, where: str) -> None:
    """Raises ConfigError for an unknown score."""
    if score not in SCORES:
        raise ConfigError(
            f"score = {score} is not a choice", where=where, remedy="give strict, loose or share"
        )


def nltk_data_missing(error: LookupError | str, resources: str, where: str) -> ConfigError:
    """The error that says how to get nltk's missing data."""
    return ConfigError(
        f"data of nltk are missing: {' '.join(str(error).split())[:120]}",
        where=where,
        remedy=f"python -m nltk.downloader {resources}",
    )
