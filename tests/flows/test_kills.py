"""A killed run resumes to the same end: a few points of `python -m tests.soak --matrix`; all but one are slow tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.soak.forms import TURNS
from tests.soak.harness import Site
from tests.soak.points import ENDS_THE_RUN, REDUCED, Point
from tests.support.flow_runs import Workplace

AMID_A_ROLLOUT = Point("driver", "rollout", "in")  # of a run as the workplace has it undisturbed
AMID_TURNS_AHEAD = Point("driver", TURNS, "in", form="tool_ahead")  # while the iteration before is trained
POINTS = (AMID_A_ROLLOUT, *REDUCED, AMID_TURNS_AHEAD)


@pytest.fixture(scope="module")
def site(workplace: Workplace, whole: Path) -> Iterator[Site]:
    made = Site(workplace, whole)
    yield made
    made.leave()


@pytest.mark.parametrize(
    "point",
    [pytest.param(p, marks=[] if p == AMID_A_ROLLOUT else [pytest.mark.slow]) for p in POINTS],
    ids=str,
)
def test_a_killed_run_ends_as_an_uninterrupted_one_of_another_name(site: Site, point: Point) -> None:
    outcome = site.kill(point)
    assert not outcome.problems
    assert outcome.survived == (point.victim not in ENDS_THE_RUN)
