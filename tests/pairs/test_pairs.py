"""The table of pairs of features is complete, and is what the configuration's rules say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pairs.features import BASE, FEATURES
from tests.pairs.idle import IDLE
from tests.pairs.members import members
from tests.pairs.no_features import no_features
from tests.pairs.outcomes import outcome, pair, pairs, together
from tests.pairs.signs import SIGNS
from tests.pairs.table import kept_runs, kept_table, table

REPOSITORY = Path(__file__).parents[2]


def of_features() -> set[str]:
    """Members that a feature switches on, needs or carries, and the sections around them."""
    found: set[str] = set()
    for feature in FEATURES.values():
        found.update(feature.carries)
        for field, value in (feature.settings | feature.needs).items():
            parts = field.split(".")
            found.update(".".join(parts[:length]) for length in range(1, len(parts) + 1))
            found.update(f"{field}={item}" for item in (value if isinstance(value, list) else [value]))
    return found


def test_each_member_of_the_configuration_belongs_to_a_feature_or_is_named_as_none() -> None:
    known, none = of_features(), no_features()
    assert [member for member in members() if member not in known and member not in none] == []
    assert [member for member in none if member not in members()] == []
    assert [member for member in none if member in known and member not in map(_of_base, BASE)] == []
    carried = [member for feature in FEATURES.values() for member in feature.carries]
    assert [member for member in carried if member not in members()] == []


def _of_base(field: str) -> str:
    return f"{field}={BASE[field]}"


def test_a_new_member_is_missed() -> None:
    assert "pipeline.eager" in members()
    assert "pipeline.on_update=keep" in members()
    assert "rollout.buffer" in members()
    assert "algorithm.loss.kind=gspo" in members()
    assert "pipeline.on_update=resend" not in members()


@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_goes_alone(name: str) -> None:
    alone = together([name])
    assert alone.accepted, (alone.clash, alone.problems)


def test_each_feature_that_runs_here_has_a_sign_and_each_other_a_test() -> None:
    here = {name for name, feature in FEATURES.items() if feature.elsewhere is None}
    assert set(SIGNS) == here
    others = [feature.elsewhere for feature in FEATURES.values() if feature.elsewhere is not None]
    assert [other.test for other in others if not (REPOSITORY / other.test).exists()] == []
    silent = {name for names in IDLE.values() for name in names}
    assert (silent | IDLE.keys()) <= here


def test_the_kept_table_is_what_the_rules_say() -> None:
    now, kept = table(kept_runs()), kept_table()
    assert now.keys() == kept.keys()
    assert {both: (kept[both], line) for both, line in now.items() if line != kept[both]} == {}, (
        "`python -m tests.pairs --write` keeps the new table if that is meant"
    )


def test_each_accepted_pair_is_in_a_run_or_has_a_reason() -> None:
    assert [both for both, line in kept_table().items() if line == "not covered"] == []
    assert [run for run in kept_runs() if not together(run).accepted] == []


def test_what_refuses_a_pair_names_a_field_of_each() -> None:
    refused = [both for both in pairs() if outcome(*both).kind == "refused"]
    assert len(refused) > 100
    unnamed = []
    for both in refused:
        said = " ".join(f"{problem} {problem.field}" for problem in pair(*both).problems)
        unnamed += [(name, both) for name in both if not _names(said, FEATURES[name].fields)]
    assert unnamed == []


def _names(said: str, fields: tuple[str, ...]) -> bool:
    """Whether a message names one of the fields, or the section that it stands in."""
    return any(_named(said, field) for field in fields)


def _named(said: str, field: str) -> bool:
    *above, last = field.split(".")
    inside = len(above) > 1 and ".".join(above) in said
    return inside or field in said or f".{last}" in said or f"{last}=" in said
