"""A user's own reward and loss, as the files of a project hold them, and what a run that used both looks like."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq

REWARD = '''
def score(sample):
    """Only this function gives these numbers."""
    return 0.25 if len(sample.response) % 2 else 0.75
'''
LOSS = '''
def loss(batch):
    """Runs in the trainer's ranks, which are actors of Ray."""
    count = batch.mask.sum()
    return -batch.advantages * batch.logprobs, {"of_the_users": (count, count)}
'''


def assert_trained_by_them(run: Path, iterations: int) -> None:
    """Rewards and losses of the first iterations in a run's folder are those of these functions."""
    for index in range(iterations):
        folder = run / "iterations" / f"{index:06d}"
        rewards = pq.read_table(folder / "batch.parquet")["reward"].to_pylist()
        assert set(rewards) <= {0.25, 0.75}
        assert all("of_the_users" in step for step in json.loads((folder / "step.json").read_text())["steps"])
