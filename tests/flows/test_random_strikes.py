"""Runs of drawn forms whose processes are struck at drawn moments: a few draws of `python -m tests.soak.draws`.

MILLRACE_TEST_SEED draws others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.soak.draws import StruckSite, drawn
from tests.support.flow_runs import Workplace

SEED = int(os.environ.get("MILLRACE_TEST_SEED", "0"))
STOPPED_S = 60.0


@pytest.fixture(scope="module")
def site(workplace: Workplace, whole: Path) -> Iterator[StruckSite]:
    made = StruckSite(workplace, whole)
    yield made
    made.leave()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6))
def test_a_run_that_is_struck_at_random_keeps_the_promises_of_the_matrix(
    site: StruckSite, number: int
) -> None:
    draw = drawn(SEED, number)
    print(f"seed {SEED}, draw {number}: {draw}")
    assert not site.strike(draw, number, STOPPED_S)
