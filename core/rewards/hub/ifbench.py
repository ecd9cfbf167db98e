"""IFBench (Pyatkin et al., arXiv:2507.02833): 58 further instructions that a program can verify.

The checks come from the package if-verifiable, an extra. A row holds `instruction_id_list` and, for each instruction,
`kwargs`, in the form of allenai/IFBench_test.
"""

from collections.abc import Mapping
from typing import Any, Literal

from millrace.core.errors import ConfigError, DataError
from millrace.core.hooks.protocols import RewardInput, RewardResult
from millrace.core.rewards.hub.ifeval import (
    Instructions,
    answer_of,
    check_score,
    follows_nothing,
    instructions_of,
    nltk_data_missing,
)

WHERE = "ifbench"
# the package downloads missing data when it is imported, in each process that scores
NLTK_DATA = (
    "tokenizers/punkt",
    "tokenizers/punkt_tab",
    "taggers/averaged_perceptron_tagger_eng",
    "corpora/stopwords",
)


def ifbench(sample: RewardInput, *, score: Literal["strict", "loose", "share"] = "strict") -> RewardResult:
    """1 if the response follows all instructions of the row, else 0; text before </think> does not count.

    A response of more than LONGEST characters follows none.

    score: `strict`; `loose`, which also tries the response without its first line, its last line, and asterisks; or `share`
    of the instructions, strictly. All three are parts.
    Errors: ConfigError without the extra, for another score, or if nltk's data are missing; DataError of a row that has no
    instructions, unknown ones, or too few arguments; ValueError and TypeError of other arguments than an instruction takes.
    """
    check_score(score, WHERE)
    evaluate, known = _package()
    asked = instructions_of(sample, known, "IFBench")
    _check_arguments(asked, known)
    response = answer_of(sample)
    if response is None:
        return follows_nothing(score)
    try:
        _, found = evaluate(response, asked.names, asked.kwargs, asked.prompt, known)
    except LookupError as error:
        raise nltk_data_missing(error, _resources(), WHERE) from error
    parts = {"strict": found.binary_strict, "loose": found.binary_loose, "share": found.partial_strict}
    return RewardResult(parts[score], parts)


def _package() -> tuple[Any, Mapping[str, Any]]:
    """The package's evaluation, and its instructions by name."""
    try:
        import nltk

        for path in NLTK_DATA:
            nltk.data.find(path)
        from if_verifiable.common import evaluate_instructions
        from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT
    except ImportError as error:
        raise ConfigError(
            f"it needs if-verifiable: {error}", where=WHERE, remedy="pip install 'millrace[ifbench]'"
        ) from error
    except LookupError as error:
        raise nltk_data_missing(path, _resources(), WHERE) from error
    return evaluate_instructions, INSTRUCTION_DICT


def _check_arguments(asked: Instructions, known: Mapping[str, Any]) -> None:
    """Raises DataError for an instruction that lacks an argument: the package would take a random one."""
    for name, given in zip(asked.names, asked.kwargs, strict=True):
        lacking = [key for key in known[name](name).get_instruction_args_keys() if given.get(key) is None]
        if lacking:
            raise DataError(
                f"{name} has no {lacking[0]}",
                where="metadata.kwargs of the row",
                remedy="correct the row, or leave it out",
            )


def _resources() -> str:
    return " ".join(path.rpartition("/")[2] for path in NLTK_DATA)
