"""How old a row's tokens are under the weights that are trained, in every mode of weights that change under way."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.connectors.trainers.packing import _ages
from millrace.core.config.pipeline import Pipeline

TRAINED, LENGTH = 4, 6


def row(*spans: tuple[int, int], reused: bool = False) -> dict[str, Any]:
    return {
        "reused_from": 1 if reused else None,
        "response_length": LENGTH,
        "policy_versions": [{"first_token": first, "version": version} for first, version in spans],
    }


CASES: dict[
    str, tuple[dict[str, Any], list[int], list[int]]
] = {  # ages where caches are computed again, and where kept
    "the newest alone": (row((0, 4)), [0] * 6, [0] * 6),
    "an older one alone": (row((0, 3)), [1] * 6, [1] * 6),
    "old, then new": (row((0, 3), (2, 4)), [1, 1, 0, 0, 0, 0], [1] * 6),
    "oldest, old, new": (row((0, 1), (1, 3), (4, 4)), [3, 1, 1, 1, 0, 0], [3, 1, 1, 1, 1, 1]),
    "new from the first token on": (row((0, 4), (3, 4)), [0] * 6, [0] * 6),
    "new, old, new: two turns": (row((0, 4), (2, 3), (4, 4)), [0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]),
    "the last token alone": (row((0, 3), (5, 4)), [1, 1, 1, 1, 1, 0], [1] * 6),
    "the first token alone": (row((0, 3), (1, 4)), [1, 0, 0, 0, 0, 0], [1] * 6),
    "reused": (row((0, 4), reused=True), [1] * 6, [1] * 6),
    "reused, older": (row((0, 2), (3, 4), reused=True), [2, 2, 2, 1, 1, 1], [2, 2, 2, 1, 1, 1]),
    "no version is known": (row(), [0] * 6, [0] * 6),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("keeps_cache", [False, True])
def test_tokens_after_older_ones_are_old_too_where_the_cache_is_kept(name: str, keeps_cache: bool) -> None:
    made, again, kept = CASES[name]
    ages = _ages(made, TRAINED, 1, keeps_cache)
    assert ([0] * LENGTH if ages is None else ages.tolist()) == (kept if keeps_cache else again)


@pytest.mark.parametrize(
    ("ahead", "on_update", "keeps"),
    [
        (0, "keep", False),
        (1, "keep", True),
        (1, "resend", False),
        (1, "retract", False),
        (1, "finish", False),
    ],
)
def test_the_mode_says_whether_a_cache_is_kept(ahead: int, on_update: Any, keeps: bool) -> None:
    assert Pipeline(ahead=ahead, on_update=on_update).keeps_cache is keeps
