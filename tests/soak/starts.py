"""The starts of one run's command, each a process with a log, and those of a run of the same name under another root.

A start may wait at a place of the run until it is let go on. Owns how the command is called; knows nothing of kills.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.soak import forms, rollouts
from tests.soak.points import Point
from tests.soak.two_nodes import TwoNodes
from tests.support.flow_runs import PATIENCE_S, Workplace, wait_until

KILLED = "killed"  # the name of killed runs; the uninterrupted one is `a`, as run.yaml calls it
DYNAMIC = ("filter.drop_zero_variance=true", "filter.refill_factor=1.0")


@dataclass
class Started:
    """One start of the command."""

    process: subprocess.Popen[str]
    log: Path
    held: Path  # exists while the driver waits at its place

    @property
    def said(self) -> str:
        """What it has printed so far."""
        return self.log.read_text()

    def reach(self) -> None:
        """Return when the driver waits at its place."""
        wait_until(lambda: self.held.exists() or self.process.poll() is not None)
        assert self.process.poll() is None, "the run ended before it reached the point"

    def go_on(self) -> None:
        """Let the driver leave its place."""
        self.held.unlink(missing_ok=True)

    def ended(self) -> int:
        """The exit code, once it has ended."""
        return self.process.wait(timeout=PATIENCE_S)

    def kill(self) -> None:
        """`kill -9` the driver, if it lives."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Starts:
    """All starts of the run `killed` under one storage root; on leaving, what still runs is killed."""

    def __init__(self, place: Workplace, root: Path, point: Point, cluster: TwoNodes | None = None) -> None:
        """cluster: that the run joins; None where it has a head of its own."""
        self.place, self.root, self.point = place, root, point
        self._cluster = cluster
        self.run = root / KILLED
        self.made: list[Started] = []
        root.mkdir(parents=True)

    def __enter__(self) -> Starts:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for start in self.made:
            start.kill()

    def begin(self, hold: str = "", *, before: Sequence[str] = (), **environment: str) -> Started:
        """Start the command. hold: `before`, `in` or `after` the point's task it waits; empty for nowhere.

        before: a command that starts it. environment: variables, beside the workplace's.
        """
        number = len(self.made) + 1
        log, held = self.root / f"start-{number}.log", self.root / f"held-{number}"
        variables = {**self.place.environment, rollouts.NOTES: str(self.root / "notes.txt"), **environment}
        if hold:
            variables["MILLRACE_KILL_POINT"] = f"{self.point.iteration}/{self.point.task}/{hold}"
            variables["MILLRACE_KILL_POINT_FILE"] = str(held)
        command = [*before, *self.place.command, "train", "run.yaml", f"storage.root={self.root}"]
        command += [f"run.name={KILLED}", *overrides(self.point)]
        if self._cluster:
            variables |= self._cluster.environment
            command += self._cluster.overrides
        if self.point.victim == "scorer" and not any(text.startswith("reward.function=") for text in command):
            command += ["reward.function=slow_reward:contains_slowly"]
        with log.open("w") as out:
            process = subprocess.Popen(
                command,
                env=variables,
                cwd=self.place.folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self.made.append(Started(process, log, held))
        return self.made[-1]


def overrides(point: Point) -> list[str]:
    """What the command line adds to run.yaml."""
    return [*(DYNAMIC if point.dynamic else ()), *(forms.overrides(point.form) if point.form else ())]
