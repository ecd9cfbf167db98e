"""The learning rate of each optimizer step: linear warm-up, then constant, linear or cosine decay, as megatron-core has it."""

import math
from typing import Literal

Kind = Literal["constant", "linear", "cosine"]


def learning_rate(kind: Kind, done: int, *, peak: float, least: float, warmup: int, decay: int) -> float:
    """The rate of the step after `done` steps. warmup, decay: steps until the peak, and until the least rate, both from the start."""
    if warmup > 0 and done <= warmup:
        return peak * done / warmup
    if kind == "constant":
        return peak
    if done > decay:
        return least
    part = (done - warmup) / (decay - warmup)
    share = 1.0 - part if kind == "linear" else 0.5 * (math.cos(math.pi * part) + 1.0)
    return least + share * (peak - least)
