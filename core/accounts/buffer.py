"""The buffer: trained groups that may be trained once more, and which of them an iteration takes. Pure.

It is computed from the histories of committed iterations, like the ledger, and stores nothing: a restarted process holds
the same groups. A reused group is not drawn again, so the ledger, which counts drawn groups, does not see the reuse.

Invariants
- Only a group that an earlier, committed iteration generated and trained is held.
- No group is trained more than `max_uses` times, the iteration that generated it included.
- No group is held whose samples are more than `max_age` weight versions older than the weights to be trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from millrace.core.accounts.curriculum import source_and_level
from millrace.core.accounts.history import IterationHistory
from millrace.core.config.rollout.section import Buffer as Settings
from millrace.core.contracts.ids import iteration_number
from millrace.core.errors import ConfigError
from millrace.core.hooks.loading import call_function
from millrace.core.hooks.protocols import BufferedGroup

GroupKey = tuple[int, int]  # iteration that generated a group, and the group's ordinal in it


@dataclass(frozen=True)
class _Held:
    """A group with the weight version that generated it, from which its age follows."""

    group: BufferedGroup
    version: int


class HeldGroups:
    """The groups held after the applied iterations."""

    def __init__(self, max_age: int, max_uses: int, versions: int) -> None:
        """max_age: weight versions. max_uses: iterations that train a group, the first included. versions: per iteration."""
        self.max_age, self.max_uses, self._versions = max_age, max_uses, versions
        self.version = 0  # version of the weights that the next iteration trains
        self._held: dict[GroupKey, _Held] = {}

    def extend(self, histories: Iterable[IterationHistory]) -> HeldGroups:
        """Apply the histories, which are in order; returns this buffer.

        The iterations that `reach` names suffice: groups of the ones before are too old.
        """
        for history in histories:
            self.apply(history)
        return self

    def apply(self, history: IterationHistory) -> None:
        """Apply a committed iteration: count its uses, and hold the groups that it generated and trained."""
        for place in history.reused_places():
            held = self._held.get(place)
            if held is not None:
                self._held[place] = replace(held, group=replace(held.group, uses=held.group.uses + 1))
        made_by = history.iteration * self._versions
        # the history's last step does not give the version: later passes, and steps of reused groups alone, make versions
        # too
        self.version = made_by + self._versions
        for group in history.groups():
            if group.verdict == "kept":
                name = source_and_level(group.source)[0]
                found = BufferedGroup(
                    iteration=history.iteration,
                    ordinal=group.ordinal,
                    source=name,
                    age=0,
                    uses=1,
                    reward=group.score,
                    reward_std=group.std,
                )
                self._held[history.iteration, group.ordinal] = _Held(found, made_by)
        self._held = {place: held for place, held in self._held.items() if self._may_be_used(held)}

    def groups(self) -> list[BufferedGroup]:
        """The groups that the next iteration may reuse, oldest first."""
        return [
            replace(held.group, age=self.version - held.version) for _, held in sorted(self._held.items())
        ]

    def problems(self, history: IterationHistory) -> list[str]:
        """Reused groups of `history`, the next iteration, that the buffer does not hold. Call it before `apply`."""
        places = history.reused_places()
        found = [
            f"it reuses group {ordinal} of iteration {iteration_number(iteration)}, which was not held: not trained there, "
            f"trained {self.max_uses} times, or older than {self.max_age} weight versions"
            for iteration, ordinal in sorted(set(places))
            if (iteration, ordinal) not in self._held
        ]
        if len(set(places)) < len(places):
            found.append("it reuses a group twice")
        return found

    def _may_be_used(self, held: _Held) -> bool:
        return held.group.uses < self.max_uses and self.version - held.version <= self.max_age


def reach(iteration: int, max_age: int) -> int:
    """The first iteration whose groups `iteration` may reuse; each iteration makes at least one weight version."""
    return max(0, iteration - max_age)


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
