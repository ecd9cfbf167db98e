"""What an error carries, and that it stays itself between processes."""

from __future__ import annotations

import pickle

import pytest

from millrace.core import errors
from millrace.core.errors import ConfigError, MillraceError, TrainerMemoryError, first_error


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ConfigError("no such folder"), "no such folder"),
        (ConfigError("no such folder", where="model.path = x"), "model.path = x: no such folder"),
        (ConfigError("no such folder", remedy="make it"), "no such folder; make it"),
        (
            ConfigError("no such folder", where="model.path = x", remedy="make it"),
            "model.path = x: no such folder; make it",
        ),
        (
            ConfigError("differs:\n  run.seed\n  rollout", where="run a", remedy="put them back"),
            "run a: differs:\n  run.seed\n  rollout\nput them back",
        ),
    ],
)
def test_an_error_reads_as_where_reason_remedy(error: MillraceError, sentence: str) -> None:
    assert str(error) == sentence


@pytest.mark.parametrize(
    "kind",
    [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MillraceError)],
)
def test_every_error_keeps_type_and_fields_across_processes(kind: type[MillraceError]) -> None:
    error = pickle.loads(pickle.dumps(kind("a", where="b", remedy="c")))  # noqa: S301
    assert type(error) is kind
    assert (error.reason, error.where, error.remedy, str(error)) == ("a", "b", "c", "b: a; c")


def test_the_first_error_of_nested_groups_is_the_one_that_ended_the_others() -> None:
    first = TrainerMemoryError("full")
    groups = ExceptionGroup("outer", [ExceptionGroup("inner", [first, ValueError()]), KeyError()])
    assert first_error(groups) is first
