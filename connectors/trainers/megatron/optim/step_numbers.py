"""Applies one optimizer step with recorded numbers (rate, betas, ...) instead of the current configuration's.

A step that is repeated uses the numbers of its first time, even if the schedule has changed.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from millrace.core.replay import StepNumbers


def parts_of(optimizer: Any) -> list[Any]:
    """The chained optimizers, one per kind of parameters, or the optimizer itself if megatron chains none."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


# entries of a parameter group that are replaced, if the group has them
GROUP_NUMBERS = ("lr", "betas", "eps", "weight_decay")


@contextlib.contextmanager
def step_numbers(optimizer: Any, made_with: StepNumbers | None) -> Iterator[None]:
    """A context in which the optimizer steps with these numbers; afterwards the previous ones are restored."""
    if not made_with:
        yield
        return
    parts = parts_of(optimizer)
    groups = [group for part in parts for group in part.param_groups]
    before = [{name: group[name] for name in GROUP_NUMBERS if name in group} for group in groups]
    clips = [part.config.clip_grad for part in parts]
    scheduled = groups[0]["lr"] if groups else 0.0
    try:
        for group in groups:
            numbers = _numbers(group, made_with, scheduled)
            group.update({name: value for name, value in numbers.items() if name in group})
        for part in parts:
            part.config.clip_grad = made_with.get("clip_grad", part.config.clip_grad)
        yield
    finally:
        for group, own in zip(groups, before, strict=True):
            group.update(own)
        for part, clip in zip(parts, clips, strict=True):
            part.config.clip_grad = clip


def _numbers(group: dict[str, Any], made_with: StepNumbers, scheduled: float) -> dict[str, Any]:
    """A group's numbers. A group with another rate than the `scheduled` one keeps its ratio to it."""
    numbers: dict[str, Any] = {}
    if "lr" in made_with:
        own = group["lr"] != scheduled and scheduled
        numbers["lr"] = made_with["lr"] * group["lr"] / scheduled if own else made_with["lr"]
    if "betas" in made_with:
        numbers["betas"] = tuple(made_with["betas"])
    if "eps" in made_with:
        numbers["eps"] = made_with["eps"]
    if "weight_decay" in made_with:
        numbers["weight_decay"] = made_with["weight_decay"] * group.get("wd_mult", 1.0)
    return numbers
