"""Engine and trainer are compared on every sample of an iteration, under the weights that sampled it, before any update."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.core.logprob_gap import LogprobGuard
from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import (
    Group,
    RankFailedError,
    Workers,
    configuration,
    log_probabilities,
    samples,
    write_batch,
)

LIMIT = 0.02
TEACHER = "the model itself"
ALGORITHMS: dict[str, dict[str, Any]] = {
    "trainer's ratio": {},
    "recomputed": {"old_logprobs": "recompute"},
    "engine's ratio": {"old_logprobs": "rollout"},
    "KL in the reward": {"preset": "reinforce_plus_plus", "kl_coef": 0.1},
    "critic": {"preset": "ppo"},
    "no ratio": {"preset": "opd", "teacher": TEACHER},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "context": {"parallel": {"context": 2}},
    "tensor": {"parallel": {"tensor": 2}},
    "pipeline": {"parallel": {"pipeline": 2}},
}


def iteration(group: Group, folder: Path) -> tuple[str, str]:
    """Batches of two steps: as an engine with the trainer's weights made it, and with one sample of the second step off."""
    rows = samples(1) + samples(2)
    sampled = group.run(log_probabilities, write_batch(folder / "any", rows))[0]
    for row in rows:
        row["rollout_logprobs"] = sampled[row["sample_id"]]
    good = write_batch(folder / "good", rows)
    rows[-1]["rollout_logprobs"] = [value - 9.0 for value in rows[-1]["rollout_logprobs"]]
    return good, write_batch(folder / "bad", rows)


def compare(group: Group, folder: Path) -> None:
    good, bad = iteration(group, folder)
    with pytest.raises(
        RankFailedError,
        match=r"RefusedStepError: step 1: .*disagree on the samples of step 2: .*nothing was applied",
    ):
        group.step(1, bad, LogprobGuard(LIMIT))
    assert {state["version"] for state in group.call("state")} == {0}
    first = group.step(1, good, LogprobGuard(LIMIT))[0]
    second = group.step(2, good)[0]
    assert second["version"] == 2
    for step in (first, second):  # the second step's policy has moved, the one that sampled has not
        assert step["logprob_gap_max"] < 1e-4


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_sample_of_a_later_step_is_refused_before_the_first_update(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    algorithm = dict(ALGORITHMS[name])
    if algorithm.get("teacher") == TEACHER:
        algorithm["teacher"] = str(model())
    with workers.group(configuration(model(), algorithm=algorithm, global_batch=8)) as group:
        compare(group, tmp_path)


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "pipeline"))
def test_every_layout_compares_all_samples(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, layout: str
) -> None:
    settings = configuration(
        model(), 2, algorithm={"old_logprobs": "rollout"}, global_batch=8, **LAYOUTS[layout]
    )
    with workers.group(settings) as group:
        compare(group, tmp_path)


def test_a_step_without_a_token_to_train_on_is_refused(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    rows = samples(1)
    for row in rows:
        row["loss_mask"] = [0] * row["response_length"]
    with (
        workers.group(configuration(model())) as group,
        pytest.raises(
            RankFailedError, match="RefusedStepError: step 1: none of its 8 samples has a token to train on"
        ),
    ):
        group.step(1, write_batch(tmp_path, rows))


def test_entropy_is_reported_whether_the_loss_has_it_or_not(
    workers: Workers, model: Callable[..., Path], batch: str
) -> None:
    found = {}
    for name, algorithm in {
        "none": {},
        "bonus": {"entropy_coef": 1e-12},
        "supervised": {"loss": "sft"},
    }.items():
        with workers.group(configuration(model(), algorithm=algorithm)) as group:
            found[name] = group.train([1], batch.format(1))[0]
    assert found["none"]["entropy"] == found["bonus"]["entropy"] == found["supervised"]["entropy"] > 1
    assert found["none"]["logprob_gap_mean"] == found["bonus"]["logprob_gap_mean"]
