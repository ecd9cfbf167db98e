"""IFEval (Zhou et al., arXiv:2311.07911): whether a response follows instructions that a program can verify.

The checks are those of EleutherAI's lm-evaluation-harness, an extra. A row holds `instruction_id_list` and, for each
instruction, `kwargs`, in the form of google/IFEval.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from millrace.core.errors import ConfigError, DataError
from millrace.core.hooks import RewardInput, RewardResult

NEEDED = ("instruction_id_list", "kwargs")
WHERE = "ifeval"


def ifeval(sample: RewardInput, *, score: Literal["strict", "loose", "share"] = "strict") -> RewardResult:
    """1 if the response follows all instructions of the row, else 0; what stands before </think> does not count.

    score: `strict`; `loose`, which also tries the response without its first line, its last line, and asterisks; or `share`
    of the instructions, strictly. All three are parts.
    Errors: ConfigError without the extra, for another score, or if nltk's data are missing; DataError of a row that has no
    instructions, or unknown ones; ValueError of arguments that an instruction does not take.
    """
    if score not in ("strict", "loose", "share"):
        raise ConfigError(
            f"score = {score} is not a choice", where=WHERE, remedy="give strict, loose or share"
        )
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
    langdetect.DetectorFactory.seed = 0  # it guesses by random numbers: the same text gets the same answer
    row = _row(sample, INSTRUCTION_DICT)
    try:
        found = process_results(row, [sample.response.rpartition("</think>")[2]])
    except LookupError as error:
        raise ConfigError(
            f"data of nltk are missing: {' '.join(str(error).split())[:120]}",
            where=WHERE,
            remedy="python -m nltk.downloader punkt_tab",
        ) from error
    followed = found["inst_level_strict_acc"]
    parts = {
        "strict": float(found["prompt_level_strict_acc"]),
        "loose": float(found["prompt_level_loose_acc"]),
        "share": sum(followed) / len(followed),
    }
    return RewardResult(parts[score], parts)


def _row(sample: RewardInput, known: Mapping[str, Any]) -> dict[str, Any]:
    """The row as the harness takes it."""
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
            f"{unknown[0]!r} is no instruction of IFEval",
            where="metadata.instruction_id_list of the row",
            remedy="correct the row, or leave it out",
        )
    asked = sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1].get("content")
    return {
        "key": 0,
        "prompt": asked,
        "instruction_id_list": names,
        "kwargs": [each or {} for each in kwargs],
    }
