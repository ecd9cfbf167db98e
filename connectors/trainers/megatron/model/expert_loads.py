"""How the rows of a mixture of experts lie on experts and on ranks, in a step's passes. Counts stay on the device until the step's end.

Two figures, of which 1 and 0 are the best: the fullest expert's rows over the mean expert's, of a whole step; and the share of the
experts' time in which a rank waits for the fullest, if time follows rows. The latter is taken pass by pass, since ranks meet in each.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

Metrics = dict[str, tuple[Tensor, Tensor]]


class ExpertLoads:
    """The rows of one layer's experts, on this rank, since they were taken last."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None  # [E]
        self._waits: Tensor | None = None
        self._meetings = 0

    def add(self, routing_map: Tensor) -> None:
        """Count a pass over tokens that are routed so [T, E]."""
        rows = routing_map.sum(0, dtype=torch.float32)
        self._rows = rows if self._rows is None else self._rows + rows

    def add_meeting(self, rows: Tensor) -> None:
        """Count an exchange between ranks, of which each gets so many rows [ranks]."""
        rows = rows.float()
        wait = (rows.max() - rows.mean()) / rows.max().clamp(min=1)
        self._waits = wait if self._waits is None else self._waits + wait
        self._meetings += 1

    def take(self) -> tuple[Tensor, Tensor | None, int] | None:
        """Rows, the sum of waits and the number of meetings; None if no pass was counted."""
        rows, waits, meetings = self._rows, self._waits, self._meetings
        self._rows, self._waits, self._meetings = None, None, 0
        return None if rows is None else (rows, waits, meetings)


def load_metrics(layers: Sequence[ExpertLoads]) -> Metrics:
    """This rank's parts of the means over layers. Every rank that has these layers must call it."""
    taken = [found for each in layers if (found := each.take()) is not None]
    if not taken:
        return {}
    rows = torch.stack([rows for rows, _, _ in taken])
    dist.all_reduce(rows, group=mpu.get_tensor_and_data_parallel_group(with_context_parallel=True))
    fullest = (rows.amax(1) / rows.mean(1)).sum()
    metrics = {"expert_imbalance": (fullest, fullest.new_tensor(float(len(taken))))}
    waits = [waits for _, waits, _ in taken if waits is not None]
    if waits:
        meetings = fullest.new_tensor(float(sum(meetings for _, _, meetings in taken)))
        metrics["expert_wait"] = torch.stack(waits).sum(), meetings
    return metrics
