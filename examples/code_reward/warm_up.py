"""Makes what programs.yaml starts from: tasks with tests, and a tiny model that writes the right program in some of its tries.

A task shows two values of a function, and the program is an expression over x. Its tests call it with other numbers.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from millrace import RunConfig
from millrace.connectors.huggingface.tiny import build_tiny_model
from millrace.flows.quickstart import is_warm, learn_answers, warm_config, write_rows

LARGEST = 60  # number in a program
SHOWN = range(1, 10)  # x of the first value that a prompt shows; the second is that of x + 1
TESTED = (20, 50)
HELD_OUT = 100
TARGET_LOSS = 0.35  # mean of the last ten steps: much is left to learn


def prepare(config: RunConfig) -> None:
    """Write the tasks, and make the warmed-up model at config.model.path unless it exists."""
    if is_warm(config):
        return
    model, seed = Path(config.model.path), config.run.seed
    folder = model.parent
    folder.mkdir(parents=True, exist_ok=True)
    rows = tasks()
    random.Random(seed).shuffle(rows)
    write_rows(folder / "held_out.jsonl", rows[:HELD_OUT])
    write_rows(folder / "train.jsonl", rows[HELD_OUT:])
    build_tiny_model(folder / "model", seed=seed)
    learn_answers(warm_config(config, folder), model, TARGET_LOSS)


def tasks() -> list[dict[str, Any]]:
    """A row for every program and every first value."""
    programs = [(sign, number) for sign in "+-*" for number in range(1, LARGEST + 1)]
    return [task(sign, number, x) for sign, number in programs for x in SHOWN]


def task(sign: str, number: int, x: int) -> dict[str, Any]:
    """The row of the program `x{sign}{number}`, which shows its values at x and x + 1."""
    shown = ",".join(f"f({at})={value(sign, number, at)}" for at in (x, x + 1))
    tests = [{"input": [at], "output": value(sign, number, at)} for at in TESTED]
    return {"prompt": shown, "label": f"x{sign}{number}", "tests": tests, "fn_name": "f"}


def value(sign: str, number: int, x: int) -> int:
    """What a program gives."""
    return {"+": x + number, "-": x - number, "*": x * number}[sign]
