"""Accounts over histories of cuts and lags: each closes, what one iteration defers the next one is carried, and nothing is lost between."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.accounts.account import Account, Where
from millrace.core.accounts.token_counts import account_of
from tests.core.account.test_account import Row, spans_of, table

SAMPLES = 2  # of a group


@dataclass
class Sample:
    """One answer, as it goes through iterations."""

    name: str
    versions: list[int] = field(default_factory=list)  # of its tokens
    status: str = "aborted"

    @property
    def whole(self) -> bool:
        return self.status != "aborted"

    def row(self) -> Row:
        mask, spans = [1] * len(self.versions), spans_of(self.versions)
        made = {"loss_mask": mask, "policy_versions": spans, "samples": None}
        return {"sample_id": self.name, "status": self.status, **made}

    def go_on(self, rng: random.Random, index: int, lag: int, finish: bool) -> list[int]:
        """Generate further under weights that are at most `lag` versions older; returns the versions of its new tokens."""
        if self.whole:
            return []
        if rng.random() < 0.15:
            self.versions, self.status = [], "failed"  # its row has no tokens
            return []
        oldest = max([index - lag, *self.versions[-1:]])
        new = sorted(rng.randint(oldest, index) for _ in range(rng.randint(1, 4)))
        self.versions = self.versions + new
        self.status = "completed" if finish or rng.random() < 0.5 else "aborted"
        return new


@dataclass
class Group:
    """A group, and how many times it was deferred."""

    samples: list[Sample]
    deferrals: int = 0
    verdict: str = ""


@dataclass
class Iteration:
    """The rows that an iteration stores, and what its account must say."""

    rollouts: list[Row] = field(default_factory=list)
    verdicts: list[Row] = field(default_factory=list)
    batch: list[Row] = field(default_factory=list)
    cut: list[Row] = field(default_factory=list)
    carried: list[Row] = field(default_factory=list)
    generated: Counter[int] = field(default_factory=Counter)
    tokens: Counter[Where] = field(default_factory=Counter)

    def account(self) -> Account:
        cut, carried = table("rollouts", self.cut), table("rollouts", self.carried)
        tables = (table(kind, getattr(self, kind)) for kind in ("rollouts", "verdicts", "batch"))
        rollouts, verdicts, batch = tables
        return account_of(rollouts, NO_TURNS, verdicts, batch, cut=cut, carried=carried)

    def open_account(self, rollouts: list[Row], cut: bool) -> Account:
        """While it has no verdicts: of some of its rows, before or after the cut."""
        rows = table("rollouts", rollouts)
        return account_of(
            rows,
            NO_TURNS,
            cut=table("rollouts", self.cut) if cut else None,
            carried=table("rollouts", self.carried),
        )


NO_TURNS = table("turns", [])


def judged(rng: random.Random, group: Group, limit: int) -> str:
    """What a cut makes of it: only groups that may still be deferred are under way at a cut."""
    if group.deferrals < limit:
        whole = all(sample.whole for sample in group.samples)
        return rng.choice(("kept", "dropped", "deferred")) if whole else "deferred"
    return rng.choice(("kept", "dropped", "returned"))


def settle(iteration: Iteration, rng: random.Random, group: Group, before: dict[str, list[int]]) -> None:
    """Add the rows of a group that has its verdict. before: versions of the tokens that its samples were carried with."""
    cause = rng.choice(("zero_variance", "too_long"))
    for sample in group.samples:
        verdict, dropped_by = group.verdict, cause if group.verdict == "dropped" else None
        if sample.status == "failed" and verdict == "kept":
            verdict, dropped_by = "dropped", "not_generated"
        judgement = {"verdict": verdict, "dropped_by": dropped_by, "reused_from": None}
        iteration.verdicts.append({"sample_id": sample.name, **judgement})
        # a kill after the cut may have left a whole sample that was carried here in no part
        left = verdict == "deferred" and sample.whole and sample.name in before and rng.random() < 0.3
        left = left and before[sample.name] == sample.versions
        if sample.whole and not left:
            iteration.rollouts.append(sample.row())
        if verdict == "deferred":
            iteration.cut.append(sample.row())
        if sample.status == "failed":
            # what it was carried with is gone, also where its group goes on
            gone = ("dropped", "not_generated") if verdict == "deferred" else (verdict, dropped_by or "")
            lost = before.get(sample.name, [])
            iteration.tokens.update((*gone, version) for version in lost)  # type: ignore[misc]
        elif verdict == "kept":
            mask = [rng.randint(0, 1) for _ in sample.versions]
            iteration.batch.append({**sample.row(), "loss_mask": mask, "reused_from": None})
            iteration.tokens.update(
                ("trained" if kept else "masked", "", version)
                for kept, version in zip(mask, sample.versions, strict=True)
            )
        elif sample.whole or verdict == "deferred":  # one that is returned amid its answer is nowhere stored
            fate: Any = verdict
            iteration.tokens.update((fate, dropped_by or "", version) for version in sample.versions)


def history_of(rng: random.Random, iterations: int, lag: int, limit: int) -> list[Iteration]:
    """The rows of iterations one after the other, each with groups of its own and those that were deferred to it."""
    made: list[Iteration] = []
    deferred: list[Group] = []
    for index in range(iterations):
        iteration = Iteration(carried=made[-1].cut if made else [])
        fresh = [
            Group([Sample(f"i{index}g{number}-{at:04d}") for at in range(SAMPLES)])
            for number in range(rng.randint(1, 3))
        ]
        before = {sample.name: sample.versions for group in deferred for sample in group.samples}
        for group in (here := [*deferred, *fresh]):
            waited_for = bool(limit) and group.deferrals >= limit
            for sample in group.samples:
                new = sample.go_on(rng, index, lag, finish=waited_for)
                if limit or sample.whole:
                    iteration.generated.update(new)
        deferred = []
        for group in here:
            group.verdict = judged(rng, group, limit)
            if group.verdict != "deferred":
                whole = [sample for sample in group.samples if sample.whole]
                group.verdict = group.verdict if len(whole) == SAMPLES else "returned"
            settle(iteration, rng, group, before)
            if group.verdict == "deferred":
                deferred.append(replace(group, deferrals=group.deferrals + 1))
        made.append(iteration)
    return made


histories = st.tuples(
    st.randoms(use_true_random=False), st.integers(1, 6), st.integers(0, 2), st.integers(0, 3)
)


@given(histories)
def test_over_any_history_each_account_closes_and_what_is_deferred_is_carried(
    drawn: tuple[random.Random, int, int, int],
) -> None:
    history = history_of(*drawn)
    whole, last = Account(), Counter[int]()
    for iteration in history:
        account = iteration.account()
        assert account.problems() == []
        assert +account.tokens == iteration.tokens
        assert +account.generated == iteration.generated
        assert +account.carried == last, "what was deferred is what is carried, to the token"
        last = Counter()
        for (fate, _, version), count in account.tokens.items():
            last[version] += count if fate == "deferred" else 0
        last = +last
        whole.add(account)
    ended = sum(whole.tokens_of(fate) for fate in ("trained", "masked", "dropped", "returned"))
    assert sum(whole.generated.values()) == ended + sum(last.values()), "each token ends once"
    names = {row["sample_id"] for iteration in history for row in iteration.verdicts}
    ends = [row for iteration in history for row in iteration.verdicts if row["verdict"] != "deferred"]
    under_way = {row["sample_id"] for row in history[-1].cut}
    assert sorted([*under_way, *(row["sample_id"] for row in ends)]) == sorted(names), "each sample ends once"


@given(histories, st.randoms(use_true_random=False), st.booleans())
def test_while_an_iteration_is_open_all_that_it_has_is_in_flight(
    drawn: tuple[random.Random, int, int, int], rng: random.Random, cut: bool
) -> None:
    """Before the cut some samples are stored, after it all."""
    for iteration in history_of(*drawn):
        rows = [row for row in iteration.rollouts if cut or rng.random() < 0.5]
        account = iteration.open_account(rows, cut)
        assert account.problems() == []
        of = {row["sample_id"]: len(row["loss_mask"]) for row in iteration.carried}
        of |= {row["sample_id"]: len(row["loss_mask"]) for row in rows if row["status"] != "failed"}
        of |= {row["sample_id"]: len(row["loss_mask"]) for row in iteration.cut if cut and row["loss_mask"]}
        assert account.tokens_of("in flight") == sum(of.values())


def deferred_twice() -> list[Iteration]:
    """A history in which samples that are cut are carried, cut again and trained."""
    for seed in range(10_000):
        history = history_of(random.Random(seed), 3, 1, 2)
        cut = [{r["sample_id"] for r in each.cut if r["status"] == "aborted"} for each in history]
        trained = {row["sample_id"] for row in history[2].batch}
        if cut[0] & cut[1] & trained:
            return history
    raise AssertionError("a seed has it")


def the_sample(history: list[Iteration]) -> str:
    cut = [{row["sample_id"] for row in each.cut if row["status"] == "aborted"} for each in history]
    return min(cut[0] & cut[1] & {row["sample_id"] for row in history[2].batch})


Alter = Callable[[Iteration, str], None]


def without(*kinds: str) -> Alter:
    def alter(iteration: Iteration, sample: str) -> None:
        for kind in kinds:
            rows = getattr(iteration, kind)
            setattr(iteration, kind, [row for row in rows if row["sample_id"] != sample])

    return alter


def shorter(kind: str) -> Alter:
    def alter(iteration: Iteration, sample: str) -> None:
        rows = [dict(row) for row in getattr(iteration, kind)]
        for row in rows:
            if row["sample_id"] == sample:
                row["loss_mask"] = row["loss_mask"][:-1]
        setattr(iteration, kind, rows)

    return alter


def twice(kind: str) -> Alter:
    def alter(iteration: Iteration, sample: str) -> None:
        rows = getattr(iteration, kind)
        setattr(iteration, kind, [*rows, *(row for row in rows if row["sample_id"] == sample)])

    return alter


def of_an_older_version(iteration: Iteration, sample: str) -> None:
    rows = [dict(row) for row in iteration.carried]
    for row in rows:
        if row["sample_id"] == sample:
            row["policy_versions"] = [{"first_token": 0, "version": -7}]
    iteration.carried = rows


ALTERED: dict[str, tuple[int, Alter]] = {
    "what was cut has no verdict": (0, without("verdicts")),
    "what was cut is stored twice": (0, twice("cut")),
    "what was cut again is not stored": (1, without("cut")),
    "what was cut again has lost tokens that it was carried with": (1, lambda i, s: _cut_to_nothing(i, s)),
    "it is carried with tokens of another version": (1, of_an_older_version),
    "it is trained and not stored": (2, without("rollouts")),
    "it is stored and not trained": (2, without("batch")),
    "it is trained twice": (2, twice("batch")),
    "it is generated twice": (2, twice("rollouts")),
    "it is trained with a token less": (2, shorter("batch")),
}


def _cut_to_nothing(iteration: Iteration, sample: str) -> None:
    iteration.cut = [
        {**row, "loss_mask": [], "policy_versions": []} if row["sample_id"] == sample else row
        for row in iteration.cut
    ]


@pytest.mark.parametrize("how", ALTERED)
def test_what_was_altered_of_a_deferred_sample_keeps_an_account_from_closing(how: str) -> None:
    history = deferred_twice()
    assert [each.account().problems() for each in history] == [[], [], []]
    at, alter = ALTERED[how]
    alter(history[at], the_sample(history))
    assert history[at].account().problems(), how


def test_a_deferred_group_whose_sample_fails_defers_no_token_of_it() -> None:
    """It was counted as deferred, and no iteration had it again."""
    carried = [Sample("g-0000", [3, 3]).row(), Sample("g-0001", [3]).row()]
    cut = [Sample("g-0000", [], "failed").row(), Sample("g-0001", [3, 4]).row()]
    verdicts = [
        {"sample_id": row["sample_id"], "verdict": "deferred", "dropped_by": None, "reused_from": None}
        for row in cut
    ]
    account = Iteration(rollouts=cut[:1], verdicts=verdicts, cut=cut, carried=carried).account()
    assert account.problems() == []
    assert dict(+account.tokens) == {
        ("dropped", "not_generated", 3): 2,
        ("deferred", "", 3): 1,
        ("deferred", "", 4): 1,
    }
    assert account.samples_of("deferred") == 2
