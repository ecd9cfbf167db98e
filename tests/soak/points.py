"""Kill points: which victim dies, in which iteration, at which task; before it, in it or after it.

Owns the matrix and the choice of random points; knows nothing of processes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from tests.soak.rollouts import FORMS

TASKS = (
    "sample_prompts",
    "rollout",
    "reward",
    "filter",
    "train_step",
    "sync_weights",
    "checkpoint",
    "publish",
)
WHENS = ("before", "in", "after")
VICTIMS = ("driver", "trainer", "engine", "ray", "prefect", "terminal", "scorer")
# the driver by kill -9, or by Ctrl-C, which a terminal sends to its processes
ENDS_THE_RUN = ("driver", "terminal")
# nobody but a driver dies there, and another one lives beside it: neighbours.py. By name, seconds of the clock and whether it is
# the lease's holder who has it, or who comes after
CLOCKS = {
    "clock-holder-ahead": (600, True),
    "clock-holder-behind": (-600, True),
    "clock-successor-ahead": (600, False),
    "clock-successor-behind": (-600, False),
}
NEIGHBOURS = ("stopped", "namesake", "namespace", *CLOCKS)
BESIDE = (  # the neighbours of the matrix, with the task at which the first driver waits
    ("stopped", "rollout"),
    ("stopped", "train_step"),
    ("namesake", "rollout"),
    ("namesake", "train_step"),
    ("namespace", "reward"),
    ("namespace", "publish"),
    ("clock-holder-ahead", "rollout"),
    ("clock-holder-behind", "train_step"),
    ("clock-successor-ahead", "sync_weights"),
    ("clock-successor-behind", "rollout"),
)
TURNS = "turns"  # a place within the task rollout, of rollouts of several turns: their first part is written
ROLLOUTS = tuple(FORMS)
CHECKPOINTED = 1  # index of the iteration of the test run that saves a checkpoint: every point exists in it


@dataclass(frozen=True)
class Point:
    """One kill. A victim other than the driver dies in the task, after this share of its usual time.

    The victim "terminal" is the command and its processes, to which Ctrl-C is sent. The victim "scorer" is every worker
    process of the driver, those that score and the one that computes advantages: at work in their own tasks, idle in others.
    At a victim of NEIGHBOURS the driver waits at the point while another one comes.
    """

    victim: str
    task: str
    when: str
    dynamic: bool = False
    iteration: int = CHECKPOINTED
    share: float = 0.3
    form: str = ""  # of rollouts of several turns; empty: one answer each

    def __str__(self) -> str:
        sampling = "dynamic" if self.dynamic else "sync"
        rollouts = f"-{self.form}" if self.form else ""
        return f"{self.victim}-{self.when}-{self.task}-{self.iteration}-{sampling}{rollouts}"


def matrix(every: bool = False) -> list[Point]:
    """The driver at all 24 points and every other victim in each task, alternating between the kinds of sampling; neighbours.

    With `every`: every victim at every point, and every neighbour in every task, with either kind of sampling.
    """
    if every:
        combined = [
            *product(VICTIMS, TASKS, WHENS, (False, True)),
            *product(NEIGHBOURS, TASKS, ("in",), (False, True)),
        ]
        points = [Point(victim, task, when, dynamic) for victim, task, when, dynamic in combined]
        return points + list(of_rollouts())
    points = [Point("driver", task, when, False) for task, when in product(TASKS, WHENS)]
    points += [Point("driver", task, "in", True) for task in TASKS]
    for number, victim in enumerate(VICTIMS[1:]):
        points += [Point(victim, task, "in", bool((at + number) % 2)) for at, task in enumerate(TASKS)]
    points += [Point(victim, task, "in") for victim, task in BESIDE]
    return points + list(of_rollouts())


def of_rollouts() -> Iterator[Point]:
    """Of each form of rollouts of several turns: the driver between two of their turns, every other victim among them."""
    for form in ROLLOUTS:
        yield Point("driver", TURNS, "in", form=form)
        for victim in VICTIMS:
            yield Point(victim, "rollout", "in", form=form)


REDUCED = (
    Point("driver", "rollout", "in", dynamic=True),
    Point("driver", "train_step", "after"),
    Point("trainer", "train_step", "in"),
    Point("engine", "rollout", "in", dynamic=True),
    Point("ray", "train_step", "before"),
    Point("prefect", "rollout", "before"),
    Point("terminal", "train_step", "in"),
    Point("terminal", "rollout", "in", dynamic=True),
)


def at_random(seed: int, iterations: int) -> Iterator[Point]:
    """Endless random points, a pure function of the seed. The driver dies as often as all other victims together."""
    numbers = random.Random(seed)
    while True:
        victim = numbers.choice((*VICTIMS[1:], *["driver"] * (len(VICTIMS) - 1)))
        task, when = numbers.choice(TASKS), numbers.choice(WHENS)
        dynamic, share = numbers.random() < 0.5, numbers.uniform(0.05, 0.9)
        # worker processes start in the first iteration
        settled = task == "checkpoint" or victim == "scorer"
        iteration = CHECKPOINTED if settled else numbers.randrange(iterations)
        form = numbers.choice(ROLLOUTS) if numbers.random() < 0.3 else ""
        yield Point(victim, task, when, dynamic, iteration, share, form)
