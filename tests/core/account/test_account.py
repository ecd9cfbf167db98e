"""The account of what an iteration generated: it closes over any history, says what became of each token, and shows what was altered."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.accounts.account import FATES, Account
from millrace.core.accounts.token_counts import COLUMNS, account_of
from millrace.core.contracts import schema

Row = dict[str, Any]
CAUSES = ("zero_variance", "too_long", "not_scored")
PART = 3  # rows: tables come in parts


@dataclass
class World:
    """Rows of an iteration's tables, and by fate, cause and version the tokens that were made for them."""

    rollouts: list[Row] = field(default_factory=list)
    turns: list[Row] = field(default_factory=list)
    verdicts: list[Row] = field(default_factory=list)
    batch: list[Row] = field(default_factory=list)
    expected: Counter[tuple[str, str, int]] = field(default_factory=Counter)

    def account(self, *, committed: bool = True) -> Account:
        verdicts, batch = (table(kind, getattr(self, kind)) for kind in ("verdicts", "batch"))
        known = (verdicts, batch) if committed else (None, None)
        return account_of(table("rollouts", self.rollouts), table("turns", self.turns), *known)


def table(kind: str, rows: list[Row]) -> pa.Table:
    """Rows as parts have them, several chunks long."""
    wanted = pa.schema([schema.schema(kind).field(name) for name in COLUMNS[kind]])
    parts = [rows[at : at + PART] for at in range(0, len(rows), PART)]
    return pa.concat_tables([wanted.empty_table(), *(pa.Table.from_pylist(part, wanted) for part in parts)])


def spans_of(versions: list[int]) -> list[Row]:
    """Spans of tokens whose weight versions are these."""
    return [
        {"first_token": at, "version": version}
        for at, version in enumerate(versions)
        if not at or versions[at - 1] != version
    ]


def versions_of(rng: random.Random, length: int) -> list[int]:
    crossed = rng.randint(0, length)
    return [3] * crossed + [4] * (length - crossed)


def verdict(world: World, sample: str, fate: str, cause: str) -> None:
    kinds = {"trained": "kept", "dropped": "dropped", "returned": "returned"}
    row = {"sample_id": sample, "verdict": kinds[fate], "dropped_by": cause or None, "reused_from": None}
    world.verdicts.append(row)


def add_segments(world: World, rng: random.Random, name: str, versions: list[int]) -> list[int]:
    """Some segments of an answer, as rollout.flush_tokens stores them; returns the versions of their tokens."""
    stored = versions[: rng.randint(0, len(versions))]
    for order, at in enumerate(range(0, len(stored), 2)):
        piece = stored[at : at + 2]
        place = {"rollout_id": name, "order": order, "branch": 0, "event": 0, "kind": "answer"}
        output = {"output_ids": [7] * len(piece), "policy_versions": spans_of(piece)}
        world.turns.append({**place, **output})
    return stored


def add_answer(world: World, rng: random.Random, name: str, fate: str, cause: str) -> None:
    """A rollout of one answer; some of a trained one's tokens the batch masks. One that is returned may have been ended amid it."""
    versions = versions_of(rng, rng.randint(0, 6))
    stored = add_segments(world, rng, name, versions) if rng.random() < 0.5 else []
    if stored and fate == "returned":
        verdict(world, name, fate, cause)
        world.expected.update((fate, cause, version) for version in stored)
        return
    row = {"loss_mask": [1] * len(versions), "policy_versions": spans_of(versions), "samples": None}
    world.rollouts.append({"sample_id": name, "status": "completed", **row})
    verdict(world, name, fate, cause)
    if fate != "trained":
        world.expected.update((fate, cause, version) for version in versions)
        return
    mask = [rng.randint(0, 1) for _ in versions]
    world.batch.append({"sample_id": name, **row, "loss_mask": mask, "reused_from": None})
    world.expected.update(
        ("trained" if kept else "masked", "", version) for kept, version in zip(mask, versions, strict=True)
    )


