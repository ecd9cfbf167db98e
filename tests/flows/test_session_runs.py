"""Runs whose rollouts take several turns, with tools that leave traces: exact in tokens, and after a kill in the midst of turns."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from tests.support.flow_runs import Workplace, configuration, final_weights, wait_until

MODULE = '''
import os
import random

from millrace import Done, Observation, Session, Task, Turn


async def ask_twice(session: Session) -> float:
    """Two answers with a noted tool call between them, and a critic in every second rollout."""
    turn = await session.generate()
    key = f"{session.task.prompt}/{session.task.index}"
    session.observe(await session.call("note", key=key, text=turn.text[:3]), "user")
    turn = await session.generate()
    if session.task.index % 2:
        critic = session.branch("critic", prompt="is it " + "".join(c for c in turn.text[:3] if c.isalnum()))
        said = await critic.generate()
        critic.reward(float(len(said.text) % 3))
    return session.rng.random() if session.task.label not in turn.text else 2.0


def note(key: str, text: str) -> str:
    """Write a line into a file.

    Args:
        key: Where.
        text: What.
    """
    with open(os.environ["NOTES"], "a") as file:
        file.write(key + "\\n")
    return "ok"


class Guess:
    """Says how far off the length of an answer is from one that it chose."""

    recovery = "snapshot"

    async def reset(self, task: Task) -> Observation:
        self.left, self.wanted = 2, random.Random(task.prompt).randint(2, 8)
        self._note("reset", task)
        return Observation("go", "user")

    async def step(self, turn: Turn) -> Observation | Done:
        self.left -= 1
        off = abs(len(turn.output_ids) - self.wanted)
        if not self.left or not off:
            return Done(1.0 / (1 + off), {"off": float(off)})
        return Observation(f"off {off}", "user")

    def snapshot(self) -> str:
        return f"{self.left} {self.wanted}"

    def restore(self, state: str) -> None:
        self.left, self.wanted = map(int, state.split())

    async def close(self) -> None:
        pass

    def _note(self, what: str, task: Task) -> None:
        with open(os.environ["NOTES"], "a") as file:
            file.write(f"{task.prompt}/{task.index}\\n")
'''
FORMS: dict[str, dict[str, Any]] = {
    "function": {"function": "my_rollouts:ask_twice", "tools": ["my_rollouts:note"]},
    "environment": {"environment": "my_rollouts:Guess"},
}


def project(workplace: Workplace, folder: Path, form: str) -> Workplace:
    """A configuration beside a module with rollouts; two iterations."""
    folder.mkdir()
    (folder / "my_rollouts.py").write_text(MODULE)
    for name in ("model", "train.jsonl", "held_out.jsonl"):
        (folder / name).symlink_to(workplace.folder / name)
    values = configuration()
    values["run"]["iterations"] = 2
    values["rollout"] |= {
        "prompts": 4,
        "sampling": {"max_new_tokens": 8},
        "session": {**FORMS[form], "max_tokens": 64, "max_turns": 4},
    }
    values["trainer"]["global_batch"] = 8
    values["evaluation"]["sets"][0]["sampling"] = {"max_new_tokens": 8}
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    made = Workplace(folder)
    made.environment = workplace.environment
    return made


def turns(run: Path) -> list[dict[str, Any]]:
    parts = sorted((run / "iterations").glob("*/turns/part-*.parquet"))
    return [row for part in parts for row in pq.read_table(part).to_pylist()]


def batches(run: Path) -> list[list[dict[str, Any]]]:
    columns = [
        "sample_id",
        "tokens",
        "loss_mask",
        "rollout_logprobs",
        "reward",
        "advantage",
        "train_step",
        "role",
    ]
    paths = sorted((run / "iterations").glob("*/batch.parquet"))
    return [pq.read_table(path, columns=columns).to_pylist() for path in paths]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_run_killed_among_its_turns_is_the_one_that_was_not_and_repeats_nothing_recorded(
    workplace: Workplace, tmp_path: Path, form: str
) -> None:
    place = project(workplace, tmp_path / "project", form)
    whole_notes, notes = tmp_path / "whole.txt", tmp_path / "notes.txt"
    out = place.train(tmp_path / "whole", NOTES=str(whole_notes))
    assert "2 iterations complete, 2 of them now" in out
    whole = tmp_path / "whole" / "a"

    reached = tmp_path / "reached"
    process = place.start(
        "train",
        "run.yaml",
        f"storage.root={tmp_path / 'killed'}",
        NOTES=str(notes),
        MILLRACE_KILL_POINT="1/turns/in",
        MILLRACE_KILL_POINT_FILE=str(reached),
    )
    wait_until(lambda: reached.exists() or process.poll() is not None)
    assert reached.exists(), process.communicate()[0]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    run = tmp_path / "killed" / "a"
    before = turns(run)
    kinds = Counter(row["kind"] for row in before)
    assert kinds["segment"] > len([row for row in before if row["event"] == 0]) / 2
    known = notes.read_text().splitlines()
    out = place.train(tmp_path / "killed", NOTES=str(notes))
    assert "2 iterations complete, 1 of them now" in out

    assert batches(run) == batches(whole)
    assert final_weights(run) == final_weights(whole)
    after = turns(run)
    places = Counter((row["rollout_id"], row["branch"], row["event"], row["segment"]) for row in after)
    assert set(places.values()) == {1}
    kept = {(row["rollout_id"], row["order"]): row for row in after}
    assert all(kept[row["rollout_id"], row["order"]] == row for row in before)
    # a call that was made and not recorded when the driver died is made again, no other
    again = Counter(notes.read_text().splitlines()) - Counter(whole_notes.read_text().splitlines())
    recorded = kinds["call"] - sum(row["tool"] == "environment.step" for row in before)
    assert sum(again.values()) <= len(known) - recorded
    assert "nothing is wrong" in place.call("verify", "a", "--root", str(tmp_path / "killed"))


def test_what_is_trained_is_what_was_generated_and_each_branch_counts_with_its_rollout(
    workplace: Workplace, tmp_path: Path
) -> None:
    place = project(workplace, tmp_path / "project", "function")
    place.train(tmp_path / "runs", "run.iterations=1", NOTES=str(tmp_path / "notes"))
    run = tmp_path / "runs" / "a"
    made: dict[str, list[int]] = {}
    for row in sorted(turns(run), key=lambda row: row["order"]):
        if row["kind"] == "segment":
            sample = row["rollout_id"] + (f".{row['branch']:02d}" if row["branch"] else "")
            made.setdefault(sample, []).extend(row["output_ids"])
    (batch,) = batches(run)
    assert len(batch) == 16 + 8
    for row in batch:
        response = row["tokens"][-len(row["loss_mask"]) :]
        assert [t for t, mask in zip(response, row["loss_mask"], strict=True) if mask] == made[
            row["sample_id"]
        ]
    steps = json.loads((run / "iterations" / "000000" / "step.json").read_text())["steps"]
    assert all(step["logprob_gap_max"] < 1e-4 for step in steps)
    assert {row["role"] for row in batch} == {None, "critic"}
    # all samples of a rollout train in one step, and rollouts are compared with those of their name
    by_rollout: dict[str, set[int]] = {}
    for row in batch:
        by_rollout.setdefault(row["sample_id"].partition(".")[0], set()).add(row["train_step"])
    assert all(len(found) == 1 for found in by_rollout.values())
    shown = place.call(
        "sql",
        "a",
        "select kind, count(*) as n from turns group by all",
        "--root",
        str(tmp_path / "runs"),
        "--json",
    )
    assert {row["kind"]: row["n"] for row in json.loads(shown)} == {"segment": 16 * 2 + 8, "call": 16}
    metrics = json.loads((run / "iterations" / "000000" / "manifest.json").read_text())["tasks"]["metrics"]
    assert metrics["session/turns_mean"] == 2.5
    assert metrics["session/branches_mean"] == 1.5
    assert metrics["session/calls_mean"] == 1.0
