"""Makes what critic.yaml starts from: the quickstart's sums, and a tiny model that solves and judges some of them.

The model is warmed up on answers of both kinds: "3+4=" is 7, and "3+4=8?" is n.
"""

from __future__ import annotations

import random
from pathlib import Path

from millrace import RunConfig
from millrace.connectors.huggingface.tiny import build_tiny_model
from millrace.flows.quickstart import HELD_OUT, arithmetic, is_warm, learn_answers, warm_config, write_rows

ROWS = 64_000
TARGET_LOSS = 0.5  # mean of the last ten steps: much is left to learn
ITERATIONS = 12  # of the warm-up, at most
JUDGED = 0.25  # share of its rows


def prepare(config: RunConfig) -> None:
    """Write the sums, and make the warmed-up model at config.model.path unless it exists."""
    if is_warm(config):
        return
    model, seed = Path(config.model.path), config.run.seed
    folder = model.parent
    folder.mkdir(parents=True, exist_ok=True)
    sums = arithmetic(seed)
    write_rows(folder / "held_out.jsonl", sums[:HELD_OUT])
    write_rows(folder / "train.jsonl", sums[HELD_OUT:])
    rng = random.Random(seed)
    lessons = folder / "warm_up.jsonl"
    write_rows(lessons, [lesson(rng.choice(sums[HELD_OUT:]), rng) for _ in range(ROWS)])
    build_tiny_model(folder / "model", seed=seed)
    warm_up = warm_config(config, folder, [f"run.iterations={ITERATIONS}", f"data.sources.0.path={lessons}"])
    learn_answers(warm_up, model, TARGET_LOSS)


def lesson(row: dict[str, str], rng: random.Random) -> dict[str, str]:
    """A sum to solve, or an answer to judge, which is right in one case of two."""
    if rng.random() >= JUDGED:
        return row
    right = rng.random() < 0.5
    error = 0 if right else rng.choice((-10, -2, -1, 1, 2, 10))
    return {"prompt": f"{row['prompt']}{int(row['label']) + error}?", "label": "y" if right else "n"}
