"""Drivers beside drivers: one stopped and continued, two runs of one name, two containers, clocks that are off.

Each scene has two or more drivers at once, where the kills of victims.py have one. Owns what each driver must do and say; what
the runs must hold afterwards is in promises.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil

from tests.soak.points import CLOCKS, Point
from tests.soak.promises import Killed, finished, parts
from tests.soak.starts import Started, Starts
from tests.support.flow_runs import Workplace, wait_until

LEASE_S = "6"  # a driver that nobody can know to be dead is watched for so long, here
CLOCK = Path(__file__).parent / "clock"
OFF_S = 600
TAKEN = 2  # exit code of a driver whose run is another's
UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


class ImpossibleError(Exception):
    """This machine cannot set the scene; the text says why."""


@dataclass
class Scene:
    """What went on between the drivers of a point."""

    place: Workplace
    root: Path
    point: Point
    problems: list[str]  # what went wrong is added
    ended: list[tuple[Path, Killed, int]] = field(default_factory=list)  # run, what it held, starts

    def starts(self, folder: str = "") -> Starts:
        """The starts of a run under a storage root of this point."""
        return Starts(self.place, self.root / folder, self.point)

    def expect(self, start: Started, code: int, *said: str) -> None:
        """Wait for a start's end, which must be with this exit code and these words."""
        found, text = start.ended(), " ".join(start.said.split())
        if found != code:
            self.problems.append(f"{start.log} ended with {found}, not {code}")
        self.problems += [f"{start.log} does not say {words!r}" for words in said if words not in text]

    def refuse(self, start: Started, living: Started) -> None:
        """Wait for a start's end, which must leave the run to the living driver."""
        self.expect(start, TAKEN, "driven by process")
        if living.process.poll() is not None:
            self.problems.append("the living driver ended")

    def untouched(self, start: Started) -> None:
        """Check that nobody ended the actors of a driver."""
        lost = [words for words in ("rebuilding", "starting it again") if words in start.said]
        self.problems += [f"{start.log} says {words!r}: its actors were ended" for words in lost]


def play(scene: Scene) -> None:
    """Set the scene of its point. Raises ImpossibleError where this machine cannot."""
    _SCENES[scene.point.victim.partition("-")[0]](scene)


def _stopped(scene: Scene) -> None:
    """A driver is stopped, replaced, and continued after its successor has ended."""
    with scene.starts() as starts:
        stale = starts.begin(scene.point.when, **_log(starts))
        stale.reach()
        _stop(stale, starts.run)
        seen = _seen(starts)
        successor = starts.begin(**_log(starts))
        while successor.ended() == TAKEN and "is amid a write" in successor.said:  # as its remedy says
            os.kill(stale.process.pid, signal.SIGCONT)
            time.sleep(0.2)
            _stop(stale, starts.run)
            successor = starts.begin(**_log(starts))
        scene.expect(successor, 0, "no sign of life of process")
        scene.untouched(successor)
        stale.go_on()
        os.kill(stale.process.pid, signal.SIGCONT)
        scene.expect(stale, TAKEN, f"taken over by process {successor.process.pid} on")
        _end(scene, starts, seen)


def _namesake(scene: Scene) -> None:
    """Two runs of one name work at once under two roots; one is killed and goes on while the other lives."""
    with scene.starts("one") as one, scene.starts("two") as two:
        killed, other = [starts.begin(scene.point.when, **_log(starts)) for starts in (one, two)]
        killed.reach()
        other.reach()
        killed.kill()
        seen = [_seen(starts) for starts in (one, two)]
        again = one.begin(**_log(one))
        wait_until(lambda: _attempts(one.run) == [1, 2] or again.process.poll() is not None)
        other.go_on()
        for start in (again, other):
            scene.expect(start, 0)
            scene.untouched(start)
        for starts, state in zip((one, two), seen, strict=True):
            _end(scene, starts, state)
        for name in ("id", "mlflow_run_id"):
            values = {json.loads((starts.run / "run.json").read_text())[name] for starts in (one, two)}
            if len(values) != 2:
                scene.problems.append(f"the runs share their {name}")


