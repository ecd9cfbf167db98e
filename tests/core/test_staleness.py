"""The age of a sample."""

from __future__ import annotations

import pytest

from millrace.core.staleness import staleness


@pytest.mark.parametrize(
    ("versions", "age"),
    [([], 0), ([7], 0), ([5], 2), ([5, 7], 2), ([7, 5], 2)],
    ids=["no token", "on policy", "older", "the oldest token decides", "wherever it stands"],
)
def test_staleness_counts_versions_since_the_oldest_token(versions: list[int], age: int) -> None:
    spans = [{"first_token": 40 * number, "version": version} for number, version in enumerate(versions)]
    assert staleness(spans, 7) == age  # type: ignore[arg-type]
