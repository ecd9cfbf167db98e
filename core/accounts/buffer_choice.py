"""Which groups of the buffer an iteration takes. Pure; the same groups give the same choice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from millrace.core.config.rollout.section import Buffer as Settings
from millrace.core.errors import ConfigError
from millrace.core.hooks.loading import call_function
from millrace.core.hooks.protocols import BufferedGroup

BANDS = 4  # number of bands of mean rewards
FIELD = "rollout.buffer.buffer_filter"


def chosen(groups: Sequence[BufferedGroup], count: int, settings: Settings) -> list[BufferedGroup]:
    """Up to `count` of the groups held, in the order in which they are taken.

    Raises ConfigError when the user's filter cannot be loaded, raises, or returns anything but some of the groups.
    """
    ordered = in_order(groups, settings)
    if settings.buffer_filter is not None:
        ordered = _filtered(ordered, settings)
    return ordered[:count]


def in_order(groups: Sequence[BufferedGroup], settings: Settings) -> list[BufferedGroup]:
    """All groups in the order of `choose`; ties by age, then in drawing order."""
    oldest_first = sorted(groups, key=lambda group: (group.iteration, group.ordinal))
    if settings.choose == "prioritised":
        return sorted(oldest_first, key=lambda group: -(group.reward_std or 0.0))
    if settings.choose == "stratified":
        return _in_turn(oldest_first, _strata(oldest_first, settings))
    return oldest_first


def _in_turn(groups: Sequence[BufferedGroup], strata: Sequence[str]) -> list[BufferedGroup]:
    """One group of each stratum, then another of each, and so on: any first part is spread evenly over the strata."""
    members: dict[str, list[BufferedGroup]] = {}
    for group, stratum in zip(groups, strata, strict=True):
        members.setdefault(stratum, []).append(group)
    rounds = zip_longest(*(members[stratum] for stratum in sorted(members)))
    return [group for each in rounds for group in each if group is not None]


def _strata(groups: Sequence[BufferedGroup], settings: Settings) -> list[str]:
    """The stratum of each group: its source, or the number of its band between the lowest and the highest mean reward."""
    if settings.strata == "source":
        return [group.source for group in groups]
    rewards = [group.reward or 0.0 for group in groups]
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    width = (high - low) / BANDS
    return [str(min(BANDS - 1, int((reward - low) / width)) if width > 0 else 0) for reward in rewards]


def _filtered(groups: list[BufferedGroup], settings: Settings) -> list[BufferedGroup]:
    function = settings.buffer_filter
    assert function is not None
    answer = call_function(function, FIELD, tuple(groups))
    found = list(answer) if isinstance(answer, Sequence) else None
    places = {(group.iteration, group.ordinal) for group in groups}
    if found is None or any(
        not isinstance(group, BufferedGroup) or (group.iteration, group.ordinal) not in places
        for group in found
    ):
        raise ConfigError(
            f"it returned {'a ' + type(answer).__name__ if found is None else 'something that is none of the groups'}",
            where=f"{FIELD}.function = {function.function}",
            remedy="return a list of some of the groups that it got",
        )
    if len({(group.iteration, group.ordinal) for group in found}) < len(found):
        raise ConfigError(
            "it returned a group twice",
            where=f"{FIELD}.function = {function.function}",
            remedy="return each group at most once",
        )
    return found


def spread(fresh: int, reused: int) -> list[int]:
    """The order of a batch of `fresh` groups (numbers from 0) and `reused` ones (the numbers after them).

    Reused groups come at equal distances, so that each optimizer step of an iteration gets its share of them.
    """
    total = fresh + reused
    late = {(number + 1) * total // reused - 1: fresh + number for number in range(reused)}
    rest = iter(range(fresh))
    return [late[at] if at in late else next(rest) for at in range(total)]
