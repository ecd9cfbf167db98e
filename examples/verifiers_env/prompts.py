"""Writes the tasks of the taskset as prompts, and makes the quickstart's warmed-up model."""

from __future__ import annotations

import random
from pathlib import Path

from millrace import RunConfig
from millrace.connectors.environments.verifiers import write_prompts
from millrace.flows.quickstart import prepare as make_model

HELD_OUT = 200


def prepare(config: RunConfig) -> None:
    """Write tasks.jsonl beside the model, and a part of its rows for each use; make the model unless it exists."""
    make_model(config)
    folder = Path(config.model.path).parent
    write_prompts(folder / "tasks.jsonl", "verifiers-sums")
    rows = (folder / "tasks.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    random.Random(config.run.seed).shuffle(rows)
    (folder / "tasks_held_out.jsonl").write_text("".join(rows[:HELD_OUT]), encoding="utf-8")
    (folder / "tasks_train.jsonl").write_text("".join(rows[HELD_OUT:]), encoding="utf-8")
