"""What tests of an optimizer on the host compare, for both trainers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainer_ranks import RankFailedError, Workers, samples, write_batch


def equal(one: Any, other: Any) -> bool:
    """Whether dictionaries and lists of tensors and values are equal, bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def figures(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of steps that time does not change."""
    timed = ("seconds", "tokens_per_second", "settings")
    return [{name: value for name, value in step.items() if name not in timed} for step in steps]


def check_refused_steps(
    workers: Workers,
    config: Callable[[float], dict[str, Any]],
    held: Callable[[Any], dict[str, Any]],
    batch: str,
    folder: Path,
) -> None:
    """Steps that are refused change nothing, and the next step is as on the device.

    config: by the fraction that the host steps. held: all that a rank's steps change. batch: a template of URLs by step.
    """
    with workers.group(config(1.0)) as group:
        group.step(1, batch.format(1))
        before = group.run(held)
        rows = samples(2)
        rows[0]["advantage"] = 1e38
        url = write_batch(folder / "gradient", rows)
        for _ in range(2):
            with pytest.raises(
                RankFailedError, match=r"(gradient norm|loss) is (nan|-?inf); nothing was applied"
            ):
                group.step(2, url)
        assert equal(group.run(held), before)
        made = figures([group.step(2, batch.format(2))[0]])
    with workers.group(config(0.0)) as group:
        group.step(1, batch.format(1))
        assert figures([group.step(2, batch.format(2))[0]]) == made
