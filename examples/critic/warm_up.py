"""Makes what critic.yaml starts from: the quickstart's sums, and a tiny model that solves and judges some of them.

The model is warmed up on answers of both kinds: "3+4=" is 7, and "3+4=8?" is n.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from millrace import RunConfig
from millrace.connectors.huggingface.tiny import build_tiny_model
from millrace.core.config.reading.load import load_config
from millrace.flows.quickstart import HELD_OUT, arithmetic, learn_answers, recipe

ROWS = 64_000
TARGET_LOSS = 0.5  # mean of the last ten steps: much is left to learn
ITERATIONS = 12  # of the warm-up, at most
JUDGED = 0.25  # share of its rows


def prepare(config: RunConfig) -> None:
    """Write the sums, and make the warmed-up model at config.model.path unless it exists."""
    model = Path(config.model.path)
    if (model / "config.json").exists():
        return
    folder, seed = model.parent, config.run.seed
    folder.mkdir(parents=True, exist_ok=True)
    sums = arithmetic(seed)
    write(folder / "held_out.jsonl", sums[:HELD_OUT])
    write(folder / "train.jsonl", sums[HELD_OUT:])
    rng = random.Random(seed)
    write(folder / "warm_up.jsonl", [lesson(rng.choice(sums[HELD_OUT:]), rng) for _ in range(ROWS)])
    build_tiny_model(folder / "model", seed=seed)
    warm_up = [
        f"run.name=warm-up-{seed}",
        f"run.seed={seed}",
        f"run.iterations={ITERATIONS}",
        f"storage.root={folder / 'runs'}",
        f"model.path={folder / 'model'}",
        f"data.sources.0.path={folder / 'warm_up.jsonl'}",
    ]
    learn_answers(load_config(recipe("quickstart_warm_up"), warm_up), model, TARGET_LOSS)


def lesson(row: dict[str, str], rng: random.Random) -> dict[str, str]:
    """A sum to solve, or an answer to judge, which is right in one case of two."""
    if rng.random() >= JUDGED:
        return row
    right = rng.random() < 0.5
    error = 0 if right else rng.choice((-10, -2, -1, 1, 2, 10))
    return {"prompt": f"{row['prompt']}{int(row['label']) + error}?", "label": "y" if right else "n"}


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Write rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
