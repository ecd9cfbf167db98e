"""Seconds from this process's start until the run works, by phase: the cost of a restart."""

import time

import psutil


class Recovery:
    """The phases of one start. Once the run works, later work of the same kind no longer counts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, **seconds: float) -> None:
        """Add seconds to phases, unless the run works already."""
        if "ready" not in self.seconds:
            for phase, value in seconds.items():
                self.seconds[phase] = self.seconds.get(phase, 0.0) + value

    def ready(self) -> None:
        """Note that engines or trainer are ready for a task: after the first time, recovery is over."""
        self.seconds.setdefault("ready", time.time() - psutil.Process().create_time())