def add_rollout(world: World, rng: random.Random, name: str, fate: str, cause: str) -> None:
    """A rollout of several turns: a first try may have been given up, and it may have failed."""
    order = 0

    def segment(event: int, versions: list[int], kind: str = "segment") -> None:
        nonlocal order
        output = {"output_ids": [7] * len(versions), "policy_versions": spans_of(versions)}
        place = {"rollout_id": name, "order": order, "branch": 0, "event": event, "kind": kind}
        world.turns.append({**place, **output})
        order += 1

    if rng.random() < 0.4:
        given_up = versions_of(rng, rng.randint(1, 4))
        segment(0, given_up)
        segment(0, [], "diverged")
        world.expected.update(("dropped", "superseded", version) for version in given_up)
    mask: list[int] = []
    versions: list[int] = []
    made: list[int] = []
    for event in range(rng.randint(1, 3)):
        turn = versions_of(rng, rng.randint(1, 4))
        segment(event, turn)
        observed = rng.randint(0, 2) if made else 0
        # observed tokens count to the version before them
        versions += [versions[-1]] * observed + turn if versions else turn
        mask += [0] * observed + [1] * len(turn)
        made += turn
    if fate == "dropped" and rng.random() < 0.5:  # it failed: its row holds nothing
        empty: Row = {"loss_mask": [], "policy_versions": [], "samples": 1}
        world.rollouts.append({"sample_id": name, "status": "failed", **empty})
    else:
        row = {"loss_mask": mask, "policy_versions": spans_of(versions), "samples": 1}
        world.rollouts.append({"sample_id": name, "status": "completed", **row})
        if fate == "trained":
            masked = [at for at, kept in enumerate(mask) if kept and rng.random() < 0.2]
            loss = [0 if at in masked else kept for at, kept in enumerate(mask)]
            world.batch.append({"sample_id": name, **row, "loss_mask": loss, "reused_from": None})
            world.expected.update(("masked", "", versions[at]) for at in masked)
            world.expected.subtract(("trained", "", versions[at]) for at in masked)
    verdict(world, name, fate, cause)
    world.expected.update((fate, cause, version) for version in made)


def world_of(rng: random.Random, rollouts: int) -> World:
    """An iteration of random rollouts; some verdicts are on what was never generated, some samples are reused ones."""
    world = World()
    for number in range(rollouts):
        fate = rng.choice(("trained", "trained", "dropped", "returned"))
        cause = rng.choice(CAUSES) if fate == "dropped" else ""
        add = rng.choice((add_answer, add_rollout))
        add(world, rng, f"g{number}-0000", fate, cause)
    verdict(world, "unusable-0000", "dropped", "unusable_row")
    verdict(world, "reserve-0000", "returned", "")
    reused = {"loss_mask": [1, 0, 1], "policy_versions": spans_of([1, 1, 1]), "samples": None}
    world.batch.append({"sample_id": "old-0000", **reused, "reused_from": 0})
    world.verdicts.append({"sample_id": "old-0000", "verdict": "kept", "dropped_by": None, "reused_from": 0})
    rng.shuffle(world.rollouts)
    return world


@given(st.randoms(use_true_random=False), st.integers(0, 9))
def test_every_token_is_accounted_for_by_fate_cause_and_version(rng: random.Random, rollouts: int) -> None:
    world = world_of(rng, rollouts)
    account = world.account()
    assert account.problems() == []
    assert +account.tokens == +world.expected
    assert (account.again_samples, account.again_tokens) == (1, 2)
    assert sum(account.samples.values()) == account.generated_samples == rollouts
    metrics = account.metrics()
    named = sum(metrics[f"tokens/{fate}"] for fate in FATES if fate != "in flight")
    assert named == metrics["tokens/generated"] == sum((+world.expected).values())


@given(st.randoms(use_true_random=False), st.integers(0, 9))
def test_all_that_an_open_iteration_generated_is_in_flight(rng: random.Random, rollouts: int) -> None:
    world = world_of(rng, rollouts)
    generated = sum((+world.expected).values())
    for row in [
        row for row in world.rollouts if rng.random() < 0.5
    ]:  # not finished yet: only turns and segments are stored
        stored = [turn for turn in world.turns if turn["rollout_id"] == row["sample_id"]]
        if stored:
            world.rollouts.remove(row)
            if row["samples"] is None:
                generated -= len(row["loss_mask"]) - sum(len(turn["output_ids"]) for turn in stored)
    account = world.account(committed=False)
    assert account.problems() == []
    assert account.tokens_of("in flight") == generated == sum(account.generated.values())
    assert account.samples_of("in flight") == rollouts


