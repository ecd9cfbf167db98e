"""The trainer's steps against plain Hugging Face forward passes, torch AdamW and torch clipping."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.plain_rl import grpo_loss
from tests.support.plain_trainer import Plain
from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import (
    RankFailedError,
    Workers,
    configuration,
    log_probabilities,
    samples,
    write_batch,
)

STEPS = 4


def policy_loss(plain: Plain, rows: list[dict[str, Any]], old: dict[str, Tensor], kl_coef: float) -> Tensor:
    """GRPO as examples/plain_rl.py has it, one sample at a time."""
    losses = []
    for row in rows:
        new_R = plain.logprobs(row)
        with torch.no_grad():
            ref_R = plain.logprobs(row, plain.reference) if kl_coef else None
        losses.append(
            grpo_loss(
                new_R[None],
                old.get(row["sample_id"], new_R.detach())[None],
                torch.tensor([row["advantage"]]),
                torch.tensor([row["loss_mask"]], dtype=torch.float32),
                ref_logprobs_BR=None if ref_R is None else ref_R[None],
                kl_coef=kl_coef,
            )
        )
    return torch.stack(losses).mean()


@pytest.mark.parametrize("kind", slow_but(["qwen3", "qwen3_moe", "qwen2", "llama"], "qwen3", "qwen3_moe"))
def test_four_steps_have_the_loss_and_gradient_norm_of_plain_torch(
    workers: Workers, model: Callable[..., Path], batch: str, kind: str
) -> None:
    folder = model(kind)
    changes: dict[str, Any] = {"algorithm": {"kl_coef": 0.1}}
    with workers.group(configuration(folder, **changes)) as group:
        ours = [group.train([step], batch.format(step))[0] for step in range(1, STEPS + 1)]
    plain = Plain(folder)
    for step, found in enumerate(ours, start=1):
        loss = policy_loss(plain, samples(step), {}, 0.1)
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=2e-6)
        assert found["grad_norm"] == pytest.approx(plain.step(loss), rel=1e-5)


def test_several_steps_an_iteration_take_the_ratio_against_the_weights_before_it(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    iteration = [row for step in (1, 2, 3) for row in samples(step)]
    url = write_batch(tmp_path, iteration)
    with workers.group(configuration(model(), global_batch=8)) as group:
        ours = group.train([1, 2, 3], url)
    plain = Plain(model())
    with torch.no_grad():
        old = {row["sample_id"]: plain.logprobs(row) for row in iteration}
    for step, found in enumerate(ours, start=1):
        loss = policy_loss(plain, samples(step), old, 0.0)
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=2e-6)
        assert found["grad_norm"] == pytest.approx(plain.step(loss), rel=1e-5)
    assert ours[0]["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert ours[2]["ratio_distance"] > 1e-4


def test_a_later_pass_makes_the_steps_of_the_first_again_against_the_weights_before_both(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    iteration = [row for step in (1, 2) for row in samples(step)]
    url = write_batch(tmp_path, iteration)
    config = configuration(model(), global_batch=8, passes=3, optimizer={"lr": 1e-3, "clip_grad": 0.5})
    with workers.group(config) as group:
        ours = group.train(list(range(1, 7)), url)
        with pytest.raises(RankFailedError, match="no sample names step 7"):
            group.train([7], url)
    plain = Plain(model())
    with torch.no_grad():
        old = {row["sample_id"]: plain.logprobs(row) for row in iteration}
    for made, found in enumerate(ours):
        loss = policy_loss(plain, samples(1 + made % 2), old, 0.0)
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=2e-6)
        assert found["grad_norm"] == pytest.approx(plain.step(loss), rel=1e-5)
        assert found["samples"] == 8
    assert ours[0]["ratio_distance"] == 0
    assert ours[4]["ratio_distance"] > ours[2]["ratio_distance"] > 1e-4
    gaps = [
        step["logprob_gap_mean"] for step in ours
    ]  # of the weights that sampled, whatever was trained since
    assert gaps[2:4] == gaps[4:] == gaps[:2]


def test_supervised_steps_are_those_of_plain_likelihood(
    workers: Workers, model: Callable[..., Path], batch: str
) -> None:
    config = configuration(model(), algorithm={"loss": "sft", "aggregation": "token_mean"})
    config["rollout"]["sampling"]["temperature"] = 0.7  # plays no part
    with workers.group(config) as group:
        ours = [group.train([step], batch.format(step))[0] for step in (1, 2, 3)]
    plain = Plain(model())
    for step, found in enumerate(ours, start=1):
        masks = [torch.tensor(row["loss_mask"], dtype=torch.float32) for row in samples(step)]
        parts = [(plain.logprobs(row) * mask).sum() for row, mask in zip(samples(step), masks, strict=True)]
        loss = -torch.stack(parts).sum() / sum(mask.sum() for mask in masks)
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert found["grad_norm"] == pytest.approx(plain.step(loss), rel=1e-5)


def test_scores_are_log_probabilities_at_the_sampling_temperature(
    workers: Workers, model: Callable[..., Path], batch: str
) -> None:
    config = configuration(model(), 2, parallel={"tensor": 2})
    config["rollout"]["sampling"]["temperature"] = 0.7
    with workers.group(config) as group:
        found, elsewhere = group.run(log_probabilities, batch.format(1))
    plain = Plain(model())
    with torch.no_grad():
        for row in samples(1):
            expected = plain.logprobs(row, temperature=0.7)
            assert found[row["sample_id"]] == pytest.approx(expected.tolist(), abs=2e-6)
    assert elsewhere == {}


@pytest.mark.parametrize(
    ("recompute", "kind", "parallel"),
    [
        ("selective", "qwen3", {}),
        pytest.param("selective", "qwen3", {"tensor": 2, "sequence": True}, marks=pytest.mark.slow),
        pytest.param("selective", "qwen3", {"pipeline": 2}, marks=pytest.mark.slow),
        ("selective", "qwen3_moe", {"expert": 2}),
        ("full", "qwen3", {}),
    ],
)
def test_recomputed_activations_change_nothing(
    workers: Workers,
    model: Callable[..., Path],
    batch: str,
    recompute: str,
    kind: str,
    parallel: dict[str, Any],
) -> None:
    found = []
    for how in ("none", recompute):
        changes = {"recompute": how, "parallel": parallel}
        with workers.group(configuration(model(kind), 2 if parallel else 1, **changes)) as group:
            found.append([group.train([step], batch.format(step))[0] for step in (1, 2)])
    for plain, again in zip(*found, strict=True):
        assert (again["loss"], again["grad_norm"]) == (plain["loss"], plain["grad_norm"])


def test_the_ratio_may_be_taken_against_the_engines_log_probabilities(
    workers: Workers, model: Callable[..., Path], batch: str
) -> None:
    algorithm = {"old_logprobs": "rollout", "correction": {"kind": "none"}}
    with workers.group(configuration(model(), algorithm=algorithm)) as group:
        (found,) = group.train([1], batch.format(1))
    plain = Plain(model())
    old = {row["sample_id"]: torch.tensor(row["rollout_logprobs"]) for row in samples(1)}
    loss = policy_loss(plain, samples(1), old, 0.0).item()
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
