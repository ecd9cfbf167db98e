"""Which groups fill the batch if the first to finish do (pipeline.select=finish). Pure.

More groups generate than the batch needs. Once enough of them are whole and kept, a cut is made: these are trained, those
under way are deferred to the next iteration with the tokens that they have (APRIL, arXiv:2509.18521). A group that was deferred
as often as the staleness bound allows is waited for, so that no long answer starves and no token is trained too old.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A group of an iteration. finished: its place in the order of finishing, None while it is generated."""

    group_id: str
    deferrals: int
    finished: int | None = None
    keep: bool = False


@dataclass(frozen=True)
class Choice:
    """Groups by what becomes of them, each in the order of the candidates. Whole groups that a filter dropped are in none."""

    trained: list[str]
    deferred: list[str]
    returned: list[str]  # groups that may not be deferred: drawn again, without their tokens


def drawn(batch: int, reserve: float, deferred: int, open_before: Sequence[int] = ()) -> int:
    """How many groups an iteration draws, so that `batch` and a share of it in reserve are under way with those deferred to it.

    deferred: by the newest iteration whose cut is known. open_before: what each iteration since then drew; it trains `batch`
    groups, and is taken to defer all others. Without them, iterations ahead would draw for one another's places in turns.
    """
    for groups in open_before:
        deferred = max(0, deferred + groups - batch)
    return max(0, batch + round(reserve * batch) - deferred)


def choose(candidates: Sequence[Candidate], need: int, limit: int) -> Choice | None:
    """The cut, once there is one; None before. limit: how many times a group may be deferred.

    First come groups that may not be deferred again, then the groups that finished first. If all have finished and too few are
    kept, fewer than `need` are trained.
    """
    waited_for = [each for each in candidates if limit and each.deferrals >= limit]
    if any(each.finished is None for each in waited_for):
        return None
    under_way = [each for each in candidates if each.finished is None]
    kept = [
        (each.deferrals < limit, each.finished, each)
        for each in candidates
        if each.finished is not None and each.keep
    ]
    if len(kept) < need and under_way:
        return None
    first = {each.group_id for _, _, each in sorted(kept, key=lambda item: item[:2])[:need]}
    rest = [
        each for each in candidates if each.group_id not in first and (each.finished is None or each.keep)
    ]
    return Choice(
        trained=[each.group_id for each in candidates if each.group_id in first],
        deferred=[each.group_id for each in rest if each.deferrals < limit],
        returned=[each.group_id for each in rest if each.deferrals >= limit],
    )
