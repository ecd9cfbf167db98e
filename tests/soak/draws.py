"""`python -m tests.soak.draws`: strike any process of a run, of any form, in any way, at any moment; go on until it is complete.

Each draw follows from the seed and its number: form, process, KILL, TERM, STOP for a while or INT twice, and when. The promises are
those of the kill matrix. Exit 0 if every run held them; what fell is a point for the matrix.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from tests.soak import jobs, promises, rollouts, victims
from tests.soak.forms import FORMS
from tests.soak.harness import Site, usual_seconds
from tests.soak.jobs import FELL, HELD, Try
from tests.soak.points import OWN_VICTIMS, Point
from tests.soak.starts import Started, Starts
from tests.support.flow_runs import Patience, make_workplace

Blow = Literal["KILL", "TERM", "STOP", "INT"]
BLOWS: tuple[Blow, ...] = ("KILL", "TERM", "STOP", "INT")
PARTS = ("driver", "trainer", "engine", "scorer", "prefect", "gcs", "raylet", "ray")
OUTLIVED = ("trainer", "engine", "scorer", *OWN_VICTIMS)  # a run does not end with them
MODES = ("plain", "dynamic", *FORMS)
STARTS = 6  # at most
ENDS_WITHIN_S = 900.0  # a start, on a machine that is not busy
ENDS: dict[
    str, tuple[int, ...]
] = {  # a driver's exit codes; by the signal itself before it has said anything
    "KILL": (-signal.SIGKILL,),
    "TERM": (143, -signal.SIGTERM),
    "INT": (130, -signal.SIGINT),
}
LAST_LINE = 200  # characters of what is said


@dataclass(frozen=True)
class Strike:
    """What is done to one process of a run."""

    part: str
    blow: Blow
    share: float  # of an undisturbed run's time, from the start of the command
    pick: float  # which of the part's processes, from 0 to 1

    def __str__(self) -> str:
        return f"{self.blow} {self.part} at {self.share:.2f}"


@dataclass(frozen=True)
class Draw:
    """One run, and a strike in each of its first starts."""

    form: str
    dynamic: bool
    strikes: tuple[Strike, ...]

    @property
    def point(self) -> Point:
        """What the harness calls such a run; a reward worker that is struck works for some time."""
        slow = any(strike.part == "scorer" for strike in self.strikes)
        return Point("scorer" if slow else "driver", "rollout", "in", self.dynamic, form=self.form)

    def __str__(self) -> str:
        name = self.form or ("dynamic" if self.dynamic else "plain")
        return f"{name}: {', '.join(map(str, self.strikes))}"


def parts_of(form: str) -> tuple[str, ...]:
    """The parts of a run of a form that may be struck. A cluster's head is its user's, and nodes die whole: the matrix kills them."""
    made = FORMS.get(form)
    if made is None:
        return PARTS
    own = tuple(victim for victim in made.own_victims if victim != "node")
    usual = PARTS if not made.two_nodes else ("driver", "trainer", "engine", "scorer", "prefect")
    return (*usual, *own)


def drawn(seed: int, number: int, parts: Sequence[str] = (), modes: Sequence[str] = MODES) -> Draw:
    """A pure function of seed and number, given what is drawn from. parts: only these are struck, where the form has one of them."""
    numbers = random.Random(f"{seed}/{number}")
    mode = numbers.choice(modes)
    dynamic, form = mode == "dynamic", mode if mode in FORMS else ""
    among = [part for part in parts_of(form) if part in parts] or list(parts_of(form))
    strikes = tuple(
        Strike(numbers.choice(among), numbers.choice(BLOWS), numbers.uniform(0.02, 0.95), numbers.random())
        for _ in range(numbers.choice((1, 1, 2, 3)))
    )
    return Draw(form, dynamic, strikes)


class StruckSite(Site):
    """A workplace whose runs are struck."""

    def strike(self, draw: Draw, number: int, stop_s: float) -> list[str]:
        """Make the run of a draw; what it broke, a sentence each. Removes the run if it held every promise."""
        reference = self.reference(draw.point)
        root = self.folder / "struck" / str(number)
        shutil.rmtree(root, ignore_errors=True)
        problems: list[str] = []
        try:
            with Starts(self.place, root, draw.point, self._cluster(draw.point)) as starts:
                self._strikes(draw, starts, reference, stop_s, problems)
        except (AssertionError, OSError, subprocess.SubprocessError, psutil.Error) as error:
            problems.append(f"{error or type(error).__name__}; see {root}")
        if not problems:
            shutil.rmtree(root)
        return [f"{text}; see {root}" if str(root) not in text else text for text in problems]

    def _strikes(
        self, draw: Draw, starts: Starts, reference: Path, stop_s: float, problems: list[str]
    ) -> None:
        usual = usual_seconds(reference)
        seen, before = self.finished_log.stat().st_size, promises.Killed()
        strikes = [*draw.strikes]
        while True:
            assert len(starts.made) < STARTS, f"not complete after {STARTS} starts"
            strike = strikes.pop(0) if strikes else None
            start = starts.begin()
            if strike and self._struck(start, strike, draw.point, usual, stop_s):
                finished = promises.finished(self.finished_log, seen)
                before = promises.Killed(
                    promises.parts(starts.run), rollouts.noted(starts.root / "notes.txt"), finished
                )
            code = _ended(start)
            problems += _broken_by_end(start, code, strike)
            if code == 0:
                break
        before.finished_after = promises.finished(self.finished_log, seen)[len(before.finished_before) :]
        problems += self._broken(reference, starts.run, before, len(starts.made), draw.form)

    def _struck(self, start: Started, strike: Strike, point: Point, usual: float, stop_s: float) -> bool:
        """Wait for the moment and strike; False if the command ended before, or nothing of the part lives."""
        pid, until = 0, time.monotonic() + strike.share * usual
        while not pid or time.monotonic() < until:
            if start.process.poll() is not None:
                return False
            if time.monotonic() >= until:
                found = sorted(self._processes(strike.part, start.process.pid, point))
                pid = found[int(strike.pick * len(found))] if found else 0
            time.sleep(0.05)
        try:
            self._blow(start, strike, pid, stop_s)
        except ProcessLookupError:
            return False
        return True

    def _blow(self, start: Started, strike: Strike, pid: int, stop_s: float) -> None:
        if strike.blow == "STOP":
            os.kill(pid, signal.SIGSTOP)
            ends = time.monotonic() + stop_s
            while time.monotonic() < ends and start.process.poll() is None:
                time.sleep(0.1)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        elif strike.blow == "INT":
            send = (
                os.killpg if strike.part == "driver" else os.kill
            )  # a terminal sends it to all of the command's
            send(pid, signal.SIGINT)
            time.sleep(0.3)
            with contextlib.suppress(ProcessLookupError):
                send(pid, signal.SIGINT)
        else:
            os.kill(pid, signal.SIGKILL if strike.blow == "KILL" else signal.SIGTERM)

    def _processes(self, part: str, driver: int, point: Point) -> list[int]:
        """The living processes of a part."""
        try:
            if part not in ("gcs", "raylet", "ray"):
                return victims.processes(part, driver, self.home, self._nodes(point))
            heads = victims.processes("ray", driver, self.home)
            return [pid for pid in heads if _ray_part(pid) == part]
        except (FileNotFoundError, json.JSONDecodeError, psutil.Error):
            return []  # it starts, or has ended


def _ray_part(pid: int) -> str:
    command = " ".join(psutil.Process(pid).cmdline()[:1])
    return next((part for part in ("gcs", "raylet") if part in Path(command).name), "ray")


def _ended(start: Started) -> int:
    patience = Patience(ENDS_WITHIN_S)
    while start.process.poll() is None:
        assert patience.left, f"{start.log} does not end"
        time.sleep(0.1)
    return start.process.returncode


def _broken_by_end(start: Started, code: int, strike: Strike | None) -> list[str]:
    """What a start broke by how it ended and what it said."""
    part, blow = (strike.part, strike.blow) if strike else ("", "")
    own = ENDS.get(blow, ()) if part == "driver" else ()
    problems = [f"a traceback in {start.log}"] if "Traceback" in start.said else []
    if code not in (0, 2, *own):
        problems.append(f"{start.log} ended with {code} after {strike or 'no strike'}")
    if code and (part in OUTLIVED or not part):
        last = start.said.strip().rpartition("\n")[2][:LAST_LINE]
        problems.append(f"{start.log} ended with {code} after {strike or 'no strike'}: {last}")
    return problems


@contextlib.contextmanager
def struck_site(folder: Path, arguments: Namespace) -> Iterator[Callable[[int], Try]]:
    """A workplace, and what makes the draw of a number there."""
    site = StruckSite(make_workplace(folder), shared=folder.parent)

    def make(number: int) -> Try:
        draw = drawn(arguments.seed, number, arguments.parts, arguments.modes)
        started = time.monotonic()
        problems = site.strike(draw, number, arguments.stop_s)
        seconds = time.monotonic() - started
        return Try(number, str(draw), FELL if problems else HELD, "; ".join(problems), seconds)

    try:
        yield make
    finally:
        site.close()


def main() -> None:
    """Parse, strike, print, and exit 1 if a run fell."""
    parser = jobs.parser_of("tests.soak.draws", __doc__)
    parser.add_argument("--stop-s", type=float, default=60.0, help="how long a process is stopped")
    parser.add_argument(
        "--parts", nargs="*", default=(), choices=(*PARTS, *OWN_VICTIMS), help="strike only these"
    )
    parser.add_argument("--modes", nargs="*", default=MODES, choices=MODES, help="only runs of these")
    sys.exit(jobs.spread(struck_site, parser.parse_args()))


if __name__ == "__main__":
    main()
