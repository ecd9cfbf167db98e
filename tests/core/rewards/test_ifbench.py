"""IFBench's reward: rows in its public format, and what is wrong with others."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from millrace.core.errors import ConfigError, DataError
from millrace.core.hooks.protocols import RewardInput, RewardResult
from millrace.core.rewards.hub.ifbench import NLTK_DATA, ifbench

INSTALLED = importlib.util.find_spec("if_verifiable") is not None
needs_it = pytest.mark.skipif(not INSTALLED, reason="pip install 'millrace[ifbench]'")
NO_SPACE = ("format:no_whitespace", {"N": None, "keyword": None})
KEYWORDS = (  # as the data set has it: every argument of every instruction, most of them null
    "count:keywords_multiple",
    {"N": None, **{f"keyword{number}": f"word{number}" for number in range(1, 6)}},
)
RIGHT_COUNTS = " ".join(
    f"word{number}" for number, times in zip(range(1, 6), (1, 2, 3, 5, 7), strict=True) for _ in range(times)
)


@pytest.fixture(autouse=True)
def data_of_nltk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folders that are looked for, empty: the instructions of these tests read nothing in them."""
    if INSTALLED:
        import nltk

        for path in NLTK_DATA:
            (tmp_path / path).mkdir(parents=True)
        monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    return tmp_path


def scored(response: str, *instructions: tuple[str, Any], **options: Any) -> RewardResult:
    metadata = {
        "instruction_id_list": [name for name, _ in instructions],
        "kwargs": [kwargs for _, kwargs in instructions],
    }
    return ifbench(RewardInput("Write something.", response, metadata=metadata), **options)


@needs_it
@pytest.mark.parametrize(
    ("response", "instructions", "strict", "loose", "share"),
    [
        ("Spring", [NO_SPACE], 1, 1, 1),
        ("In spring", [NO_SPACE], 0, 0, 0),
        ("<think>a b</think>Spring", [NO_SPACE], 1, 1, 1),
        ("Here it is:\nSpring", [NO_SPACE], 0, 1, 0),
        (RIGHT_COUNTS, [KEYWORDS], 1, 1, 1),
        (RIGHT_COUNTS, [KEYWORDS, NO_SPACE], 0, 0, 0.5),
        (RIGHT_COUNTS + " word1", [KEYWORDS], 0, 0, 0),
        ("", [NO_SPACE], 0, 0, 0),
    ],
)
def test_a_response_is_scored_by_the_instructions_it_follows(
    response: str, instructions: list[tuple[str, Any]], strict: float, loose: float, share: float
) -> None:
    parts = {"strict": strict, "loose": loose, "share": share}
    for score, reward in parts.items():
        assert scored(response, *instructions, score=score) == RewardResult(reward, parts)


@needs_it
@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({}, "metadata of the row: instruction_id_list and kwargs are no lists"),
        ({"instruction_id_list": ["a"], "kwargs": []}, "are no lists of one length"),
        ({"instruction_id_list": ["a"], "kwargs": [{}]}, "'a' is no instruction of IFBench"),
        (
            {"instruction_id_list": ["count:word_count_range"], "kwargs": [{"min_words": 3}]},
            "metadata.kwargs of the row: count:word_count_range has no max_words",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_named(metadata: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        ifbench(RewardInput("?", "x", metadata=metadata))


@needs_it
def test_an_instruction_that_reads_nltks_data_names_what_is_missing(data_of_nltk: Path) -> None:
    with pytest.raises(ConfigError, match="data of nltk are missing") as caught:
        scored("Go on.", ("words:start_verb", {}))
    assert "nltk.downloader punkt punkt_tab" in str(caught.value.remedy)
    (data_of_nltk / "corpora" / "stopwords").rmdir()
    with pytest.raises(ConfigError, match=r"data of nltk are missing: corpora/stopwords"):
        scored("Spring", NO_SPACE)


@pytest.mark.skipif(INSTALLED, reason="the extra is installed")
def test_without_the_extra_it_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"ifbench: it needs if-verifiable") as caught:
        scored("Spring", NO_SPACE)
    assert "millrace[ifbench]" in str(caught.value.remedy)


def test_an_unknown_score_is_named() -> None:
    with pytest.raises(ConfigError, match="score = most is not a choice"):
        scored("x", NO_SPACE, score="most")
