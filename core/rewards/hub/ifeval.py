"""IFEval (Zhou et al., arXiv:2311.07911): whether a response follows instructions that a program can verify.

The checks come from EleutherAI's lm-evaluation-harness, an extra. A row holds `instruction_id_list` and, for each
instruction, `kwargs`, in the form of google/IFEval.
"""

from __future__ import annotations

from typing import Literal

from millrace.core.errors import ConfigError
from millrace.core.hooks.protocols import RewardInput, RewardResult
from millrace.core.rewards.hub.instructions import (
    answer_of,
    check_score,
    follows_nothing,
    instructions_of,
    nltk_data_missing,
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
