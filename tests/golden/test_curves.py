"""The trainer makes the losses and gradient norms that it made before, family by family."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millrace.core.families.registry import BUILT_IN
from tests.golden.curves import FAMILIES, STEPS, difference, read, train
from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import Workers


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    pool = Workers()
    yield pool
    pool.close()


def test_every_supported_family_has_a_curve() -> None:
    assert set(FAMILIES) == {family.name for family in BUILT_IN}


@pytest.mark.parametrize("family", slow_but(FAMILIES, "qwen3", "qwen3_moe"))
def test_fifty_steps_are_as_they_were(workers: Workers, family: str) -> None:
    found = difference(read(family), train(workers, family))
    assert found is None, f"{found}; `python -m tests.golden --write` keeps the new curve if that is meant"


def test_the_first_difference_is_named() -> None:
    kept = read("qwen3")
    changed = [dict(step) for step in kept]
    changed[6]["grad_norm"] *= 1.001
    changed[9]["loss"] += 1.0
    assert difference(kept, kept) is None
    assert str(difference(kept, changed)).startswith("step 7: grad_norm was")
    assert difference(kept, kept[:-1]) == f"{STEPS} steps are kept, {STEPS - 1} were trained"
    changed[0]["loss"] = float("nan")
    assert str(difference(kept, changed)).startswith("step 1: loss was")
