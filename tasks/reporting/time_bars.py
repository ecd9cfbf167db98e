"""The times of an iteration: a bar for each task, and the shares of its phases. Pure."""

from collections.abc import Iterable, Mapping

Interval = tuple[float, float]
"""Start and end of a task, in seconds of one clock."""

WIDTH = 48  # characters
PHASES = {
    "engines": ("engines",),
    "trainer": ("trainer",),
    "generation": ("rollout", "reward", "filter"),
    "training": ("train_step", "eager_passes"),
    "sync": ("sync_weights",),
    "checkpoint": ("checkpoint",),
    "evaluation": ("evaluate", "evaluate_before", "held_out_loss"),
}
LEVELS = "▁▂▃▄▅▆▇█"
NEWEST = 40  # values of a sparkline


def time_bars(intervals: Mapping[str, Interval]) -> list[str]:
    """A line for each task in the order of their starts: its name, a bar at its place in time, its seconds."""
    if not intervals:
        return []
    first, last = _span(intervals.values())
    scale = WIDTH / max(last - first, 1e-9)
    names = max(map(len, intervals))
    lines = []
    for name, (start, end) in sorted(intervals.items(), key=lambda item: item[1]):
        at = min(int((start - first) * scale), WIDTH - 1)
        long = max(1, min(round((end - first) * scale), WIDTH) - at)
        lines.append(
            f"{name:<{names}} {' ' * at}{'█' * long}{' ' * (WIDTH - at - long)} {end - start:8.2f} s"
        )
    return lines


def time_shares(intervals: Mapping[str, Interval]) -> dict[str, float]:
    """Share of each phase in the time from the first task's start to the last one's end; `other`: time outside of all phases.

    Tasks of a phase that overlap count once. With iterations that run ahead, phases overlap and shares add up to more than 1.
    """
    if not intervals:
        return {}
    first, last = _span(intervals.values())
    total = max(last - first, 1e-9)
    shares = {
        phase: covered([intervals[task] for task in tasks if task in intervals]) / total
        for phase, tasks in PHASES.items()
    }
    known = [intervals[task] for tasks in PHASES.values() for task in tasks if task in intervals]
    return {name: share for name, share in shares.items() if share} | {"other": 1 - covered(known) / total}


def covered(intervals: Iterable[Interval]) -> float:
    """Seconds in which at least one of the intervals lies."""
    seconds, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        seconds += max(0.0, end - max(start, until))
        until = max(until, end)
    return seconds


def sparkline(values: Iterable[float]) -> str:
    """The newest values as a line of blocks, the lowest of them as the lowest block; equal values as the middle one."""
    shown = list(values)[-NEWEST:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    if high == low:
        return LEVELS[len(LEVELS) // 2] * len(shown)
    return "".join(LEVELS[int((value - low) / (high - low) * (len(LEVELS) - 1))] for value in shown)


def _span(intervals: Iterable[Interval]) -> Interval:
    starts, ends = zip(*intervals, strict=True)
    return min(starts), max(ends)
