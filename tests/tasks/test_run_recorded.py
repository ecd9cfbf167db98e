"""Records of tasks: each task returns the type that its record has, and a retry is made where it can help."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_type_hints

import pytest

from millrace.connectors.host.local_files import library_log
from millrace.core.contracts.task_records import IterationRecords
from millrace.core.errors import (
    BudgetError,
    ConfigError,
    EngineError,
    RefusedStepError,
    StorageError,
    TrainerMemoryError,
)
from millrace.tasks.checkpoint import checkpoint
from millrace.tasks.evaluate import evaluate, evaluate_before
from millrace.tasks.filter import filter_groups
from millrace.tasks.publish import publish, publish_supervised
from millrace.tasks.reward import reward
from millrace.tasks.rollout import rollout
from millrace.tasks.run_recorded import after_tries, may_help
from millrace.tasks.sample_prompts import sample_prompts
from millrace.tasks.supervised.held_out_loss import held_out_loss, held_out_loss_before
from millrace.tasks.supervised.sample_supervised import sample_supervised
from millrace.tasks.sync_weights import sync_weights
from millrace.tasks.train_step import train_step

TASKS = [
    sample_prompts,
    sample_supervised,
    rollout,
    reward,
    filter_groups,
    train_step,
    sync_weights,
    checkpoint,
    evaluate_before,
    evaluate,
    held_out_loss_before,
    held_out_loss,
    publish,
    publish_supervised,
]


def test_every_task_returns_the_type_of_its_record() -> None:
    returned = {task.name: get_type_hints(task.fn)["return"] for task in TASKS}
    assert returned == get_type_hints(IterationRecords)


@pytest.mark.parametrize(
    ("error", "helps"),
    [
        (EngineError("gone"), True),
        (StorageError("busy"), True),
        (ConfigError("wrong"), False),
        (TrainerMemoryError("full"), False),
        (RefusedStepError("gap"), False),
        (BudgetError("spent"), False),
        (ExceptionGroup("both", [EngineError("gone"), StorageError("busy")]), True),
        (ExceptionGroup("both", [EngineError("gone"), TrainerMemoryError("full")]), False),
    ],
)
def test_a_retry_is_made_where_it_can_help(error: Exception, helps: bool) -> None:
    assert may_help(None, None, SimpleNamespace(data=error)) is helps


def test_every_task_that_is_tried_again_asks_whether_that_can_help() -> None:
    assert {task.name for task in TASKS if task.retries and task.retry_condition_fn is not may_help} == set()


def test_what_died_in_every_try_names_how_many_there_were_and_the_log() -> None:
    said = after_tries(train_step.retries + 1)
    assert "tried 3 times" in said
    assert str(library_log()) in said
