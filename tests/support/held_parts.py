"""Plain classes that the tests turn into actors."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from millrace.core.errors import TrainerError
from millrace.core.waits import beat


class Counter:
    """Counts, waits, fails and dies when told to."""

    def __init__(self, config: Mapping[str, Any], index: int, count: int) -> None:
        self.start = config["start"]
        self.index = index
        self.count = count
        self.value = self.start
        self.busy = False

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "busy": self.busy, "index": self.index}

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    def work(self, seconds: float) -> int:
        self.busy = True
        time.sleep(seconds)
        self.busy = False
        return os.getpid()

    def work_on(self, seconds: float) -> int:
        """The first one gets something done all the time, the others wait for it."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.02)
            if self.index == 0:
                beat()
        return self.index

    def refuse(self) -> None:
        raise TrainerError("trainer.parallel.tensor = 3: does not divide 4 heads")

    def refuse_alone(self, seconds: float) -> None:
        if self.index == 0:
            self.refuse()
        time.sleep(seconds)

    def break_down(self) -> None:
        raise ZeroDivisionError("by chance")

    def die(self) -> None:
        os._exit(1)


class SlowToStart(Counter):
    """A counter that takes its time to come up."""

    def __init__(self, config: Mapping[str, Any], index: int, count: int) -> None:
        time.sleep(config["takes_s"])
        super().__init__(config, index, count)
