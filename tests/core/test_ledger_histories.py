"""The ledger over whole runs that hypothesis makes up: cuts, deferrals, filters, and a lag that falls, with a restart at every point."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.accounts.history import GroupOutcome, IterationHistory, Key
from millrace.core.accounts.ledger import Draw, Ledger
from millrace.core.accounts.selection import Candidate, Choice, choose
from millrace.core.accounts.staleness import Ahead
from millrace.core.contracts.sample import Verdict

NEED = 3  # groups of a batch
Sources = dict[str, tuple[float, int]]
sources_ = st.dictionaries(
    st.sampled_from("abc"), st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.integers(2, 12)), min_size=1
)


@dataclass
class Group:
    """A group that an iteration drew, as its samples go through iterations."""

    draw: Draw
    origin: int
    deferrals: int = 0

    @property
    def name(self) -> str:
        return "-".join(map(str, self.draw.key))


@dataclass
class Run:
    """A run in the order in which a driver works: draws are ahead, commits come in order."""

    sources: Sources
    ahead: Ahead
    limit: int  # how many times a group may be deferred
    ledger: Ledger
    drawn: list[list[Group]] = field(default_factory=list)
    deferred: list[Group] = field(default_factory=list)
    history: list[IterationHistory] = field(default_factory=list)
    trained: dict[Key, int] = field(default_factory=dict)  # iteration that trained it
    fate: dict[Key, Verdict] = field(default_factory=dict)

    def draw(self) -> None:
        """Draw the next iteration, which what waits for a commit must not change."""
        index = len(self.drawn)
        assert self.ledger.draw(index, NEED, 2) == self.restarted().draw(index, NEED, 2)
        groups = [Group(draw, index) for draw in self.ledger.draw(index, NEED, 2)]
        for group in groups:
            assert self.fate.get(group.draw.key, "returned") == "returned", "drawn once, or returned before"
            self.fate.pop(group.draw.key, None)
        assert not {group.draw.key for group in groups} & set(self.ledger.in_flight)
        self.ledger.open(index, [group.draw.key for group in groups])
        self.drawn.append(groups)

    def commit(self, data: Any) -> None:
        """Cut the oldest open iteration where `choose` does, whatever finishes first, and commit it."""
        index = len(self.history)
        here = [*self.drawn[index], *self.deferred]
        choice, dropped = self._cut(data, here)
        said: dict[str, Verdict] = dict.fromkeys(dropped, "dropped")
        said |= dict.fromkeys(choice.trained, "kept") | dict.fromkeys(choice.deferred, "deferred")
        said |= dict.fromkeys(choice.returned, "returned")
        assert said.keys() == {group.name for group in here}, "each group has one verdict"
        outcomes = [
            GroupOutcome(
                **{**vars(group.draw), "ordinal": ordinal},
                verdict=said[group.name],
                reason="zero variance" if said[group.name] == "dropped" else None,
                steps=[index + 1] if said[group.name] == "kept" else [],
            )
            for ordinal, group in enumerate(here)
        ]
        for group in here:
            self._settle(group, said[group.name], index)
        self.deferred = [group for group in here if said[group.name] == "deferred"]
        made = IterationHistory.of(index, outcomes, joined=len(here) - len(self.drawn[index]))
        self.history.append(IterationHistory.model_validate_json(made.model_dump_json()))
        self.ledger.apply(self.history[-1])

    def _cut(self, data: Any, here: list[Group]) -> tuple[Choice, list[str]]:
        """Groups finish in any order, kept or not, until there is a cut."""
        order = data.draw(st.permutations(range(len(here))))
        keep = data.draw(st.lists(st.booleans(), min_size=len(here), max_size=len(here)))
        finished: dict[int, int] = {}
        while True:
            candidates = [
                Candidate(group.name, group.deferrals, finished.get(at), keep[at])
                for at, group in enumerate(here)
            ]
            choice = choose(candidates, NEED, self.limit)
            if choice is not None:
                return choice, [here[at].name for at in finished if not keep[at]]
            finished[order[len(finished)]] = len(finished)

    def _settle(self, group: Group, verdict: Verdict, index: int) -> None:
        key = group.draw.key
        assert key not in self.trained, "nothing is trained twice"
        self.fate[key] = verdict
        if verdict == "kept":
            self.trained[key] = index
            oldest = group.origin - self.ahead.at(group.origin)  # version of its first tokens, at the least
            most = max(ahead for _, ahead in self.ahead.spans)
            assert index - max(0, oldest) <= most + self.limit, "no token is older than the bound"
        elif verdict == "deferred":
            group.deferrals += 1
            assert group.deferrals <= self.limit, "it is waited for after that"

    def restarted(self) -> Ledger:
        """The ledger as another process makes it of what is committed and drawn."""
        again = Ledger(5, self.sources, ahead=self.ahead).extend(self.history)
        for index in range(len(self.history), len(self.drawn)):
            again.open(index, [group.draw.key for group in self.drawn[index]])
        return again


@settings(max_examples=30, deadline=None)
@given(
    sources_,
    st.integers(0, 2),
    st.lists(st.integers(1, 9), max_size=2, unique=True),
    st.integers(0, 2),
    st.integers(4, 10),
    st.data(),
)
def test_over_any_history_of_cuts_deferrals_and_a_falling_lag_every_group_is_in_one_place(
    sources: Sources, lag: int, lowered: list[int], limit: int, iterations: int, data: Any
) -> None:
    """Whatever commits early or late: none lost, none trained twice or too old, and another process goes on alike."""
    ahead = Ahead(((0, lag),))
    for number, since in enumerate(sorted(lowered), 1):
        ahead = ahead.since(since, max(0, lag - number))
    run = Run(sources, ahead, limit, Ledger(5, sources, ahead=ahead))
    while len(run.history) < iterations:
        index = len(run.drawn)
        may_draw = index < iterations and index - len(run.history) <= ahead.at(index)
        if may_draw and (len(run.history) == index or data.draw(st.booleans())):
            run.draw()
        else:
            run.commit(data)
        waiting = {group.draw.key for groups in run.drawn[len(run.history) :] for group in groups}
        carried = {group.draw.key for group in run.deferred}
        assert sorted(run.ledger.in_flight) == sorted(waiting | carried)
        returned = {key for key, verdict in run.fate.items() if verdict == "returned"}
        assert set(run.ledger.returned) == returned
        again = run.restarted()
        assert (again.counts, again.returned) == (run.ledger.counts, run.ledger.returned)
    known = [*run.fate, *(key for key in run.ledger.in_flight if key not in run.fate)]
    assert {group.draw.key for groups in run.drawn for group in groups} == set(known)
