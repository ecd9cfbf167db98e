"""What `millrace verify` notices in the tables of an iteration: one row for each way in which they can disagree."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from millrace.core.accounts.lineage import (
    Drawn,
    Generated,
    Judged,
    RewardRow,
    StoredIteration,
    StoredTurn,
    Trained,
    inconsistencies,
)
from millrace.core.contracts import schema
from millrace.core.contracts.sample import columns

Tables = dict[str, Any]
VERSIONS = range(5, 7)  # two steps, which make versions 5 and 6


def tables() -> Tables:
    """Two kept groups of one sample each and a returned one."""
    generated = [
        {"sample_id": sample, "tokens": [1, 2], "loss_mask": [1], "rollout_logprobs": [-0.5]}
        for sample in ("a-0", "b-0")
    ]
    judged = [
        {
            "sample_id": f"{group}-0",
            "group_id": group,
            "verdict": verdict,
            "train_step": step,
            "reused_from": None,
            "dropped_by": None,
        }
        for group, verdict, step in (("a", "kept", 5), ("b", "kept", 6), ("c", "returned", None))
    ]
    spans = [{"first_token": 0, "version": 4}]
    return {
        "prompts": [{"group_id": group} for group in "abc"],
        "rollouts": generated,
        "rewards": [{"sample_id": row["sample_id"], "reward": 1.0} for row in generated],
        "verdicts": judged,
        "batch": [
            {**row, "reward": 1.0, "train_step": step, "policy_versions": spans, "reused_from": None}
            for row, step in zip(copy.deepcopy(generated), VERSIONS, strict=True)
        ],
        "steps": [{"version": version, "samples": 1} for version in VERSIONS],
        "turns": [
            turn(rollout, order, kind, event, ids)
            for rollout in ("a-0", "b-0")
            for order, (kind, event, ids) in enumerate(
                [("segment", 0, [7]), ("diverged", 0, []), ("segment", 0, [2]), ("call", 1, [])]
            )
        ],
    }


def turn(rollout: str, order: int, kind: str, event: int, ids: list[int]) -> dict[str, Any]:
    return {
        "rollout_id": rollout,
        "order": order,
        "branch": 0,
        "event": event,
        "kind": kind,
        "output_ids": ids,
    }


def problems(stored: Tables) -> list[str]:
    return inconsistencies(StoredIteration(index=2, **stored), VERSIONS)


def test_consistent_tables_have_no_problem() -> None:
    assert problems(tables()) == []


def test_later_passes_train_the_steps_of_the_first_again() -> None:
    stored = tables()
    stored["steps"] += [{"version": version, "samples": 1} for version in (7, 8)]
    iteration = StoredIteration(index=2, **stored)
    assert inconsistencies(iteration, range(5, 9), passes=2) == []
    assert "step.json names steps [5, 6, 7, 8], [5, 6] were due" in inconsistencies(iteration, VERSIONS)[0]
    stored["steps"][3]["samples"] = 2
    assert (
        "step 8 trained 2 samples, the batch names 1" in inconsistencies(iteration, range(5, 9), passes=2)[0]
    )
    stored["steps"].pop()
    assert "were due" in inconsistencies(iteration, range(5, 9), passes=2)[0]


def test_a_supervised_iteration_has_neither_rollouts_nor_rewards() -> None:
    assert problems({**tables(), "rollouts": [], "rewards": []}) == []


def reusing() -> Tables:
    """The same, and a sample that iteration 1 generated."""
    stored = tables()
    origin = {
        "sample_id": "x-0",
        "tokens": [3, 4],
        "loss_mask": [1],
        "rollout_logprobs": [-0.7],
        "reward": 0.5,
    }
    spans = [{"first_token": 0, "version": 0}]
    stored["origins"] = [origin]
    stored["batch"].append(
        {**copy.deepcopy(origin), "train_step": 6, "policy_versions": spans, "reused_from": 0}
    )
    stored["verdicts"].append(
        {
            "sample_id": "x-0",
            "group_id": "x",
            "verdict": "kept",
            "train_step": 6,
            "reused_from": 0,
            "dropped_by": None,
        }
    )
    stored["steps"][1]["samples"] = 2
    return stored


def test_a_reused_sample_needs_neither_a_draw_nor_a_rollout_nor_turns() -> None:
    assert problems(reusing()) == []


@pytest.mark.parametrize(
    ("says", "change"),
    [
        ("is reused, and iteration 1 did not train it", lambda t: t["origins"].clear()),
        ("is reused with other tokens, log-probabilities", lambda t: t["batch"][2].update(tokens=[3, 5])),
        (
            "is reused with other tokens, log-probabilities",
            lambda t: t["batch"][2].update(rollout_logprobs=[0]),
        ),
        ("is reused with other tokens, log-probabilities", lambda t: t["batch"][2].update(reward=1.0)),
        ("name different iterations that generated it", lambda t: t["verdicts"][3].update(reused_from=1)),
        ("x-0 is in the batch but not kept", lambda t: t["verdicts"].pop()),
        ("sample_id x-0 is 2 times in batch", lambda t: t["batch"].append(t["batch"][2])),
    ],
)
def test_what_is_wrong_with_a_reused_sample(says: str, change: Callable[[Tables], Any]) -> None:
    stored = reusing()
    change(stored)
    assert any(says in problem for problem in problems(stored)), problems(stored)


CASES: list[tuple[str, Callable[[Tables], Any]]] = [
    (
        "sample a-0 is trained on other tokens than its turns generated",
        lambda t: t["turns"][2].update(output_ids=[3]),
    ),
    (
        "sample b-0 is trained on other tokens than its turns generated",
        lambda t: t["turns"].append(turn("b-0", 4, "segment", 2, [2])),
    ),
    ("group_id a is 2 times in prompts", lambda t: t["prompts"].append({"group_id": "a"})),
    ("sample_id a-0 is 2 times in rollouts", lambda t: t["rollouts"].append(t["rollouts"][0])),
    ("sample_id a-0 is 2 times in rewards", lambda t: t["rewards"].append(t["rewards"][0])),
    ("sample_id c-0 is 2 times in verdicts", lambda t: t["verdicts"].append(t["verdicts"][2])),
    ("sample_id b-0 is 2 times in batch", lambda t: t["batch"].append(t["batch"][1])),
    ("sample b-0 is kept but not in the batch", lambda t: t["batch"].pop()),
    ("sample b-0 is in the batch but not kept", lambda t: t["verdicts"][1].update(verdict="dropped")),
    (
        "sample b-0: its verdict names step 5, the batch step 6",
        lambda t: t["verdicts"][1].update(train_step=5),
    ),
    ("group c was drawn and has no verdict", lambda t: t["verdicts"].pop()),
    ("group c has a verdict and was never drawn", lambda t: t["prompts"].pop()),
    ("sample b-0 is trained and has no rollout", lambda t: t["rollouts"].pop()),
    ("sample b-0 is trained and has no reward", lambda t: t["rewards"].pop()),
    (
        "sample c-0 is scored and has no rollout",
        lambda t: t["rewards"].append({"sample_id": "c-0", "reward": 0.0}),
    ),
    (
        "sample b-0 was dropped as one that generated nothing, and its rollout has tokens",
        lambda t: t["verdicts"][1].update(verdict="dropped", dropped_by="nothing_generated"),
    ),
    (
        "sample a-0 is trained on other tokens or log-probabilities",
        lambda t: t["batch"][0].update(tokens=[1]),
    ),
    (
        "sample a-0 is trained on other tokens or log-probabilities",
        lambda t: t["batch"][0].update(rollout_logprobs=[-0.25]),
    ),
    ("sample a-0 is trained with reward 0.5, it was scored 1.0", lambda t: t["batch"][0].update(reward=0.5)),
    (
        "sample a-0 was generated by version 5, after the iteration's 4",
        lambda t: t["batch"][0].update(policy_versions=[{"first_token": 0, "version": 5}]),
    ),
    ("step.json names steps [5], [5, 6] were due", lambda t: t["steps"].pop()),
    ("the batch names steps [5], [5, 6] were due", lambda t: t["batch"][1].update(train_step=5)),
    ("step 6 trained 2 samples, the batch names 1", lambda t: t["steps"][1].update(samples=2)),
]


@pytest.mark.parametrize(("expected", "break_"), CASES)
def test_what_disagrees_is_named_with_its_iteration(expected: str, break_: Callable[[Tables], Any]) -> None:
    stored = tables()
    break_(stored)
    assert any(line.startswith(f"iteration 3: {expected}") for line in problems(stored)), problems(stored)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (Drawn, "prompts"),
        (Generated, "rollouts"),
        (RewardRow, "rewards"),
        (Judged, "verdicts"),
        (Trained, "batch"),
        (StoredTurn, "turns"),
    ],
)
def test_the_rows_are_columns_of_their_tables(row: type, kind: str) -> None:
    assert set(columns(row)) <= set(schema.schema(kind).names)
    assert kind in {field.name for field in fields(StoredIteration)}
