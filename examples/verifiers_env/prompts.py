"""Writes the tasks of the taskset as prompts, and makes a tiny model that half guesses them."""

from __future__ import annotations

import json
from pathlib import Path

from sums_warm_up import prepare as make_model

from millrace import RunConfig
from millrace.connectors.environments.verifiers import write_prompts
from millrace.flows.quickstart import HELD_OUT, arithmetic


def prepare(config: RunConfig) -> None:
    """Make the model unless it exists, and write the tasks beside it, parted as the quickstart parts its sums."""
    make_model(config)
    folder = Path(config.model.path).parent
    write_prompts(folder / "tasks.jsonl", "verifiers-sums")
    lines = (folder / "tasks.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    by_sum = {json.loads(line)["prompt"][-1]["content"]: line for line in lines}
    rows = [by_sum[row["prompt"]] for row in arithmetic(config.run.seed)]
    (folder / "tasks_held_out.jsonl").write_text("".join(rows[:HELD_OUT]), encoding="utf-8")
    (folder / "tasks_train.jsonl").write_text("".join(rows[HELD_OUT:]), encoding="utf-8")
