"""Turns that shards store: none is generated again, whatever is killed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.soak import rollouts
from tests.support.flow_runs import Workplace
from tests.support.shard_runs import IN_SHARDS, Held, assert_like

TOOL = {**rollouts.SESSIONS["tool"], "max_tokens": 64, "max_turns": 4}
SESSION = (f"rollout.session={json.dumps(TOOL)}", "rollout.sampling.max_new_tokens=8")


@pytest.fixture
def session(workplace: Workplace, tmp_path: Path) -> tuple[str, ...]:
    (workplace.folder / "soak_rollouts.py").write_text(rollouts.MODULE)
    workplace.environment[rollouts.NOTES] = str(tmp_path / "notes.txt")
    return SESSION


def turns(run: Path) -> list[dict[str, Any]]:
    """What parts hold of turns, in the order of their parts' names."""
    paths = sorted(run.glob("iterations/*/turns/part-*.parquet"))
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def generated_turns(run: Path) -> Counter[tuple[Any, ...]]:
    """How often each turn was generated and stored."""
    return Counter(
        (row["rollout_id"], row["branch"], row["event"], row["segment"])
        for row in turns(run)
        if row["kind"] == "segment"
    )


@pytest.mark.slow
def test_turns_are_stored_by_shards_and_those_of_one_that_is_killed_are_not_generated_again(
    workplace: Workplace, session: tuple[str, ...], tmp_path: Path
) -> None:
    workplace.train(tmp_path / "alone", *session)
    run = Held(workplace, tmp_path, "turns", *session)
    run.kill_shard()
    out = run.to_the_end()
    assert "of rollout: its process died" in out
    assert_like(run.root / "a", tmp_path / "alone" / "a")
    assert generated_turns(run.root / "a")
    assert max(generated_turns(run.root / "a").values()) == 1


@pytest.mark.slow
def test_turns_of_shards_whose_driver_is_killed_are_not_generated_again(
    workplace: Workplace, session: tuple[str, ...], tmp_path: Path
) -> None:
    workplace.train(tmp_path / "alone", *session)
    run = Held(workplace, tmp_path, "turns", *session)
    run.kill_driver()
    before = generated_turns(run.root / "a")
    assert before
    workplace.train(run.root, *IN_SHARDS, *session)
    assert generated_turns(run.root / "a") >= before
    assert_like(run.root / "a", tmp_path / "alone" / "a")
    assert max(generated_turns(run.root / "a").values()) == 1
