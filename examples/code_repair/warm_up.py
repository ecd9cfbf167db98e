"""Makes what code_repair.yaml starts from: tasks, and a tiny model that writes the right program in some of its tries.

The model is warmed up on reference answers: programs for one value, and repairs after failures that wrong programs have.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from millrace import RunConfig
from millrace.connectors.huggingface.tiny import build_tiny_model
from millrace.flows.quickstart import is_warm, learn_answers, warm_config, write_rows

LARGEST = 20  # number in a program, and x in its prompt
HELD_OUT = 150
ROWS = 40_000
TARGET_LOSS = 0.6  # mean of the last ten steps: much is left to learn


def prepare(config: RunConfig) -> None:
    """Write the tasks, and make the warmed-up model at config.model.path unless it exists."""
    if is_warm(config):
        return
    model, seed = Path(config.model.path), config.run.seed
    folder = model.parent
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    tasks = all_tasks()
    rng.shuffle(tasks)
    held_out, train = tasks[:HELD_OUT], tasks[HELD_OUT:]
    write_rows(folder / "held_out.jsonl", [{"prompt": shown(*task), "label": task[0]} for task in held_out])
    write_rows(folder / "train.jsonl", [{"prompt": shown(*task), "label": task[0]} for task in train])
    lessons = folder / "warm_up.jsonl"
    write_rows(lessons, [lesson(*rng.choice(train), rng) for _ in range(ROWS)])
    build_tiny_model(folder / "model", seed=seed)
    warm_up = warm_config(config, folder, [f"data.sources.0.path={lessons}", "data.max_prompt_tokens=64"])
    learn_answers(warm_up, model, TARGET_LOSS)


def all_tasks() -> list[tuple[str, int]]:
    """Every program with every x that its prompt may show."""
    numbers = range(1, LARGEST + 1)
    return [(f"x{sign}{number}", x) for sign in "+-*" for number in numbers for x in numbers]


def lesson(program: str, x: int, rng: random.Random) -> dict[str, Any]:
    """A row whose answer is the program: at once, or after one or two wrong ones and how they fail."""
    messages = [{"role": "user", "content": shown(program, x)}]
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        wrong = f"x{rng.choice('+-*')}{rng.randint(1, LARGEST)}"
        failing = [at for at in (1, 2, 5, 10) if value(wrong, at) != value(program, at)]
        if failing:
            messages.append({"role": "assistant", "content": wrong})
            failure = f"{shown(program, failing[0])} not {value(wrong, failing[0])}"
            messages.append({"role": "user", "content": failure})
    return {"prompt": messages, "label": program}


def shown(program: str, x: int) -> str:
    """One value of a program."""
    return f"f({x})={value(program, x)}"


def value(program: str, x: int) -> int:
    """Of a program of `all_tasks`."""
    number = int(program[2:])
    return {"+": x + number, "-": x - number, "*": x * number}[program[1]]
