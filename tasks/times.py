"""When each task of an iteration worked in this process."""

from dataclasses import dataclass, field

LEAST_WAIT_S = 0.1  # shorter waits count as part of the task


@dataclass
class Times:
    """Times of an iteration, on the clock of time.perf_counter. Seconds."""

    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)  # start and end of each task
    seconds: dict[str, float] = field(default_factory=dict)  # work outside of tasks, such as early passes
    trainer_s: float = 0.0  # until ranks were ready to train
    handed_s: float | None = None  # in which shared GPUs were handed to the trainer early

    def worked(self, engines_s: float) -> dict[str, tuple[float, float]]:
        """Start and end of each task, and of waits at their starts as `trainer` and `engines`.

        Rollout, reward and filter work from the first request on: before it, engines start or take their memory. `train_step`
        works once there are ranks. engines_s: how long the rollout waited for engines.
        """
        held_up: list[tuple[str, tuple[str, ...], float]] = [
            ("trainer", ("train_step",), self.trainer_s),
            ("engines", ("rollout", "reward", "filter"), engines_s),
        ]
        found = dict(self.intervals)
        for part, tasks, seconds in held_up:
            if seconds < LEAST_WAIT_S or tasks[0] not in found:
                continue
            started, ended = found[tasks[0]]
            found[part] = started, min(started + seconds, ended)
            for task in (task for task in tasks if task in found):
                start, end = found[task]
                found[task] = min(max(start, found[part][1]), end), end
        return found