def whole() -> World:
    """Answers and rollouts, one of each fate, and each of some tokens."""
    for seed in range(1000):
        world = World()
        rng = random.Random(seed)
        for kind, add in (("answer", add_answer), ("rollout", add_rollout)):
            for fate, cause in (("trained", ""), ("dropped", "too_long"), ("returned", "")):
                add(world, rng, f"{kind}-{fate}", fate, cause)
        full = all(row["loss_mask"] for row in world.rollouts) and all(
            any(row["loss_mask"]) for row in world.batch
        )
        if full:
            return world
    raise AssertionError("a seed has them all")


def drop(kind: str, sample: str) -> Callable[[World], None]:
    def alter(world: World) -> None:
        rows = getattr(world, kind)
        rows[:] = [row for row in rows if row.get("sample_id", row.get("rollout_id")) != sample]

    return alter


def repeat(kind: str, sample: str) -> Callable[[World], None]:
    def alter(world: World) -> None:
        rows = getattr(world, kind)
        rows += [dict(row) for row in rows if row["sample_id"] == sample]

    return alter


def lengthen(kind: str, sample: str, column: str = "loss_mask") -> Callable[[World], None]:
    def alter(world: World) -> None:
        row = next(r for r in getattr(world, kind) if r.get("sample_id", r.get("rollout_id")) == sample)
        row[column] = [*row[column], 1]

    return alter


def trained_more(world: World) -> None:
    """Every token of a rollout is trained, those that were observed too."""
    row = next(row for row in world.batch if row["sample_id"] == "rollout-trained")
    row["loss_mask"] = [1] * (len(row["loss_mask"]) + 1)


def of_another_version(world: World) -> None:
    row = next(row for row in world.batch if row["sample_id"] == "answer-trained")
    row["policy_versions"] = [{"first_token": 0, "version": 9}]


ALTERED: dict[str, Callable[[World], None]] = {
    "a sample has no verdict": drop("verdicts", "answer-dropped"),
    "a sample of turns has no verdict": drop("verdicts", "rollout-dropped"),
    "a sample has two verdicts": repeat("verdicts", "answer-dropped"),
    "a kept sample is not in the batch": drop("batch", "answer-trained"),
    "a kept rollout is not in the batch": drop("batch", "rollout-trained"),
    "a trained sample was not generated": drop("rollouts", "answer-trained"),
    "a rollout has turns and no sample": drop("rollouts", "rollout-returned"),
    "a rollout has a sample and no turns": drop("turns", "rollout-returned"),
    "a sample was generated twice": repeat("rollouts", "answer-trained"),
    "a dropped sample was generated twice": repeat("rollouts", "rollout-dropped"),
    "a sample is in the batch twice": repeat("batch", "answer-trained"),
    "a rollout is in the batch twice": repeat("batch", "rollout-trained"),
    "the batch has a longer sample": lengthen("batch", "answer-trained"),
    "a turn is longer than in its sample": lengthen("turns", "rollout-trained", "output_ids"),
    "a sample is longer than its turns": lengthen("rollouts", "rollout-trained"),
    "observed tokens are trained": trained_more,
    "tokens are of another version": of_another_version,
}


@pytest.mark.parametrize("how", ALTERED)
def test_what_was_altered_keeps_the_account_from_closing(how: str) -> None:
    world = whole()
    assert world.account().problems() == []
    ALTERED[how](world)
    assert world.account().problems(), how


def test_a_sample_without_a_verdict_is_named() -> None:
    world = whole()
    drop("verdicts", "answer-dropped")(world)
    assert world.account().problems()[-1] == "without one verdict: answer-dropped"


def test_accounts_of_iterations_add_up_and_show_who_is_not_trained() -> None:
    both = Account()
    for world in (whole(), whole()):
        both.add(world.account())
    one = whole().account()
    assert both.problems() == []
    assert sum(both.generated.values()) == 2 * sum(one.generated.values())
    assert both.quantiles(True)["p50"] == one.quantiles(True)["p50"] > 0
    assert set(both.metrics()) >= {
        "tokens/trained_length_p50",
        "tokens/untrained_length_p99",
        "tokens/dropped_too_long",
    }
