"""A flow run whose starts all end within one iteration is not started for ever; which failures may pass."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.core import errors
from millrace.core.errors import BudgetError, MillraceError, may_pass
from millrace.flows.driver.run_record import STARTS, check_goes_on


def record(*attempts: tuple[str, int]) -> dict[str, Any]:
    return {"name": "a", "attempts": [{"flow_run_id": run, "complete": done} for run, done in attempts]}


def test_the_start_after_ten_within_an_iteration_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"run a: 10 starts of this flow run ended before iteration 3 was"):
        check_goes_on(record(*STARTS * [("x", 2)]), "x", 2)


@pytest.mark.parametrize(
    "attempts",
    [
        [],
        (STARTS - 1) * [("x", 2)],
        [("y", 2), *(STARTS - 1) * [("x", 2)]],  # another flow run
        [("x", 1), *(STARTS - 1) * [("x", 2)]],  # an iteration was complete since
        STARTS * [("y", 2)],
    ],
)
def test_any_other_start_is_not(attempts: list[tuple[str, int]]) -> None:
    check_goes_on(record(*attempts), "x", 2)


def test_starts_of_earlier_releases_which_say_less_do_not_count() -> None:
    check_goes_on({"name": "a", "attempts": STARTS * [{"flow_run_id": "x"}]}, "x", 0)


PASSING = {
    "ActorLostError", "EngineError", "EngineLostError", "EngineStalledError", "PortTakenError", "StorageError", "TrainerError",
    "TrainerStalledError",
}  # fmt: skip


def test_losses_may_pass_and_what_comes_again_does_not() -> None:
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MillraceError)
    ]
    assert len(kinds) > 15
    assert {kind.__name__ for kind in kinds if may_pass(kind("why"))} == PASSING
    assert not may_pass(KeyError("a bug"))
