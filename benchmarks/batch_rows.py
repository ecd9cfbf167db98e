"""Samples in the schema of a batch: what the trainer's benchmarks train on, however many tokens they have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from millrace.connectors.storage.store import Store
from millrace.core.contracts import schema

GROUP = 8


def batch_row(
    step: int, number: int, tokens: Sequence[int], response: int, advantage: float, logprob: float
) -> dict[str, Any]:
    """One sample of a step: all of its `response` last tokens are trained on, each generated at `logprob`."""
    return {
        "sample_id": f"{step}-{number}",
        "group_id": f"{step}-{number // GROUP}",
        "prompt_id": "p",
        "iteration": step - 1,
        "source": "default",
        "index": number % GROUP,
        "prompt": '"x"',
        "tokens": list(tokens),
        "response_length": response,
        "response": "",
        "loss_mask": [1] * response,
        "rollout_logprobs": [logprob] * response,
        "policy_versions": [],
        "engine_id": "",
        "seed": 0,
        "turns": 1,
        "status": "completed",
        "timings": [],
        "reward": 1.0,
        "reward_parts": [],
        "scoring": "scored",
        "verdict": "kept",
        "advantage": advantage,
        "train_step": step,
    }


def write_batch(folder: Path, rows: Sequence[dict[str, Any]]) -> str:
    """Path of a batch with these rows, in a folder of its own."""
    Store(str(folder)).write_table(
        "batch.parquet", pa.Table.from_pylist(list(rows), schema.schema("batch")), "batch"
    )
    return str(folder / "batch.parquet")
