"""Calls that all ranks make together: one rank's failure is raised on every rank, so that no rank waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from millrace.core.errors import MillraceError, StorageError

Result = TypeVar("Result")


def on_every_rank(call: Callable[[], Result]) -> list[Result]:
    """The results of every rank's call, in rank order."""
    result: Result | None = None
    failure: MillraceError | None = None
    try:
        result = call()
    except (MillraceError, OSError) as error:
        failure = error if isinstance(error, MillraceError) else StorageError(str(error))
    outcomes: list[tuple[Result, MillraceError | None] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (result, failure))
    results = []
    for outcome in outcomes:
        assert outcome is not None
        if outcome[1] is not None:
            raise outcome[1]
        results.append(outcome[0])
    return results


def on_rank_0(call: Callable[[], Result]) -> Result:
    """The result of rank 0's call, on every rank."""
    results = on_every_rank(lambda: call() if dist.get_rank() == 0 else None)
    return cast(Result, results[0])
