"""Trains fifty steps of a family at tiny size, and finds where two curves part."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support.tiny_models import CLASSES, save_tiny_model
from tests.support.trainer_ranks import VOCAB, Group, Workers, configuration, samples, write_batch

FAMILIES = tuple(CLASSES)
STEPS = 50
FIGURES = ("loss", "grad_norm")
TOLERANCE = 1e-4  # relative: processors add in different orders, and fifty steps carry that on
KEPT = Path(__file__).parent / "kept"
ALGORITHM = {"kl_coef": 0.1, "entropy_coef": 0.01, "aggregation": "token_mean"}
SCHEDULE = {"kind": "cosine", "warmup_steps": 5, "decay_steps": STEPS, "min_lr": 1e-4}

Curve = list[dict[str, float]]


def train(workers: Workers, family: str) -> Curve:
    """Loss and gradient norm of each step, from random weights and random samples that every call repeats."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = save_tiny_model(folder / "model", family, VOCAB)
        settings = configuration(model, algorithm=ALGORITHM, schedule=SCHEDULE)
        with workers.group(settings) as ranks:
            return [_step(ranks, folder, step) for step in range(1, STEPS + 1)]


def _step(ranks: Group, folder: Path, step: int) -> dict[str, float]:
    metrics: dict[str, Any] = ranks.train([step], write_batch(folder / str(step), samples(step)))[0]
    return {figure: metrics[figure] for figure in FIGURES}


def difference(kept: Curve, found: Curve, tolerance: float = TOLERANCE) -> str | None:
    """The first step and figure in which two curves differ by more than the relative tolerance; None if none does."""
    if len(kept) != len(found):
        return f"{len(kept)} steps are kept, {len(found)} were trained"
    for step, (old, new) in enumerate(zip(kept, found, strict=True), 1):
        for figure in FIGURES:
            if not abs(new[figure] - old[figure]) <= tolerance * max(abs(old[figure]), 1e-2):
                return f"step {step}: {figure} was {old[figure]!r}, is {new[figure]!r}"
    return None


def read(family: str, folder: Path = KEPT) -> Curve:
    """The kept curve of a family."""
    curve: Curve = json.loads((folder / f"{family}.json").read_text())
    return curve


def write(family: str, curve: Curve, folder: Path = KEPT) -> None:
    """Keep a family's curve, a line a step."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(step) for step in curve)
    (folder / f"{family}.json").write_text(f"[\n{lines}\n]\n")
