"""One kill: start the run, wait at the kill point, kill, start again until the run is complete, check what it left.

The uninterrupted run and the killed runs share model, data and configuration. Each has its own storage root, and killed
runs have another name than the uninterrupted one: no number follows from what a run is called.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from millrace.connectors.host.local_files import locked
from tests.soak import forms, neighbours, promises, rollouts, victims
from tests.soak.points import ENDS_THE_RUN, NEIGHBOURS, OWN_VICTIMS, Point
from tests.soak.starts import Started, Starts, overrides
from tests.soak.two_nodes import TwoNodes
from tests.support.flow_runs import PATIENCE_S, Patience, Workplace, make_workplace, wait_until
from tests.support.reward_server import serve_rewards

# the victim "scorer" is at work for some time: the same reward, slowly
SLOW_REWARD = """
import time

from millrace.core.rewards.text import contains


def contains_slowly(sample):
    time.sleep(0.02)
    return contains(sample)
"""
__all__ = ["Outcome", "Site", "make_workplace"]
STARTS = 4  # at most, for one kill
ENDS_WITHIN_S = 10.0  # after Ctrl-C, on an idle machine
BEGINS_WITHIN_S = 60.0  # a victim: of a run that is ahead the first rollouts may wait for engines that start


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
    skipped: str = ""  # why this machine cannot try it


class Site:
    """A workplace whose engines log what they finish, with one uninterrupted run of each kind."""

    def __init__(self, place: Workplace, whole: Path | None = None, shared: Path | None = None) -> None:
        """shared: where uninterrupted runs lie that several sites compare with."""
        self._shared = shared or place.folder
        self.place = place
        self.folder = folder = place.folder
        self.home = Path(self.place.environment["MILLRACE_HOME"])
        self.finished_log = folder / "finished.log"
        self.finished_log.touch()
        (folder / "slow_reward.py").write_text(SLOW_REWARD)
        for name, text in forms.MODULES.items():
            (folder / name).write_text(text)
        (folder / forms.TAILED).write_text(forms.tailed_rows())
        self.place.environment[rollouts.NOTES] = str(folder / "notes.txt")
        self.place.environment["MILLRACE_FINISHED_LOG"] = str(self.finished_log)
        self._servers = ExitStack()
        self._two_nodes: TwoNodes | None = None
        # by whether sampling is dynamic, and the form of the run
        self._references = {(False, ""): whole} if whole else {}

    def reference(self, point: Point) -> Path:
        """The folder of the uninterrupted run."""
        kind = (point.dynamic, point.form)
        if kind not in self._references:
            root = self._shared / f"whole-{'dynamic' if point.dynamic else 'sync'}-{point.form}"
            form = forms.FORMS.get(point.form)
            if form and form.asks_server and forms.REWARD_SERVER not in self.place.environment:
                server = self._servers.enter_context(serve_rewards())
                self.place.environment[forms.REWARD_SERVER] = server.url
            cluster = self._cluster(point)
            joining = cluster.overrides if cluster else []
            with locked(root.with_suffix(".lock")):
                if not (root / "a").exists():
                    self.place.train(
                        root, *overrides(point), *joining, **(cluster.environment if cluster else {})
                    )
            assert not form or form.at_work(root / "a"), f"a kill of the form {point.form} would try nothing"
            self._references[kind] = root / "a"
        return self._references[kind]

    def _cluster(self, point: Point) -> TwoNodes | None:
        """The cluster for a run of the point's form, new; None where a run has a head of its own."""
        if not point.on_two_nodes:
            return None
        if self._two_nodes is None:
            self._two_nodes = TwoNodes(self.folder)
            self._servers.callback(self._two_nodes.close)
        self._two_nodes.renew()
        return self._two_nodes

    def close(self) -> None:
        """End the servers and the cluster."""
        self.leave()
        self.place.call("server", "stop")

    def leave(self) -> None:
        """End the reward server and the cluster; the workplace is used by others too."""
        self._servers.close()

    def kill(self, point: Point) -> Outcome:
        """Run, kill at the point, go on, and check every promise. Removes the run if every promise held."""
        reference, started = self.reference(point), time.perf_counter()
        root = self.folder / "killed" / str(point)
        shutil.rmtree(root, ignore_errors=True)
        outcome = Outcome(point)
        try:
            if point.victim in NEIGHBOURS:
                self._play(root, point, outcome, reference)
            else:
                with Starts(self.place, root, point, self._cluster(point)) as starts:
                    self._kill(starts, outcome, reference)
        except neighbours.ImpossibleError as error:
            outcome.skipped = str(error)
        except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
            outcome.problems.append(f"{error or type(error).__name__}; see {root}")
        outcome.seconds = time.perf_counter() - started
        if not outcome.problems:
            shutil.rmtree(root, ignore_errors=True)
        return outcome

    def _play(self, root: Path, point: Point, outcome: Outcome, reference: Path) -> None:
        """Set a scene of several drivers, and check every promise of each run in it."""
        scene = neighbours.Scene(self.place, root, point, outcome.problems)
        neighbours.play(scene)
        outcome.landed = point.when
        for run, state, starts in scene.ended:
            outcome.starts = max(outcome.starts, starts)
            outcome.regenerated += state.regenerated
            outcome.problems += [
                f"{run}: {text}" for text in self._broken(reference, run, state, starts, point.form)
            ]

    def _kill(self, starts: Starts, outcome: Outcome, reference: Path) -> None:
        """Kill, go on until the run is complete, and check every promise."""
        seen = self.finished_log.stat().st_size
        first = starts.begin(_wait_at(outcome.point))
        state = self._kill_at(first, starts.run, outcome, seen)
        self._complete(starts, first, outcome)
        state.finished_after = promises.finished(self.finished_log, seen)[len(state.finished_before) :]
        outcome.regenerated = state.regenerated
        outcome.problems += self._broken(reference, starts.run, state, outcome.starts, outcome.point.form)

    def _broken(
        self, reference: Path, run: Path, state: promises.Killed, starts: int, form: str
    ) -> list[str]:
        point_form = forms.FORMS.get(form)
        commands = promises.faulted_by_commands(self.place, run)
        if point_form is not None and not point_form.repeats:
            return (
                promises.broken_of_its_own(run, state, starts) + promises.replayed(self.place, run) + commands
            )
        return promises.broken(reference, run, state, starts) + commands

    def _kill_at(self, first: Started, run: Path, outcome: Outcome, seen: int) -> promises.Killed:
        first.reach()
        point, process = outcome.point, first.process
        if _wait_at(point) != point.when:  # the victim dies while the task runs
            usual = self._usual_seconds(point)
            first.go_on()
            time.sleep(point.share * usual)
        if point.victim == "terminal":
            self._interrupt(process, first.log, outcome)
        else:
            outcome.killed = self._kill_part(point, process.pid)
            assert outcome.killed, f"no {point.victim} to kill"
        outcome.landed = point.when if _wait_at(point) == point.when else _landed(run, point)
        if point.victim == "driver":
            process.wait()
        state = promises.Killed(
            parts=promises.parts(run),
            finished_before=promises.finished(self.finished_log, seen),
            noted=rollouts.noted(run.parent / "notes.txt"),
        )
        first.go_on()
        return state

    def _kill_part(self, point: Point, driver: int) -> int:
        """`kill -9` the victim, once it runs; how many processes, or nodes, died."""
        if point.victim == "node":
            assert self._two_nodes is not None
            return self._two_nodes.kill_node()
        patience = Patience(BEGINS_WITHIN_S)
        while not (killed := victims.kill(point.victim, driver, self.home, self._nodes(point))):
            if not patience.left:
                break
            time.sleep(0.1)
        return len(killed)

    def _nodes(self, point: Point) -> Sequence[int]:
        """What holds the nodes of a cluster that outlives the run."""
        return self._two_nodes.pids if point.on_two_nodes and self._two_nodes else ()

    def _interrupt(self, process: subprocess.Popen[str], log: Path, outcome: Outcome) -> None:
        """Ctrl-C, and what it must lead to: an early end, that is told in a sentence, of the run's live parts too."""
        before, started = len(log.read_text()), time.perf_counter()
        outcome.killed = victims.interrupt(process.pid)
        nodes = self._nodes(outcome.point)
        code = process.wait(timeout=PATIENCE_S)
        outcome.ended_s = time.perf_counter() - started
        limit = ENDS_WITHIN_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        outcome.problems += promises.broken_by_ctrl_c(code, log.read_text()[before:], outcome.ended_s, limit)
        # Ray has been told to kill the actors; their processes take a moment to go
        wait_until(lambda: not self._live_parts(process.pid, nodes), limit)

    def _live_parts(self, driver: int, nodes: Sequence[int]) -> list[int]:
        """Processes of trainer ranks and engines."""
        parts = ("trainer", "engine")
        return [pid for part in parts for pid in victims.processes(part, driver, self.home, nodes)]

    def _complete(self, starts: Starts, first: Started, outcome: Outcome) -> None:
        point, code = outcome.point, first.ended()
        outcome.survived = code == 0
        if not outcome.survived and point.victim in ("trainer", "engine", "scorer", *OWN_VICTIMS):
            outcome.problems.append(f"the run ended with {code} because its {point.victim} died")
        elif not outcome.survived and point.victim not in ENDS_THE_RUN and code != 2:
            outcome.problems.append(f"the run ended with {code}, which is none of its errors")
        while code != 0:
            assert outcome.starts < STARTS, f"not complete after {STARTS} starts"
            code = starts.begin().ended()
            outcome.starts += 1
            if code:
                outcome.problems.append(f"start {outcome.starts} ended with {code}")

    def _usual_seconds(self, point: Point) -> float:
        """How long the task took in the uninterrupted run."""
        folder = self.reference(point) / "iterations" / f"{point.iteration:06d}"
        metrics = json.loads((folder / "manifest.json").read_text())["tasks"]["metrics"]
        return float(metrics.get(f"time/{point.task}_s", 0.2))


def usual_seconds(run: Path) -> float:
    """How long an uninterrupted run took, from its first start to its end."""
    record = json.loads((run / "run.json").read_text())
    started, completed = record["attempts"][0]["started"], record["completed"]
    return (datetime.fromisoformat(completed) - datetime.fromisoformat(started)).total_seconds()


def _wait_at(point: Point) -> str:
    """Where the driver waits: at the point itself. A victim other than the driver dies in a task that goes on."""
    return "before" if point.victim != "driver" and point.when == "in" else point.when


def _landed(run: Path, point: Point) -> str:
    record = run / "iterations" / f"{point.iteration:06d}" / "results" / f"{point.task}.json"
    return "after" if os.path.exists(record) else "in"
