"""IFEval (Zhou et al., arXiv:2311.07911): whether a response follows instructions that a program can verify.

The checks come from EleutherAI's lm-evaluation-harness, an extra. A row holds `instruction_id_list` and, for each
instruction, `kwargs`, in the form of google/IFEval.
IFBench reads rows of this form too.
"""

from collections.abc import Collection
from typing import Any, Literal, NamedTuple

from millrace.core.contracts.images import text_alone
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
    asked = sample.prompt if isinstance(sample.prompt, str) else text_alone(sample.prompt[-1].get("content"))
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


WHERE = "ifeval"


def ifeval(sample: RewardInput, *, score: Literal["strict", "loose", "share"] = "strict") -> RewardResult:
    """1 if the response follows all instructions of the row, else 0; text before </think> does not count.

    A response of more than LONGEST characters follows none.

    score: `strict`; `loose`, which also tries the response without its first line, its last line, and asterisks; or `share`
    of the instructions, strictly. All three are parts.
    Errors: ConfigError without the extra, for another score, or if nltk's data are missing; DataError of a row that has no
    instructions, or unknown ones; ValueError of arguments that an instruction does not take.
    """
    check_score(score, WHERE)
    try:
        import langdetect
        from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT
        from lm_eval.tasks.ifeval.utils import process_results
    except ImportError as error:
        raise ConfigError(
            f"it needs lm-evaluation-harness: {error}",
            where=WHERE,
            remedy="pip install 'millrace[ifeval]'",
        ) from error
    # langdetect guesses with random numbers: the same text must get the same answer
    langdetect.DetectorFactory.seed = 0
    asked = instructions_of(sample, INSTRUCTION_DICT, "IFEval")
    row = {"key": 0, "prompt": asked.prompt, "instruction_id_list": asked.names, "kwargs": asked.kwargs}
    answer = answer_of(sample)
    if answer is None:
        return follows_nothing(score)
    try:
        found = process_results(row, [answer])
    except LookupError as error:
        raise nltk_data_missing(error, "punkt_tab", WHERE) from error
    followed = found["inst_level_strict_acc"]
    parts = {
        "strict": float(found["prompt_level_strict_acc"]),
        "loose": float(found["prompt_level_loose_acc"]),
        "share": sum(followed) / len(followed),
    }
    return RewardResult(parts[score], parts)
