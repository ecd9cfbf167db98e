"""One kill: start the run, wait at the kill point, kill, start again until the run is complete, check what it left.

The uninterrupted run and the killed runs share model, data and configuration. Each has its own storage root, and killed
runs have another name than the uninterrupted one: no number follows from what a run is called.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak import promises, victims
from tests.soak.points import ENDS_THE_RUN, Point
from tests.support.flow_runs import PATIENCE_S, Workplace, make_workplace, wait_until

# the victim "scorer" is at work for some time: the same reward, slowly
SLOW_REWARD = """
import time

from millrace.core.rewards.text import contains


def contains_slowly(sample):
    time.sleep(0.02)
    return contains(sample)
"""
DYNAMIC = ("filter.drop_zero_variance=true", "filter.refill_factor=1.0")
__all__ = ["Outcome", "Site", "make_workplace"]
STARTS = 4  # at most, for one kill
KILLED = "killed"  # the name of killed runs; the uninterrupted one is `a`, as run.yaml calls it
ENDS_WITHIN_S = 10.0  # after Ctrl-C, on an idle machine


@dataclass
class Outcome:
    """The outcome of one kill."""

    point: Point
    problems: list[str] = field(default_factory=list)
    killed: int = 0  # processes
    landed: str = ""  # where the kill came: before, in or after the task, by its record
    survived: bool = False  # whether the run went on without being started again
    ended_s: float = 0.0  # from Ctrl-C to the end of the command
    starts: int = 1
    regenerated: int = 0
    seconds: float = 0.0


class Site:
    """A workplace whose engines log what they finish, with one uninterrupted run of each kind."""

    def __init__(self, place: Workplace, whole: Path | None = None) -> None:
        self.place = place
        self.folder = folder = place.folder
        self.home = Path(self.place.environment["MILLRACE_HOME"])
        self.finished_log = folder / "finished.log"
        self.finished_log.touch()
        (folder / "slow_reward.py").write_text(SLOW_REWARD)
        self.place.environment["MILLRACE_FINISHED_LOG"] = str(self.finished_log)
        self._references = {False: whole} if whole else {}  # by whether sampling is dynamic

    def reference(self, dynamic: bool) -> Path:
        """The folder of the uninterrupted run."""
        if dynamic not in self._references:
            root = self.folder / f"whole-{'dynamic' if dynamic else 'sync'}"
            self.place.train(root, *_overrides(dynamic))
            self._references[dynamic] = root / "a"
        return self._references[dynamic]

    def close(self) -> None:
        """End the servers."""
        self.place.call("server", "stop")

    def kill(self, point: Point) -> Outcome:
        """Run, kill at the point, go on, and check every promise. Removes the run if every promise held."""
        reference, started = self.reference(point.dynamic), time.perf_counter()
        root = self.folder / "killed" / str(point)
        shutil.rmtree(root, ignore_errors=True)
        outcome, seen = Outcome(point), self.finished_log.stat().st_size
        process, log = self._start(root, point, outcome.starts)
        try:
            state = self._kill_at(point, process, root / KILLED, outcome, seen)
            self._complete(root, point, process, outcome)
            state.finished_after = self._finished(seen)[len(state.finished_before) :]
            outcome.regenerated = state.regenerated
            outcome.problems += promises.broken(reference, root / KILLED, state, outcome.starts)
        except (AssertionError, OSError) as error:
            outcome.problems.append(f"{error or type(error).__name__}; see {log.parent}")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        outcome.seconds = time.perf_counter() - started
        if not outcome.problems:
            shutil.rmtree(root)
        return outcome

    def _start(self, root: Path, point: Point, number: int) -> tuple[subprocess.Popen[str], Path]:
        root.mkdir(parents=True, exist_ok=True)
        log, environment = root / f"start-{number}.log", dict(self.place.environment)
        if number == 1:
            environment["MILLRACE_KILL_POINT"] = f"{point.iteration}/{point.task}/{_wait_at(point)}"
            environment["MILLRACE_KILL_POINT_FILE"] = str(root / "held")
        command = [sys.executable, "-m", "millrace.flows.cli", "train", "run.yaml", f"storage.root={root}"]
        command += [f"run.name={KILLED}"]
        if point.victim == "scorer":
            command += ["reward.function=slow_reward:contains_slowly"]
        with log.open("w") as out:
            process = subprocess.Popen(
                [*command, *_overrides(point.dynamic)],
                env=environment,
                cwd=self.folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        return process, log

    def _kill_at(
        self, point: Point, process: subprocess.Popen[str], run: Path, outcome: Outcome, seen: int
    ) -> promises.Killed:
        held = run.parent / "held"
        wait_until(lambda: held.exists() or process.poll() is not None)
        assert process.poll() is None, "the run ended before it reached the point"
        if _wait_at(point) != point.when:  # the victim dies while the task runs
            usual = self._usual_seconds(point)
            held.unlink()
            time.sleep(point.share * usual)
        if point.victim == "terminal":
            self._interrupt(process, run.parent / "start-1.log", outcome)
        else:
            outcome.killed = len(victims.kill(point.victim, process.pid, self.home))
            assert outcome.killed, f"no {point.victim} to kill"
        outcome.landed = point.when if _wait_at(point) == point.when else _landed(run, point)
        if point.victim == "driver":
            process.wait()
        state = promises.Killed(parts=promises.parts(run), finished_before=self._finished(seen))
        held.unlink(missing_ok=True)
        return state

    def _interrupt(self, process: subprocess.Popen[str], log: Path, outcome: Outcome) -> None:
        """Ctrl-C, and what it must lead to: an early end, that is told in two lines, of the run's live parts too."""
        started = time.perf_counter()
        outcome.killed = victims.interrupt(process.pid)
        code = process.wait(timeout=PATIENCE_S)
        outcome.ended_s = time.perf_counter() - started
        limit = ENDS_WITHIN_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        outcome.problems += promises.broken_by_ctrl_c(code, log.read_text(), outcome.ended_s, limit)
        # Ray has been told to kill the actors; their processes take a moment to go
        wait_until(lambda: not self._live_parts(process.pid), limit)

    def _live_parts(self, driver: int) -> list[int]:
        """Processes of trainer ranks and engines."""
        return [pid for part in ("trainer", "engine") for pid in victims.processes(part, driver, self.home)]

    def _complete(self, root: Path, point: Point, process: subprocess.Popen[str], outcome: Outcome) -> None:
        code = process.wait(timeout=PATIENCE_S)
        outcome.survived = code == 0
        if not outcome.survived and point.victim in ("trainer", "engine", "scorer"):
            outcome.problems.append(f"the run ended with {code} because its {point.victim} died")
        elif not outcome.survived and point.victim not in ENDS_THE_RUN and code != 2:
            outcome.problems.append(f"the run ended with {code}, which is none of its errors")
        while code != 0:
            assert outcome.starts < STARTS, f"not complete after {STARTS} starts"
            outcome.starts += 1
            again, _ = self._start(root, point, outcome.starts)
            try:
                code = again.wait(timeout=PATIENCE_S)
            finally:
                if again.poll() is None:
                    again.kill()
                    again.wait()
            if code:
                outcome.problems.append(f"start {outcome.starts} ended with {code}")

    def _finished(self, seen: int) -> list[str]:
        """Samples that engines finished since the log was `seen` bytes long."""
        with self.finished_log.open() as file:
            file.seek(seen)
            rids = file.read().split()
        return [rid for rid in rids if not rid.startswith(("eval-", "health-"))]

    def _usual_seconds(self, point: Point) -> float:
        """How long the task took in the uninterrupted run."""
        folder = self.reference(point.dynamic) / "iterations" / f"{point.iteration:06d}"
        metrics = json.loads((folder / "manifest.json").read_text())["tasks"]["metrics"]
        return float(metrics.get(f"time/{point.task}_s", 0.2))


def _wait_at(point: Point) -> str:
    """Where the driver waits: at the point itself. A victim other than the driver dies in a task that goes on."""
    return "before" if point.victim != "driver" and point.when == "in" else point.when


def _landed(run: Path, point: Point) -> str:
    record = run / "iterations" / f"{point.iteration:06d}" / "results" / f"{point.task}.json"
    return "after" if os.path.exists(record) else "in"


def _overrides(dynamic: bool) -> tuple[str, ...]:
    return DYNAMIC if dynamic else ()
