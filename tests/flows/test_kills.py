"""A run that is killed goes on to the same end: a few of the points of `python -m tests.soak --matrix`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.soak.harness import Site
from tests.soak.points import REDUCED, Point


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A workplace of its own: engines tell what they finish from the start of the Ray head on."""
    found = Site(tmp_path_factory.mktemp("kills"))
    yield found
    found.close()


@pytest.mark.parametrize("point", REDUCED, ids=str)
def test_a_run_killed_anywhere_ends_as_if_it_never_was(site: Site, point: Point) -> None:
    outcome = site.kill(point)
    assert not outcome.problems
    assert outcome.survived == (point.victim != "driver")
