"""The place of this process among the trainer's ranks."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RankPlace:
    """Which samples a rank has, and whether it reports what other ranks have too."""

    data_rank: int  # ranks of another number have other samples
    data_size: int
    data_group: Any  # the process group of the ranks with other samples
    context_rank: int = 0  # ranks of another number have other tokens of the same samples
    context_group: Any = None  # the process group of these ranks; None: this rank has all tokens
    reports: bool = True  # of ranks with equal values one reports them
    last_stage: bool = True  # whether it has the model's head
