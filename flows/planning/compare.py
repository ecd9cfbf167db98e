"""Layouts and pipelines side by side, and what follows for a choice: asynchrony is not always faster."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from millrace.flows.planning.pipeline import Mode, SimulatedLayout, SimulatedRun, replay
from millrace.flows.planning.recorded import Group, Seconds, Speed

SHARED = (1, 2, 4)  # GPUs that engines and trainer share
SPLIT = ((1, 1), (3, 1), (2, 2))  # GPUs of engines, and of the trainer
NOISE = 0.03  # share of an iteration's time; a smaller gain counts as none


@dataclass(frozen=True)
class Machine:
    """The hardware of a recorded run. engine_gpus: GPUs of one engine."""

    engines: int
    engine_gpus: int
    trainer_gpus: int
    colocated: bool
    places: int  # requests that an engine runs at once


@dataclass(frozen=True)
class RecordedRun:
    """Input of a run's replay: its groups in drawing order, its phases, its engines' speed, and its hardware."""

    groups: Sequence[Group]
    batch: int  # groups that an iteration trains
    seconds: Seconds
    speed: Speed
    machine: Machine
    iteration_s: float  # measured

    @property
    def layout(self) -> SimulatedLayout:
        """The layout of the recorded run."""
        return SimulatedLayout(self.machine.engines, self.machine.places, self.speed, self.seconds)


@dataclass(frozen=True)
class ComparedWay:
    """One way to run, and the replay's result for it."""

    gpus: int
    layout: str
    colocated: bool
    mode: Mode
    outcome: SimulatedRun


def calibrated(recorded: RecordedRun, generation_s: float) -> RecordedRun:
    """The recorded run with engine speed scaled so that replayed generation takes the measured seconds.

    The fit gives how speed changes with the number of requests; the scaling adds costs that the fit does not see.
    """
    alone = replace(recorded.layout, seconds=Seconds())
    factor = generation_s / replay(recorded.groups, recorded.batch, alone, Mode()).iteration_s
    return replace(recorded, speed=recorded.speed.scaled(factor))


def ways(recorded: RecordedRun, batch: int, wanted: Mode | None = None) -> Iterator[ComparedWay]:
    """Replay every layout that engines of the recorded size fit, under every pipeline. wanted: one more pipeline.

    The trainer's seconds are in proportion to samples over GPUs. Seconds of handing over GPUs count only for shared GPUs.
    """
    machine, more = recorded.machine, batch / recorded.batch
    train = recorded.seconds.train * more * machine.trainer_gpus
    for engines_on, trains_on, colocated in (
        *((gpus, gpus, True) for gpus in SHARED),
        *((engines, trainer, False) for engines, trainer in SPLIT),
    ):
        if engines_on < machine.engine_gpus:
            continue
        ready = recorded.seconds.ready if colocated == machine.colocated else 0.0
        layout = SimulatedLayout(
            engines=engines_on // machine.engine_gpus,
            places=machine.places,
            speed=recorded.speed,
            seconds=replace(recorded.seconds, train=train / trains_on, ready=ready),
        )
        for mode in _modes(colocated, wanted):
            yield ComparedWay(
                gpus=engines_on if colocated else engines_on + trains_on,
                layout="colocated" if colocated else f"{engines_on} + {trains_on}",
                colocated=colocated,
                mode=mode,
                outcome=replay(recorded.groups, batch, layout, mode),
            )


def _modes(colocated: bool, wanted: Mode | None) -> list[Mode]:
    """Pipelines to compare; engines that share GPUs with the trainer cannot run ahead of it."""
    modes = [Mode()]
    if colocated:
        modes.append(Mode(0, 1, "finish"))
    else:
        modes += [Mode(1, 1), Mode(1, 2, "finish"), Mode(2, 2)]
    if wanted and wanted not in modes and (not colocated or not wanted.ahead):
        modes.append(wanted)
    return modes


def verdicts(rows: Iterable[ComparedWay]) -> list[str]:
    """A sentence for each number of GPUs that can be shared or split: which is faster, and by how much."""
    known, found = list(rows), []
    for gpus in sorted({row.gpus for row in known}):
        of_gpus = [row for row in known if row.gpus == gpus]
        shared = [row for row in of_gpus if row.colocated]
        split = [row for row in of_gpus if not row.colocated and row.mode.ahead]
        if shared and split:
            found.append(_verdict(gpus, _fastest(shared), _fastest(split)))
    return found


def _fastest(rows: list[ComparedWay]) -> ComparedWay:
    """The first row that is as fast as the fastest within noise: the simplest rows come first."""
    least = min(row.outcome.iteration_s for row in rows)
    return next(row for row in rows if row.outcome.iteration_s <= least * (1 + NOISE))


def _verdict(gpus: int, shared: ComparedWay, split: ComparedWay) -> str:
    ratio = split.outcome.iteration_s / shared.outcome.iteration_s
    compared = f"{_named(split)} takes {ratio:.2f} times as long as {_named(shared)}"
    if ratio > 1 + NOISE:
        return f"{gpus} GPUs: asynchrony is slower. {compared}."
    if ratio < 1 - NOISE:
        return f"{gpus} GPUs: asynchrony is faster. {compared}, with tokens {split.outcome.age_mean:.1f} versions old."
    return f"{gpus} GPUs: no difference to speak of. {compared}; tokens are fresher on shared GPUs."


def _named(row: ComparedWay) -> str:
    return f"{row.layout} (ahead {row.mode.ahead}, staleness {row.mode.staleness}, {row.mode.select})"
