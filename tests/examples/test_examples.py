"""Every example is run: two short iterations with a random model, and what its function did is in the stored rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.support.flow_runs import Workplace, make_workplace

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = [  # the quickstart's recipe, cut down to two iterations of two steps that a random model gets some reward in
    "run.prepare=null",
    "run.iterations=2",
    "model.path=model",
    "data.sources.0.path=train.jsonl",
    "rollout.prompts=8",
    "rollout.samples_per_prompt=4",
    "rollout.part_groups=2",
    "rollout.sampling.max_new_tokens=16",
    "trainer.global_batch=16",
    "trainer.max_pack_tokens=512",
    "checkpoint.every=2",
    "evaluation.every=2",
    "evaluation.sets.0.path=held_out.jsonl",
]
SOME_REWARD = ["reward.function=millrace.core.rewards.text:contains"]
SESSION_LENGTH = "rollout.session.max_tokens=64"
NO_WARM_UP = "trainer.schedule.warmup_steps=0"  # a warm-up begins at rate 0, and its first step moves nothing


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    place = make_workplace(tmp_path_factory.mktemp("examples"))
    place.call("server", "start")
    yield place
    place.call("server", "stop")


def iterations(workplace: Workplace, folder: str, name: str, *overrides: str) -> list[Path]:
    """Run the example as its README says, from a folder that holds its module; the folders of its iterations."""
    shutil.copy(EXAMPLES / folder / f"{name}.py", workplace.folder)
    root = workplace.folder / "runs"
    config = str(EXAMPLES / folder / f"{name}.yaml")
    workplace.call("train", config, f"storage.root={root}", f"run.name={name}", *SHORT, *overrides)
    found = sorted((root / name / "iterations").iterdir())
    assert len(found) == 2
    return found


def rows(iteration: Path, table: str = "batch") -> list[dict[str, Any]]:
    return pq.read_table(iteration / f"{table}.parquet").to_pylist()  # type: ignore[no-any-return]


def test_the_parts_of_the_reward_are_stored(workplace: Workplace) -> None:
    for iteration in iterations(workplace, "reward", "near_miss"):
        for row in rows(iteration):
            parts = dict(row["reward_parts"])
            assert set(parts) == {"closeness", "length"}
            assert parts["length"] == pytest.approx(-0.02 * row["response_length"])
            assert row["reward"] == pytest.approx(sum(parts.values()))
            assert row["shaped_reward"] == row["reward"]


def test_the_groups_that_the_filter_drops_are_replaced_and_keep_its_reason(workplace: Workplace) -> None:
    for iteration in iterations(workplace, "group_filter", "spread", *SOME_REWARD):
        verdicts = rows(iteration, "verdicts")
        reasons = {row["reason"] for row in verdicts if row["verdict"] == "dropped"}
        assert reasons == {"rewards are only 0 apart"}
        batch = rows(iteration)
        assert len(batch) == 8 * 4
        for group in {row["group_id"] for row in batch}:
            assert {row["reward"] for row in batch if row["group_id"] == group} == {0.0, 1.0}


def test_the_advantages_are_the_functions(workplace: Workplace) -> None:
    for iteration in iterations(workplace, "advantage", "best_of_group", *SOME_REWARD):
        batch = rows(iteration)
        mixed = {
            group
            for group in {row["group_id"] for row in batch}
            if len({row["reward"] for row in batch if row["group_id"] == group}) == 2
        }
        assert mixed
        for row in batch:
            best = row["group_id"] in mixed and row["reward"] == 1.0
            assert row["advantage"] == (0.5 if best else 0.0)


def test_the_metric_of_the_loss_is_stored_with_each_step(workplace: Workplace) -> None:
    for iteration in iterations(workplace, "loss", "bounded", *SOME_REWARD, NO_WARM_UP):
        steps = json.loads((iteration / "step.json").read_text())["steps"]
        assert steps[0]["bounded_share"] == 0.0  # the first step is on policy
        assert steps[1]["bounded_share"] > 0.0
        assert all(step["grad_norm"] > 0 for step in steps)


def test_a_second_try_is_a_second_turn_of_the_same_rollout(workplace: Workplace) -> None:
    for iteration in iterations(workplace, "generation", "second_try", "rollout.session.max_tokens=48"):
        for row in rows(iteration):
            second = row["turns"] == 2
            assert row["reward"] in ((0.0, 0.5) if second else (1.0,))
            # not trained: two role tokens, the three characters between them, and the end of a turn that was cut off
            assert row["response_length"] - sum(row["loss_mask"]) in ((5, 6) if second else (0,))
            roles = [message["role"] for message in json.loads(row["dialogue"])]
            assert roles == ["user", "assistant"] * row["turns"]


def test_a_client_of_your_own_makes_turns_that_go_on_from_one_another(workplace: Workplace) -> None:
    for iteration in iterations(workplace, "openai_client", "two_tries", SESSION_LENGTH):
        batch = rows(iteration)
        assert len(batch) == 8 * 4  # a sample of each rollout: no request was taken for a branch
        for row in batch:
            assert row["reward"] == {1: 1.0, 2: row["reward"]}[row["turns"]]
            assert row["reward"] in (0.0, 0.5, 1.0)
            assert [message["role"] for message in json.loads(row["dialogue"])] == [
                "user",
                "assistant",
            ] * row["turns"]
        assert {row["turns"] for row in batch} >= {2}
