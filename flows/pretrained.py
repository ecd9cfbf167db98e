"""A pretrained model and tasks for it: SmolLM2-135M-Instruct, and word problems with numbers or short sums.

Owns the problems. `connectors/huggingface/pretrained.py` makes the model's folder.
"""

import random
from collections.abc import Iterator
from pathlib import Path

from millrace.connectors.huggingface.pretrained import make_smollm2
from millrace.core.config import RunConfig
from millrace.flows.quickstart import write_rows

TRAIN, HELD_OUT = 4_000, 200
SUMS_HELD_OUT = 100
LARGEST_TERM = 20
SHOWN = ((3, 4),)  # sums before each question, which show that a number alone is the answer
NAMES = [
    "Ana",
    "Ben",
    "Chloe",
    "Dan",
    "Eva",
    "Finn",
    "Gita",
    "Hugo",
    "Ines",
    "Jack",
    "Kira",
    "Leo",
    "Mona",
    "Nils",
    "Olga",
    "Pete",
]
THINGS = [
    "apples",
    "coins",
    "marbles",
    "stickers",
    "books",
    "pencils",
    "shells",
    "cards",
    "buttons",
    "stamps",
]


def prepare(config: RunConfig, *, largest: int = 30) -> None:
    """Make the model at config.model.path, and beside it word problems, unless they are there. largest: number in a problem."""
    write_problems(_model_of(config).parent, largest, config.run.seed)


def prepare_sums(config: RunConfig) -> None:
    """Make the model at config.model.path, and beside it sums, unless they are there."""
    write_sums(_model_of(config).parent, config.run.seed)


def _model_of(config: RunConfig) -> Path:
    """The model's folder, which is made unless it exists."""
    model = Path(config.model.path)
    if not (model / "config.json").exists():
        make_smollm2(model)
    return model


def write_problems(folder: Path, largest: int = 30, seed: int = 0) -> None:
    """Write train.jsonl and held_out.jsonl, which share no problem, unless they are there."""
    files = {"held_out": HELD_OUT, "train": TRAIN}
    if all((folder / f"{name}.jsonl").exists() for name in files):
        return
    made = problems(random.Random(seed), largest)
    for name, count in files.items():
        write_rows(folder / f"{name}.jsonl", [next(made) for _ in range(count)])


def write_sums(folder: Path, seed: int = 0) -> None:
    """Write sums_train.jsonl and sums_held_out.jsonl, which share no sum, unless they are there."""
    made = sums(random.Random(seed))
    rows = {"sums_held_out": made[:SUMS_HELD_OUT], "sums_train": made[SUMS_HELD_OUT:]}
    files = {folder / f"{name}.jsonl": part for name, part in rows.items()}
    if not all(file.exists() for file in files):
        for file, part in files.items():
            write_rows(file, part)


def sums(rng: random.Random) -> list[dict[str, str]]:
    """Every sum of two terms from 2 to LARGEST_TERM, except the shown ones, in the order of `rng`, as lines to continue."""
    terms = range(2, LARGEST_TERM + 1)
    asked = [(a, b) for a in terms for b in terms if (a, b) not in SHOWN]
    rng.shuffle(asked)
    shown = "".join(f"{a} + {b} = {a + b}\n" for a, b in SHOWN)
    return [{"prompt": f"{shown}{a} + {b} =", "label": str(a + b)} for a, b in asked]


def problems(rng: random.Random, largest: int) -> Iterator[dict[str, str]]:
    """Endless distinct problems with their answers."""
    seen = set()
    while True:
        text, answer = _problem(rng, largest)
        if text not in seen:
            seen.add(text)
            yield {"prompt": text, "label": str(answer)}


def _problem(rng: random.Random, largest: int) -> tuple[str, int]:
    (one, other), things = rng.sample(NAMES, 2), rng.choice(THINGS)
    a, b, few = rng.randint(2, largest), rng.randint(2, largest), rng.randint(2, 9)
    lost = min(few, a + b - 1)
    now = f"How many {things} does {one} have now?"
    together = f"How many {things} do they have together?"
    return rng.choice(
        [
            (f"{one} has {a} {things}. {other} gives {one} {b} more {things}. {now}", a + b),
            (
                f"{one} has {a + b} {things} and gives {b} of them to {other}. How many {things} does {one} have left?",
                a,
            ),
            (
                f"{one} buys {few} boxes with {a} {things} in each box. How many {things} does {one} buy?",
                a * few,
            ),
            (f"{one} has {a} {things}, and {other} has {few} times as many. {together}", a * (few + 1)),
            (
                f"{one} shares {a * few} {things} equally among {few} friends. How many {things} does each friend get?",
                a,
            ),
            (f"{one} has {a} {things}. {one} finds {b} more and then loses {lost}. {now}", a + b - lost),
        ]
    )
