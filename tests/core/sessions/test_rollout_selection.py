"""Which function makes a row's rollout."""

from __future__ import annotations

import pytest

from millrace.core.config.rollout import SessionSection
from millrace.core.hooks.rollout_selection import UnknownRolloutError, rollout_function

NAMED = [{"name": "debate", "function": "mine:debate"}]


def chosen(session: SessionSection, **metadata: str) -> tuple[str, str | None]:
    field, function = rollout_function(session, metadata)
    return field, function.function if function else None


def test_a_row_is_made_by_the_function_that_it_names_else_by_the_sections() -> None:
    session = SessionSection.model_validate({"function": "mine:answer", "named": NAMED})
    assert chosen(session) == ("rollout.session.function", "mine:answer")
    assert chosen(session, rollout="debate") == ("rollout.session.named.debate", "mine:debate")


def test_other_rows_go_to_the_environment_or_the_tools() -> None:
    session = SessionSection.model_validate({"environment": "mine:Game", "named": NAMED})
    assert chosen(session) == ("rollout.session.function", None)


def test_without_names_the_metadata_choose_nothing() -> None:
    assert (
        chosen(SessionSection.model_validate({"function": "mine:answer"}), rollout="debate")[1]
        == "mine:answer"
    )


def test_a_name_that_is_not_there_is_refused() -> None:
    session = SessionSection.model_validate({"function": "mine:answer", "named": NAMED})
    with pytest.raises(UnknownRolloutError, match="'duet', and rollout.session.named has debate"):
        rollout_function(session, {"rollout": "duet"})
