"""Stored tables: the columns that row classes describe are those that runs have on disk."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import get_type_hints

import pyarrow as pa
import pytest

from millrace.core.contracts import schema
from millrace.core.contracts.sample import GeneratedSample, ScoredSample, Unscored

STORED = Path(__file__).parent / "stored_schemas.txt"


def written() -> str:
    tables = []
    for kind, fields in schema.SCHEMAS.items():
        lines = [f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in fields]
        tables.append("\n".join([f"[{kind}]", *lines]))
    return "\n\n".join(tables) + "\n"


def test_the_row_classes_describe_exactly_the_stored_columns() -> None:
    """A changed column needs a new schema.VERSION, for a table of another version is refused, and a new file here."""
    assert written() == STORED.read_text()


@pytest.mark.parametrize("kind", schema.SCHEMAS)
def test_a_table_says_what_it_is(kind: str) -> None:
    metadata = schema.schema(kind).metadata
    assert metadata == {b"millrace.table": kind.encode(), b"millrace.version": b"1"}


def generated(**changed: object) -> GeneratedSample:
    values: dict[str, object] = {
        "sample_id": "g-0000",
        "group_id": "g",
        "prompt_id": "p",
        "iteration": 0,
        "source": "s",
        "index": 0,
        "prompt": '"1+1="',
        "label": "2",
        "metadata": None,
        "tokens": [1, 2, 3],
        "response_length": 1,
        "response": "2",
        "loss_mask": [1],
        "rollout_logprobs": [-0.25],
        "policy_versions": [{"first_token": 0, "version": 3}],
        "engine_id": "engine-0",
        "seed": 7,
        "turns": 1,
        "status": "completed",
        "reason": None,
        "timings": [("started", 1.5), ("generate_s", 0.5)],
    }
    return GeneratedSample(**(values | changed))  # type: ignore[arg-type]


def test_rows_become_the_table_that_arrow_makes_of_their_dicts() -> None:
    rows = [generated(), generated(sample_id="g-0001", policy_versions=[], timings=[], loss_mask=[])]
    expected = pa.Table.from_pylist([asdict(row) for row in rows], schema=schema.schema("rollouts"))
    assert schema.to_table(rows, "rollouts").equals(expected, check_metadata=True)
    assert schema.to_table([], "rollouts").equals(
        schema.schema("rollouts").empty_table(), check_metadata=True
    )


def test_a_row_without_a_column_or_with_another_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="scoring_s"):
        ScoredSample(sample_id="a", group_id="g", reward=1.0, reward_parts=[], scoring="scored", reason=None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="colour"):
        generated(colour="red")


def test_what_rewards_read_are_columns_of_a_generated_sample() -> None:
    hints, stored = get_type_hints(Unscored), get_type_hints(GeneratedSample)
    assert {name: stored[name] for name in hints} == hints
