"""A killed run resumes to the same end: a few points of `python -m tests.soak --matrix`; the longest are marked slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.harness import Site
from tests.soak.points import ENDS_THE_RUN, REDUCED, Point
from tests.support.flow_runs import Workplace

LONG = [
    point
    for point in REDUCED
    if (point.victim, point.when) in (("driver", "after"), ("ray", "before"), ("prefect", "before"))
    or (point.victim, point.task) in (("terminal", "rollout"), ("trainer", "train_step"))
]


@pytest.fixture(scope="module")
def site(workplace: Workplace, whole: Path) -> Site:
    return Site(workplace, whole)


@pytest.mark.parametrize(
    "point", [pytest.param(p, marks=[pytest.mark.slow] if p in LONG else []) for p in REDUCED], ids=str
)
def test_a_killed_run_ends_as_an_uninterrupted_one_of_another_name(site: Site, point: Point) -> None:
    outcome = site.kill(point)
    assert not outcome.problems
    assert outcome.survived == (point.victim not in ENDS_THE_RUN)
