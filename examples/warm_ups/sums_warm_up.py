"""A tiny model that half guesses the quickstart's sums: RL finds much to correct, and corrects it within minutes.

Owns the warm-up's data. Model, sums and training come from the quickstart.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from millrace.core.config import RunConfig
from millrace.flows.quickstart import is_warm, learn_answers, make_files, warm_config, write_rows

LESSONS = 76_800


def prepare(config: RunConfig, *, iterations: int = 15, guesses: float = 0.5) -> None:
    """Write the sums, and make the warmed-up model at config.model.path unless it exists.

    iterations: of the warm-up, with 5,120 answers each. guesses: share of answers that only repeat the first term.
    """
    if is_warm(config):
        return
    make_files(config)
    folder = Path(config.model.path).parent
    sums = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    rng = random.Random(config.run.seed)
    write_rows(folder / "lessons.jsonl", list(lessons(sums, guesses, rng)))
    overrides = [f"run.iterations={iterations}", f"data.sources.0.path={folder / 'lessons.jsonl'}"]
    learn_answers(warm_config(config, folder, overrides), Path(config.model.path))


def lessons(
    sums: Sequence[Mapping[str, str]], guesses: float, rng: random.Random
) -> Iterator[dict[str, str]]:
    """Sums with their answers, and sums with their first term as the answer."""
    for _ in range(LESSONS):
        row = rng.choice(sums)
        guess = rng.random() < guesses
        yield {"prompt": row["prompt"], "label": row["prompt"].split("+")[0] if guess else row["label"]}
