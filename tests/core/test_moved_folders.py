"""A step is made again with a model that lies elsewhere by now: its files' hashes say that it is the same."""

from __future__ import annotations

from typing import Any, cast

import pytest

from millrace.core.config import RunConfig
from millrace.core.config.parts.restart import restart_of
from millrace.core.config.reading.findings import all_fields
from millrace.core.contracts.task_records import StepMetrics
from millrace.core.errors import TrainerError
from millrace.core.replay import MAY_MOVE, SECTIONS, check_trainer_fits, settings_of
from tests.core.config.test_rules import BASE

ALGORITHM: dict[str, Any] = {
    "preset": "ppo",
    "kl_coef": 0.1,
    "reference": "a/reference",
    "distillation_coef": 0.5,
    "teacher": "a/teacher",
    "advantage": {"critic": {"path": "a/critic"}},
}


def settings(algorithm: dict[str, Any]) -> Any:
    return settings_of(RunConfig.model_validate({**BASE, "algorithm": algorithm}), {})


def recorded(algorithm: dict[str, Any]) -> StepMetrics:
    return cast(StepMetrics, {"version": 1, "settings": settings(algorithm)})


def test_every_folder_that_may_move_and_that_a_step_reads_is_named() -> None:
    moving = {
        path
        for path, field in all_fields().items()
        if (restart := restart_of(field)) and restart.moves and path.partition(".")[0] in SECTIONS
    }
    assert moving == set(MAY_MOVE)


@pytest.mark.parametrize("path", MAY_MOVE)
def test_a_moved_folder_is_taken_and_one_that_comes_or_goes_is_not(path: str) -> None:
    then = settings(ALGORITHM)
    here, gone = (_with(ALGORITHM, path.split(".")[1:], value) for value in ("b/elsewhere", None))
    assert settings(here) != then
    check_trainer_fits(1, recorded(ALGORITHM), settings(here))
    for before, now in ((ALGORITHM, gone), (gone, ALGORITHM)):
        with pytest.raises(TrainerError, match=path):
            check_trainer_fits(1, recorded(before), settings(now))


def _with(values: dict[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    below = value if len(path) == 1 else _with(values[path[0]], path[1:], value)
    return {**values, path[0]: below}