def _namespace(scene: Scene) -> None:
    """A driver in a container of its own (PID namespace, MILLRACE_HOME) and one outside, under one host's name."""
    unshare = _unshare()
    home = Path(tempfile.mkdtemp(prefix="millrace-container-"))
    try:
        with scene.starts() as starts:
            inside = starts.begin(
                scene.point.when, before=unshare, **_log(starts), MILLRACE_HOME=str(home / "home")
            )
            inside.reach()
            scene.refuse(starts.begin(**_log(starts)), inside)
            (driver,) = psutil.Process(inside.process.pid).children()
            driver.kill()  # and with it every process of the namespace, whose first it is
            inside.ended()
            seen = _seen(starts)
            scene.expect(starts.begin(**_log(starts)), 0, "no sign of life of process")
            _end(scene, starts, seen)
    finally:
        shutil.rmtree(home)


def _clock(scene: Scene) -> None:
    """The holder's clock, or that of who comes after it, is ten minutes ahead or behind."""
    off_s, holder_is_off = CLOCKS[scene.point.victim]
    off = {
        "MILLRACE_SOAK_CLOCK_S": str(off_s),
        "PYTHONPATH": os.pathsep.join([str(CLOCK), scene.place.environment.get("PYTHONPATH", "")]),
    }
    first, later = (off, {}) if holder_is_off else ({}, off)
    with scene.starts() as starts:
        holder = starts.begin(scene.point.when, **_log(starts), **first)
        holder.reach()
        scene.refuse(starts.begin(**_log(starts), **later), holder)
        holder.kill()
        _as_if_elsewhere(starts.run)
        seen = _seen(starts)
        scene.expect(starts.begin(**_log(starts), **later), 0, "no sign of life of process")
        _end(scene, starts, seen)
        attempts = json.loads((starts.run / "run.json").read_text())["attempts"]
        started = datetime.fromisoformat(attempts[0 if holder_is_off else -1]["started"])
        is_off = (started - datetime.now(UTC)).total_seconds()
        if abs(is_off - off_s) > OFF_S / 2:
            scene.problems.append(f"the clock was off by {is_off:.0f} s, not {off_s}: nothing was tried")


_SCENES: dict[str, Callable[[Scene], None]] = {
    "stopped": _stopped,
    "namesake": _namesake,
    "namespace": _namespace,
    "clock": _clock,
}


def _unshare() -> tuple[str, ...]:
    """The command that gives another one a PID namespace and a /proc of its own."""
    why = ""
    for command in (UNSHARE, (*UNSHARE, "--map-root-user")):
        try:
            subprocess.run([*command, "true"], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            why = str(getattr(error, "stderr", "") or error).strip()
        else:
            return command
    raise ImpossibleError(f"no PID namespaces here: {why}")


def _stop(driver: Started, run: Path) -> None:
    """Stop a driver where nobody can know that it is only stopped."""
    os.kill(driver.process.pid, signal.SIGSTOP)
    _as_if_elsewhere(run)


def _as_if_elsewhere(run: Path) -> None:
    """The holder of the lease, which renews it no more, was on another host: no process table tells of it."""
    claim = max((run / "lease").glob("*.json"))
    record = json.loads(claim.read_text())
    record["process"]["boot"] = "another"
    claim.write_text(json.dumps(record))


def _log(starts: Starts) -> dict[str, str]:
    """Each run's engines log what they finish to a file of its own."""
    return {"MILLRACE_FINISHED_LOG": str(_finished_log(starts)), "MILLRACE_LEASE_S": LEASE_S}


def _finished_log(starts: Starts) -> Path:
    return starts.root / "finished.log"


def _seen(starts: Starts) -> Killed:
    return Killed(parts=parts(starts.run), finished_before=finished(_finished_log(starts)))


def _end(scene: Scene, starts: Starts, seen: Killed) -> None:
    seen.finished_after = finished(_finished_log(starts))[len(seen.finished_before) :]
    scene.ended.append((starts.run, seen, len(starts.made)))


def _attempts(run: Path) -> list[int]:
    return [attempt["number"] for attempt in json.loads((run / "run.json").read_text())["attempts"]]
