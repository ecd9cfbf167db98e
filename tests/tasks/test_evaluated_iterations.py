"""After which iterations the weights are evaluated before the run goes on, or ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from millrace.core.config import RunConfig
from millrace.core.periodic import evaluates_after

SETS = {"sets": [{"name": "held_out", "path": "held_out.jsonl"}]}


@pytest.mark.parametrize(
    ("evaluation", "after"),
    [
        ({}, []),
        ({**SETS, "every": 1}, [0, 1, 2, 3, 4, 5]),
        ({**SETS, "every": 2}, [0, 2, 4, 5]),
        (
            {**SETS, "every": 2, "background": True},
            [5],
        ),  # beside the next iteration, which the last one lacks
        ({**SETS, "every": 100, "background": False}, [0, 5]),
    ],
)
def test_the_weights_are_evaluated_after_these_iterations(
    make_config: Callable[..., RunConfig], evaluation: dict[str, Any], after: list[int]
) -> None:
    config = make_config(run={"name": "a", "iterations": 5}, evaluation=evaluation)
    assert [done for done in range(6) if evaluates_after(config, done)] == after
