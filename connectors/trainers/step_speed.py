"""How fast a step is: its share of the GPUs' peak, and the tokens a second of passes without gradients."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from millrace.connectors.trainers.packing import BatchRow
from millrace.core.config import RunConfig
from millrace.core.families.architecture import Architecture
from millrace.core.gpu_peaks import peak_of


def share_of_peak(
    config: RunConfig, shape: Architecture | None, device: str, rows: Sequence[BatchRow], seconds: float
) -> float | None:
    """Share of all ranks' peak that a step's passes with gradients need (MFU); None if the peak or the architecture is not known.

    device: the GPU's name, or cpu. rows: all samples of the step. A listed peak is of bfloat16.
    """
    peak = peak_of(device)
    if peak is None or shape is None or config.dtype != "bfloat16":
        return None
    lengths = [(len(row.tokens), row.response_length) for row in rows]
    needed = shape.step_flops(lengths, frozen=config.trainer.lora is not None)
    return needed / (seconds * peak * config.trainer.world_size)


class ForwardClock:
    """Counts tokens and seconds of passes without gradients, from one `take` to the next.

    On a GPU the device's own clock is read, since the host does not wait for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._tokens, self._seconds = 0, 0.0
        self._events: list[tuple[Any, Any]] = []  # before and after a pass

    @contextlib.contextmanager
    def counting(self, tokens: int) -> Iterator[None]:
        """A context in which passes over so many tokens are launched."""
        started = self._event() if self._gpu else None
        before = time.perf_counter()
        yield
        self._tokens += tokens
        if started is not None:
            self._events.append((started, self._event()))
        else:
            self._seconds += time.perf_counter() - before

    def take(self) -> tuple[int, float]:
        """Tokens and seconds since the last call. Waits for the passes on a GPU."""
        for started, ended in self._events:
            ended.synchronize()
            self._seconds += started.elapsed_time(ended) / 1e3
        taken = self._tokens, self._seconds
        self._tokens, self._seconds = 0, 0.0
        self._events.clear()
        return taken

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
