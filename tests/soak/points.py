"""Kill points: which victim dies, in which iteration, at which task; before it, in it or after it.

Owns the matrix and the choice of random points; knows nothing of processes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from tests.soak import forms
from tests.soak.forms import FORMS, VICTIMS

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
EVALUATE = "evaluate"  # a task of some iterations alone
WHENS = ("before", "in", "after")
OWN_VICTIMS = tuple(dict.fromkeys(victim for form in FORMS.values() for victim in form.own_victims))
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
CHECKPOINTED = 1  # index of the iteration of the test run that saves a checkpoint and evaluates: every point exists in it


@dataclass(frozen=True)
class Point:
    """One kill. A victim other than the driver dies in the task, after this share of its usual time.

    The victim "terminal" is the command and its processes, to which Ctrl-C is sent. The victim "scorer" is every worker
    process of the driver and of its shards, those that score and the one that computes advantages: at work in their own tasks, idle in others.
    At a victim of NEIGHBOURS the driver waits at the point while another one comes.
    """

    victim: str
    task: str
    when: str
    dynamic: bool = False
    iteration: int = CHECKPOINTED
    share: float = 0.3
    form: str = ""  # of the run, as forms.py names it; empty: that of run.yaml

    @property
    def on_two_nodes(self) -> bool:
        """Whether its run joins a cluster of two nodes."""
        return bool(self.form) and FORMS[self.form].two_nodes

    def __str__(self) -> str:
        sampling = "dynamic" if self.dynamic else "sync"
        form = f"-{self.form}" if self.form else ""
        return f"{self.victim}-{self.when}-{self.task}-{self.iteration}-{sampling}{form}"


def matrix(every: bool = False) -> list[Point]:
    """The driver at all 24 points and every other victim in each task, alternating between the kinds of sampling; neighbours.

    With `every`: every victim at every point, and every neighbour in every task, with either kind of sampling.
    In both: the points of each form of the run.
    """
    if every:
        combined = [
            *product(VICTIMS, (*TASKS, EVALUATE), WHENS, (False, True)),
            *product(NEIGHBOURS, (*TASKS, EVALUATE), ("in",), (False, True)),
        ]
        points = [Point(victim, task, when, dynamic) for victim, task, when, dynamic in combined]
        return points + list(of_forms())
    points = [Point("driver", task, when, False) for task, when in product(TASKS, WHENS)]
    points += [Point("driver", task, "in", True) for task in TASKS]
    for number, victim in enumerate(VICTIMS[1:]):
        points += [Point(victim, task, "in", bool((at + number) % 2)) for at, task in enumerate(TASKS)]
    points += [Point(victim, task, "in") for victim, task in BESIDE]
    return points + list(of_forms())


def of_forms() -> Iterator[Point]:
    """Of each form of the run: the driver at its own places, every victim in one task, and a victim of its own in others."""
    for name, form in FORMS.items():
        for task, when in form.driver_dies:
            yield Point("driver", task, when, form=name)
        for victim in forms.victims(name):
            yield Point(victim, form.all_die_in, "in", form=name)
        for task in form.own_die_in:
            yield Point(form.own_victims[0], task, "in", form=name)


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
        task, when = numbers.choice((*TASKS, EVALUATE)), numbers.choice(WHENS)
        dynamic, share = numbers.random() < 0.5, numbers.uniform(0.05, 0.9)
        # worker processes start in the first iteration
        settled = task in ("checkpoint", EVALUATE) or victim == "scorer"
        iteration = CHECKPOINTED if settled else numbers.randrange(iterations)
        of_form = numbers.random() < 0.5
        form = numbers.choice([name for name in FORMS if victim in forms.victims(name)]) if of_form else ""
        yield Point(victim, task, when, dynamic, iteration, share, form)
