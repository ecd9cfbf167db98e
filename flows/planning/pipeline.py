"""Replays a run's iterations under a layout and a pipeline, event by event; waits are as in flows/driver.

An iteration's stages have the order of `IterationSlot`. Effects of timing (which groups are cut, which weights make a token)
follow from the replayed times.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from millrace.core.accounts.selection import Candidate, choose, drawn
from millrace.flows.planning.engines import SimulatedEngine, SimulatedRequest
from millrace.flows.planning.recorded import Group, Seconds, Speed

WARM_UP, LEAST = 4, 12  # iterations left out of the figures, and fewest iterations in them


@dataclass(frozen=True)
class SimulatedLayout:
    """GPUs and their speed. seconds: of the phases on them. places: requests that an engine runs at once."""

    engines: int
    places: int
    speed: Speed
    seconds: Seconds


@dataclass(frozen=True)
class Mode:
    """The pipeline section.

    drain: weights wait for running requests (on_update=finish). recompute: running requests' tokens
    are read again under new weights (on_update=resend and retract).
    """

    ahead: int = 0
    staleness: int = 0
    select: Literal["draw", "finish"] = "draw"
    reserve: float = 0.25
    drain: bool = False
    recompute: bool = True


@dataclass(frozen=True)
class SimulatedRun:
    """Figures of the replay after the warm-up. Shares lie between 0 and 1; ages are in published weight versions."""

    iteration_s: float
    trainer_idle: float
    engines_idle: float
    age_mean: float
    age_max: int


@dataclass(eq=False)
class _Group:
    group: Group
    number: int  # number among all groups
    index: int  # number of its iteration
    deferrals: int = 0
    finished: int | None = None
    answers: list[SimulatedRequest] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return all(answer.whole for answer in self.answers)


@dataclass(eq=False)
class _Iteration:
    groups: list[_Group] = field(default_factory=list)
    deferred: list[_Group] = field(default_factory=list)  # deferred to the next iteration
    begun: int = 0  # groups that it drew, without replacements of dropped ones
    finished: int = 0  # finished groups
    open: bool = False
    drawn: bool = False
    cut: bool = False
    generated: bool = False
    training: bool = False
    trained: bool = False
    syncing: bool = False
    left_trainer: bool = False
    left_engines: bool = False
    publishing: bool = False
    done_at: float = math.inf
    busy: tuple[float, float] = (0.0, 0.0)  # busy seconds of trainer and engines when it was done
    ages: dict[int, float] = field(default_factory=dict)  # tokens by age


def replay(groups: Sequence[Group], batch: int, layout: SimulatedLayout, mode: Mode) -> SimulatedRun:
    """Replay iterations that train `batch` groups each, drawn from `groups` again and again.

    Raises ValueError if no group is kept: no batch would ever be filled.
    """
    if not any(group.kept for group in groups):
        raise ValueError("no group is kept")
    made = _Replay(groups, batch, layout, mode)
    made.run()
    return made.outcome()


class _Replay:
    def __init__(self, groups: Sequence[Group], batch: int, layout: SimulatedLayout, mode: Mode) -> None:
        self._draws = itertools.cycle(groups)
        self._batch, self._layout, self._mode = batch, layout, mode
        self._limit = mode.staleness - mode.ahead if mode.select == "finish" else 0
        self._engines = [SimulatedEngine(layout.speed, layout.places) for _ in range(layout.engines)]
        self._now, self._order = 0.0, itertools.count()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        # whole rounds over the groups, so that a long answer counts as often as it was drawn
        turn = sum(group.kept for group in groups) / batch
        self._count = WARM_UP + max(1, round(turn * math.ceil(LEAST / turn)))
        # iterations after the last counted one are open when it ends, as in a longer run
        self._iterations = [_Iteration() for _ in range(self._count + mode.ahead + 2)]
        self._trainer_s = 0.0
        self._first = 0  # first iteration that is not done
        self._groups: list[_Group] = []

    def run(self) -> None:
        """Run until the wanted number of iterations is done."""
        self._advance()
        while self._iterations[self._count - 1].done_at == math.inf:
            until = self._timers[0][0] - self._now if self._timers else math.inf
            step = min([until, *(engine.next_s() for engine in self._engines)])
            assert step < math.inf, "something waits for what never comes"
            for engine in self._engines:
                engine.pass_time(step)
            self._now += step
            whole = [answer for engine in self._engines for answer in engine.take_whole()]
            while self._timers and self._timers[0][0] <= self._now:
                heapq.heappop(self._timers)[2]()
            if whole:
                self._finish_groups(whole)
            self._advance()

    def outcome(self) -> SimulatedRun:
        """Figures from the warm-up on."""
        first, last = self._iterations[WARM_UP - 1], self._iterations[self._count - 1]
        seconds = last.done_at - first.done_at
        trainer, engines = (last.busy[n] - first.busy[n] for n in (0, 1))
        ages: dict[int, float] = {}
        for iteration in self._iterations[WARM_UP : self._count]:
            for age, tokens in iteration.ages.items():
                ages[age] = ages.get(age, 0.0) + tokens
        return SimulatedRun(
            iteration_s=seconds / (self._count - WARM_UP),
            trainer_idle=1 - trainer / seconds,
            engines_idle=1 - engines / seconds / len(self._engines),
            age_mean=sum(age * tokens for age, tokens in ages.items()) / sum(ages.values()),
            age_max=max(age for age, tokens in ages.items() if tokens > 0.5),
        )

    def _later(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self._now + seconds, next(self._order), then))

    def _advance(self) -> None:
        """Start every stage that can start."""
        while self._first < len(self._iterations) and self._iterations[self._first].done_at < math.inf:
            self._first += 1
        for index in range(self._first, min(self._first + self._mode.ahead + 2, len(self._iterations))):
            iteration = self._iterations[index]
            before = self._iterations[index - 1] if index else None
            if not iteration.open and self._may_open(index):
                iteration.open = True
                self._later(
                    self._layout.seconds.draw + self._layout.seconds.ready, partial(self._generate, index)
                )
            if iteration.generated and not iteration.training and (before is None or before.left_trainer):
                iteration.training = True
                self._trainer_s += self._layout.seconds.train
                self._later(self._layout.seconds.train, partial(self._trained, index))
            if iteration.trained and not iteration.syncing and self._may_sync(index):
                self._sync(index)
            if (
                iteration.left_engines
                and not iteration.publishing
                and (before is None or before.done_at < math.inf)
            ):
                iteration.publishing = True
                self._later(self._layout.seconds.rest, partial(self._done, index))

    def _may_open(self, index: int) -> bool:
        needed = index - self._mode.ahead - 1
        done = needed < 0 or self._iterations[needed].done_at < math.inf
        return done and (index == 0 or self._iterations[index - 1].drawn)

    def _may_sync(self, index: int) -> bool:
        if index and not self._iterations[index - 1].left_engines:
            return False
        later = self._iterations[index + 1 : index + self._mode.ahead + 1] if self._mode.drain else []
        return all(iteration.generated for iteration in later)

    def _generate(self, index: int) -> None:
        """Release the groups of an iteration, and take in the groups deferred to it."""
        iteration, mode = self._iterations[index], self._mode
        begun = self._batch
        if mode.select == "finish":
            known = max(-1, index - mode.ahead - 1)
            deferred = len(self._iterations[known].deferred) if known >= 0 else 0
            open_before = [each.begun for each in self._iterations[known + 1 : index]]
            begun = drawn(self._batch, mode.reserve, deferred, open_before)
        iteration.drawn, iteration.begun = True, begun
        for _ in range(begun):
            self._release(index)
        if index and self._iterations[index - 1].generated:
            self._join(index)
            self._choose(index)

    def _release(self, index: int) -> None:
        group = _Group(next(self._draws), len(self._groups), index)
        group.answers = [SimulatedRequest(group.number, tokens) for tokens in group.group.lengths if tokens]
        self._groups.append(group)
        self._iterations[index].groups.append(group)
        self._put(group)

    def _put(self, group: _Group) -> None:
        for answer in group.answers:
            if not answer.whole:
                engine = min(self._engines, key=lambda each: each.load)
                engine.put(answer, (group.index, next(self._order)))

    def _sync(self, index: int) -> None:
        seconds = self._layout.seconds
        self._iterations[index].syncing = True
        for engine in self._engines:
            engine.pause()
        self._trainer_s += seconds.sync + seconds.checkpoint
        self._later(seconds.sync, partial(self._served, index))

    def _served(self, index: int) -> None:
        for engine in self._engines:
            engine.serve(index + 1, self._mode.recompute)
        self._later(self._layout.seconds.checkpoint, partial(self._left_trainer, index))

    def _left_trainer(self, index: int) -> None:
        self._iterations[index].left_trainer = True
        for engine in self._engines:
            engine.pause()
        self._later(self._layout.seconds.evaluate, partial(self._left_engines, index))

    def _left_engines(self, index: int) -> None:
        self._iterations[index].left_engines = True
        for engine in self._engines:
            engine.go_on()

    def _trained(self, index: int) -> None:
        self._iterations[index].trained = True

    def _done(self, index: int) -> None:
        iteration = self._iterations[index]
        iteration.done_at = self._now
        iteration.busy = self._trainer_s, sum(engine.busy_s for engine in self._engines)

    def _join(self, index: int) -> None:
        """Take in the groups that the previous iteration deferred."""
        iteration = self._iterations[index]
        for group in self._iterations[index - 1].deferred:
            group.index, group.finished = index, None
            iteration.groups.append(group)
            self._put(group)
            if group.whole:
                self._whole(group)

    def _finish_groups(self, whole: Sequence[SimulatedRequest]) -> None:
        """Note the groups whose last answer came."""
        done = [self._groups[number] for number in dict.fromkeys(answer.group for answer in whole)]
        found = [group for group in done if group.whole]
        for group in found:
            self._whole(group)
        for index in sorted({group.index for group in found}):
            self._choose(index)

    def _whole(self, group: _Group) -> None:
        """Note a finished group; if a filter drops it, release another one."""
        iteration = self._iterations[group.index]
        group.finished, iteration.finished = iteration.finished, iteration.finished + 1
        if not group.group.kept:
            self._release(group.index)

    def _choose(self, index: int) -> None:
        """Fix the batch once it can be filled."""
        iteration = self._iterations[index]
        if iteration.cut:
            return
        if self._mode.select == "draw":
            if any(group.finished is None for group in iteration.groups):
                return
            self._cut(index, [group for group in iteration.groups if group.group.kept], [], [])
            return
        if index and not self._iterations[index - 1].generated:
            # the next iteration takes in the deferred groups
            return
        named = {str(group.number): group for group in iteration.groups}
        candidates = [
            Candidate(name, group.deferrals, group.finished, group.finished is not None and group.group.kept)
            for name, group in named.items()
        ]
        choice = choose(candidates, self._batch, self._limit)
        if choice:
            lists = (choice.trained, choice.deferred, choice.returned)
            self._cut(index, *([named[name] for name in names] for names in lists))

    def _cut(self, index: int, trained: list[_Group], deferred: list[_Group], returned: list[_Group]) -> None:
        iteration = self._iterations[index]
        iteration.cut = True
        stopped = {group.number for group in (*deferred, *returned)}
        for engine in self._engines:
            engine.cut(stopped)
        for group in deferred:
            group.deferrals += 1
        iteration.deferred = deferred
        for group in trained:
            for answer in group.answers:
                for version, tokens in answer.versions.items():
                    iteration.ages[index - version] = iteration.ages.get(index - version, 0.0) + tokens
        self._later(self._layout.seconds.score, partial(self._generated, index))

    def _generated(self, index: int) -> None:
        self._iterations[index].generated = True
        if index + 1 < len(self._iterations) and self._iterations[index + 1].drawn:
            self._join(index + 1)
            self._choose(index + 1)
