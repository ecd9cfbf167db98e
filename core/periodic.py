"""What a run does after only some iterations, and which checkpoints may be removed then. Pure."""

from collections.abc import Mapping, Sequence

from millrace.core.config.run_config import RunConfig


def due(done: int, every: int) -> bool:
    """Whether an action with this interval is due after `done` iterations."""
    return done % every == 0


def checkpoints_to_drop(
    complete: Sequence[int],
    keep_last: int,
    keep_every: int | None,
    scores: Mapping[int, float] | None = None,
) -> list[int]:
    """Complete checkpoints, by iterations trained, that no rule keeps.

    Kept are the newest `keep_last`, each that `keep_every` divides, and the best of `scores` (the earliest of equals). Recovery
    needs only the newest complete checkpoint, which always stays.
    """
    assert keep_last >= 1
    ordered = sorted(complete)
    kept = set(ordered[-keep_last:]) | {
        number for number in ordered if keep_every and number % keep_every == 0
    }
    scored = {number: score for number, score in (scores or {}).items() if number in ordered}
    if scored:
        kept.add(min(scored, key=lambda number: (-scored[number], number)))
    return [number for number in ordered if number not in kept]


def evaluates_after(config: RunConfig, done: int) -> bool:
    """Whether the weights of so many iterations are evaluated before the run goes on, or ends."""
    e = config.evaluation
    is_due = due(done, e.every) and not config.evaluates_in_background
    return bool(e.sets) and (is_due or done == config.run.iterations)


def saves_after(config: RunConfig, done: int) -> bool:
    """Whether a checkpoint is due after so many iterations."""
    return due(done, config.checkpoint.every) or done == config.run.iterations


def exports_after(config: RunConfig, done: int) -> bool:
    """Whether Hugging Face files are due after so many iterations."""
    every, last = config.checkpoint.export_every, done == config.run.iterations
    return bool(every and due(done, every)) or (last and config.checkpoint.export_last)
