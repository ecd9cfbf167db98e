"""Batches whose tokens several weight versions made: the same step at every split, and the guard looks at age 0 alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.core.logprob_gap import LogprobGuard
from tests.support.trainer_ranks import (
    Group,
    RankFailedError,
    Workers,
    configuration,
    log_probabilities,
    samples,
    write_batch,
)

HELD = 3  # the version before the iteration, which makes two more
FURTHER = 0.3  # nats a token that the engine's log-probabilities are lower by, for each version of age
HIGH, MAX_AGE = 1.5, 1
# (first token, version) of each span; published are 3, 1 and so on, so that version 2 is as old as 1
SPANS = (
    [(0, 3)],
    [(0, 1), (2, 3)],
    [(0, -1), (1, 2), (3, 3)],
    [(0, 0)],
)
AGE = {3: 0, 2: 1, 1: 1, 0: 2, -1: 2}
ALGORITHM = {
    "correction": {"kind": "truncate", "high": HIGH, "max_token_age": MAX_AGE},
    "kl_coef": 0.05,
    "entropy_coef": 0.01,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "other packs": (1, {"max_pack_tokens": 24}),
    "data": (2, {}),
    "data, other packs": (2, {"max_pack_tokens": 24}),
    "context": (2, {"parallel": {"context": 2}}),
    "tensor and sequence": (2, {"parallel": {"tensor": 2, "sequence": True}}),
    "pipeline": (2, {"parallel": {"pipeline": 2}}),
}
FIGURES = [
    "loss",
    "pg_loss",
    "grad_norm",
    "kl",
    "entropy",
    "ess",
    "correction_mean",
    "too_old_share",
    "left_out_share",
    "importance_mean",
    "staleness_mean",
    "staleness_max",
    "logprob_gap_share",
    "logprob_gap_mean",
    "logprob_gap_max",
    "mismatch_ratio",
    "mismatch_kl",
    "staleness_ratio",
    "behaviour_kl",
    "share_age_0",
    "share_age_1",
    "share_age_2",
    "logprob_gap_age_0",
    "logprob_gap_age_1",
    "logprob_gap_age_2",
]


def hold(rank: Any, version: int) -> None:
    """Call the rank's initial weights another version's."""
    rank.version = version


def ages(row: dict[str, Any]) -> list[int]:
    spans = row["policy_versions"]
    return [
        AGE[next(span["version"] for span in reversed(spans) if span["first_token"] <= token)]
        for token in range(row["response_length"])
    ]


def mixed(group: Group, folder: Path) -> list[dict[str, Any]]:
    """An iteration of two steps whose tokens are of several ages, and were the less likely the older they are."""
    group.run(hold, HELD)
    rows = samples(HELD + 1) + samples(HELD + 2)
    ours = group.run(log_probabilities, write_batch(folder / "any", rows))[0]
    for at, row in enumerate(rows):
        spans = SPANS[at % len(SPANS)]
        row["policy_versions"] = [
            {"first_token": first, "version": version}
            for first, version in spans
            if first < row["response_length"]
        ]
        gaps = [FURTHER * age for age in ages(row)]
        row["rollout_logprobs"] = [own - gap for own, gap in zip(ours[row["sample_id"]], gaps, strict=True)]
    return rows


def steps_of(group: Group, batch: str, guard: float | None = None) -> list[dict[str, Any]]:
    group.run(hold, HELD)
    return group.train([HELD + 1], batch, guard) + group.train([HELD + 2], batch)


@pytest.fixture(scope="module")
def made(
    workers: Workers, model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The batch, its rows, and the steps that one rank makes of it."""
    folder = tmp_path_factory.mktemp("ages")
    with workers.group(configuration(model(), algorithm=ALGORITHM, global_batch=8)) as group:
        rows = mixed(group, folder)
        batch = write_batch(folder / "mixed", rows)
        return {"rows": rows, "batch": batch, "steps": steps_of(group, batch, 1e-4)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packs_and_ranks_change_no_figure_of_mixed_ages(
    workers: Workers, model: Callable[..., Path], made: dict[str, Any], layout: str
) -> None:
    world, changes = LAYOUTS[layout]
    with workers.group(
        configuration(model(), world, algorithm=ALGORITHM, global_batch=8, **changes)
    ) as group:
        steps = steps_of(group, made["batch"], 1e-4)
    for mine, alone in zip(steps, made["steps"], strict=True):
        assert {name: mine[name] for name in FIGURES} == pytest.approx(
            {name: alone[name] for name in FIGURES}, rel=1e-4, abs=1e-5
        )


def test_the_first_step_is_that_of_the_formulas(made: dict[str, Any]) -> None:
    rows, step = made["rows"][:8], made["steps"][0]
    tokens = [
        (age, row["advantage"] / (len(rows) * sum(row["loss_mask"])))
        for row in rows
        for age, on in zip(ages(row), row["loss_mask"], strict=True)
        if on
    ]
    count = len(tokens)
    weight = {age: min(math.exp(FURTHER * age), HIGH) if age <= MAX_AGE else 0.0 for age in (0, 1, 2)}
    of = {age: sum(each == age for each, _ in tokens) for age in (0, 1, 2)}
    assert all(of.values())
    # the ratio is 1, so that the loss is - sum of c A
    loss = -sum(weight[age] * share for age, share in tokens)
    assert step["pg_loss"] == pytest.approx(loss, rel=1e-4)
    applied = [weight[age] for age, _ in tokens]
    assert step["ess"] == pytest.approx(sum(applied) ** 2 / sum(w * w for w in applied) / count, rel=1e-4)
    assert step["too_old_share"] == pytest.approx(of[2] / count)
    assert step["staleness_mean"] == pytest.approx(sum(age for age, _ in tokens) / count)
    assert step["staleness_max"] == 2
    assert step["logprob_gap_share"] == pytest.approx(of[0] / count)
    assert step["mismatch_ratio"] == pytest.approx(1, abs=1e-5)
    older = of[1] + of[2]
    mean = (of[1] * math.exp(FURTHER) + of[2] * math.exp(2 * FURTHER)) / older
    assert step["staleness_ratio"] == pytest.approx(mean, rel=1e-4)
    for age, number in of.items():
        assert step[f"share_age_{age}"] == pytest.approx(number / count)
        assert step[f"logprob_gap_age_{age}"] == pytest.approx(FURTHER * age, abs=1e-5)


def test_the_guard_looks_at_tokens_of_age_zero_alone(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    correction = {"correction": {"kind": "truncate"}}
    with workers.group(configuration(model(), algorithm=correction, global_batch=8)) as group:
        rows = mixed(group, tmp_path)
        for row in rows:
            row["policy_versions"] = [{"first_token": 0, "version": HELD - 2}]
        (first, second) = steps_of(group, write_batch(tmp_path / "older", rows), 1e-9)
        for step in (first, second):
            assert (step["logprob_gap_share"], step["share_age_0"], step["share_age_1"]) == (0, 0, 1)
            assert "mismatch_ratio" not in step
    with workers.group(configuration(model(), algorithm=correction, global_batch=8)) as group:
        group.run(hold, HELD)
        rows[0]["policy_versions"] = [{"first_token": 0, "version": HELD}]
        rows[0]["rollout_logprobs"] = [value - 1 for value in rows[0]["rollout_logprobs"]]
        with pytest.raises(RankFailedError, match="RefusedStepError: step 4: engine and trainer disagree"):
            group.step(HELD + 1, write_batch(tmp_path / "off", rows), LogprobGuard(0.02))


def test_a_step_whose_tokens_are_all_too_old_is_refused(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    settings = configuration(model(), algorithm={"correction": {"max_token_age": 0}})
    with workers.group(settings) as group:
        rows = samples(HELD + 1)
        for row in rows:
            row["policy_versions"] = [{"first_token": 0, "version": HELD - 1}]
        group.run(hold, HELD)
        with pytest.raises(
            RankFailedError, match=r"no.* token to train on of age 0 \(algorithm.correction.max_token_age\)"
        ):
            group.step(HELD + 1, write_batch(tmp_path, rows))
