"""Step n has the learning rate that megatron's and Hugging Face's schedules give step n, over whole runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from tests.support.trainer_ranks import Workers, configuration, samples, write_batch

LR, STEPS = 1e-3, 6
CASES = [
    {"kind": kind, "warmup_steps": warmup, "min_lr": min_lr}
    for kind in ("constant", "linear", "cosine")
    for warmup in (0, 2)
    for min_lr in (0.0, 1e-4)
]


def of_megatron(kind: str, warmup_steps: int, min_lr: float, steps: int = STEPS) -> list[float]:
    """Rates of megatron's own training loop: the optimizer steps, and then the schedule."""
    group: dict[str, Any] = {"params": []}
    schedule = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=0.0,
        max_lr=LR,
        min_lr=min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=steps,
        lr_decay_style=kind,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    rates = []
    for _ in range(steps):
        rates.append(group["lr"])
        schedule.step(increment=1)
    return rates


def of_hugging_face(kind: str, warmup_steps: int, min_lr: float, steps: int = STEPS) -> list[float]:
    """Rates of a plain loop with transformers.get_scheduler."""
    name, options = {
        "constant": ("constant_with_warmup", {}),
        "linear": ("polynomial", {"lr_end": min_lr, "power": 1.0}) if min_lr else ("linear", {}),
        "cosine": ("cosine_with_min_lr", {"min_lr": min_lr}) if min_lr else ("cosine", {}),
    }[kind]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    schedule = transformers.get_scheduler(
        name, optimizer, warmup_steps, steps, scheduler_specific_kwargs=options
    )
    rates = []
    for _ in range(steps):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


@pytest.fixture(scope="module")
def two_samples(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A batch of two samples for each of six steps."""
    rows = [row for step in range(1, STEPS + 1) for row in samples(step, count=2)]
    return write_batch(tmp_path_factory.mktemp("steps"), rows)


@pytest.mark.parametrize("schedule", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_a_run_trains_at_the_rates_of_both_schedules(
    workers: Workers, model: Callable[..., Path], two_samples: str, schedule: dict[str, Any]
) -> None:
    config = configuration(model(), schedule=schedule, optimizer={"lr": LR})
    config["run"]["iterations"] = STEPS
    with workers.group(config) as group:
        rates = [step["lr"] for step in group.train(range(1, STEPS + 1), two_samples)]
    assert rates == of_megatron(**schedule)
    assert rates == pytest.approx(of_hugging_face(**schedule), rel=1e-12)


def test_a_linear_run_of_two_steps_trains_at_the_peak_and_at_half_of_it(
    workers: Workers, model: Callable[..., Path], two_samples: str
) -> None:
    config = configuration(model(), schedule={"kind": "linear"}, optimizer={"lr": LR})
    config["run"]["iterations"] = 2
    with workers.group(config) as group:
        rates = [step["lr"] for step in group.train([1, 2], two_samples)]
    assert rates == [1e-3, 5e-4]
