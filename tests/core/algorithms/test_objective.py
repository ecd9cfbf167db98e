"""The composed objective: split invariance, masks over NaN, terms and their gradients, step-0 guards."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.core.algorithms import aggregate, importance, losses
from millrace.core.algorithms.aggregate import spread
from millrace.core.algorithms.kl import kl_estimate
from millrace.core.algorithms.objective import Objective, check_on_policy, derived
from millrace.core.config.algorithm import Algorithm
from millrace.core.config.algorithm.presets import PRESETS
from millrace.core.contracts.token_batch import TokenBatch
from millrace.core.errors import TrainerError

CONFIGS: dict[str, dict[str, Any]] = {name: {"preset": name} for name in PRESETS} | {
    "sft": {"loss": "sft"},
    "sapo": {"loss": "sapo"},
    "all terms": {
        "kl_coef": 0.1,
        "kl_unbiased": True,
        "entropy_coef": 0.01,
        "loss": {"dual_clip": 3.0},
        "aggregation": "token_mean",
        "correction": {
            "kind": "mask",
            "level": "sequence_geometric",
            "low": 0.8,
            "high": 1.2,
            "veto": 0.2,
            "opsm_delta": 0.01,
        },
    },
    "older tokens left out": {
        "kl_coef": 0.1,
        "entropy_coef": 0.01,
        "correction": {"kind": "truncate", "max_token_age": 1},
    },
    "likeliest tokens of a teacher": {
        "preset": "opd",
        "teacher_server": {"url": "http://nowhere", "top_k": 3},
    },
}


def batch(config: Algorithm, seed: int = 0, dtype: torch.dtype = torch.float64) -> TokenBatch:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([4, 1, 7, 3, 5, 2])
    n = int(lengths.sum())
    mask = (torch.rand(n, generator=g) > 0.25).long()
    rand = lambda: torch.rand(n, generator=g, dtype=dtype)  # noqa: E731
    tops = lambda: torch.randn(n, 5, generator=g, dtype=dtype).log_softmax(-1)[:, :3]  # noqa: E731
    old = -2 * rand() - 0.05
    counts = torch.stack([part.sum() for part in mask.split(lengths.tolist())])
    return TokenBatch(
        logprobs=(old + 0.6 * (rand() - 0.5)).requires_grad_(),
        old_logprobs=old,
        rollout_logprobs=old + 0.3 * (rand() - 0.5),
        ref_logprobs=old + 0.4 * (rand() - 0.5),
        advantages=torch.repeat_interleave(torch.randn(6, generator=g, dtype=dtype), lengths),
        mask=mask,
        lengths=lengths,
        weights=spread(aggregate.sample_weights(counts.to(dtype), config, max_length=8), lengths),
        entropy=rand().requires_grad_(),
        top_logprobs=tops().requires_grad_(),
        teacher_top_logprobs=tops(),
        ages=torch.randint(0, 4, (n,), generator=g).to(dtype),
    )


def part(whole: TokenBatch, rows: slice) -> TokenBatch:
    starts = [0, *torch.cumsum(whole.lengths, 0).tolist()]
    tokens = slice(starts[rows.start], starts[rows.stop])
    cut = {
        item.name: None if (value := getattr(whole, item.name)) is None else value[tokens]
        for item in fields(whole)
        if item.name != "lengths"
    }
    return TokenBatch(**cut, lengths=whole.lengths[rows])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("cuts", [[0, 3, 6], [0, 1, 2, 3, 4, 5, 6], [0, 0, 6, 6]])
def test_loss_gradient_and_metrics_are_the_same_under_any_split(name: str, cuts: list[int]) -> None:
    config = Algorithm(**CONFIGS[name])
    objective, whole = Objective(config), batch(config)
    loss, metrics = objective(whole)
    (gradient,) = torch.autograd.grad(loss, whole.logprobs)
    pieces = [objective(part(whole, slice(a, b))) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
    total = sum(piece[0] for piece in pieces)
    assert isinstance(total, Tensor)
    torch.testing.assert_close(total, loss)
    torch.testing.assert_close(torch.autograd.grad(total, whole.logprobs)[0], gradient)
    for key, (value, weight) in metrics.items():
        torch.testing.assert_close(sum(p[1][key][0] for p in pieces), value, msg=key)
        torch.testing.assert_close(sum(p[1][key][1] for p in pieces), weight, msg=key)


@pytest.mark.parametrize("name", CONFIGS)
def test_masked_tokens_may_hold_anything(name: str) -> None:
    config = Algorithm(**CONFIGS[name])
    objective, clean = Objective(config), batch(config)
    off = clean.mask == 0
    per_token = {
        item.name: torch.where(
            off[:, None] if "top" in item.name else off, torch.nan, getattr(clean, item.name)
        )
        for item in fields(clean)
        if item.name not in ("mask", "lengths")
    }
    poisoned = replace(clean, **per_token)
    wanted, metrics = objective(clean)
    found, poisoned_metrics = objective(poisoned)
    torch.testing.assert_close(found, wanted)
    for key in metrics:
        torch.testing.assert_close(poisoned_metrics[key], metrics[key])
    (gradient,) = torch.autograd.grad(found, clean.logprobs)
    assert bool(torch.isfinite(gradient).all())
    assert torch.equal(gradient[off], torch.zeros_like(gradient[off]))


@pytest.mark.parametrize("name", [n for n in CONFIGS if n != "cispo"])  # its weight is detached on purpose
def test_gradients_match_finite_differences(name: str) -> None:
    config = Algorithm(**CONFIGS[name])
    objective, whole = Objective(config), batch(config, seed=1)

    def loss(p: Tensor, entropy: Tensor, tops: Tensor) -> Tensor:
        return objective(replace(whole, logprobs=p, entropy=entropy, top_logprobs=tops))[0]

    assert torch.autograd.gradcheck(loss, (whole.logprobs, whole.entropy, whole.top_logprobs))


def test_terms_add_up() -> None:
    config = Algorithm(**CONFIGS["all terms"])
    b = batch(config)
    loss, metrics = Objective(config)(b)
    on, c = b.mask.bool(), config.correction
    pg = losses.clipped_policy_loss(
        b.logprobs, b.old_logprobs, b.advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0
    ).loss
    gap = b.old_logprobs, b.rollout_logprobs, b.mask, b.lengths
    factor = importance.mask_outside(importance.log_weights(*gap, level=c.level).exp(), low=0.8, high=1.2)
    factor = factor * importance.veto(*gap, lowest=0.2)
    factor = factor * importance.opsm(
        b.logprobs, b.rollout_logprobs, b.advantages, b.mask, b.lengths, delta=0.01
    )
    assert b.ref_logprobs is not None
    assert b.entropy is not None
    kl = kl_estimate(b.logprobs, b.ref_logprobs, "k3", old_logprobs=b.old_logprobs)
    per_token = pg * factor + 0.1 * kl - 0.01 * b.entropy
    torch.testing.assert_close(loss, per_token[on].mean())
    torch.testing.assert_close(metrics["pg_loss"][0], (pg * factor)[on].mean().detach())
    torch.testing.assert_close(metrics["kl"][0] / metrics["kl"][1], kl[on].mean().detach())
    assert 0 < float(metrics["left_out_share"][0] / metrics["left_out_share"][1]) < 1


def test_kl_coefficient_can_be_moved_by_a_controller() -> None:
    config = Algorithm(kl_coef=0.1)
    objective, b = Objective(config), batch(config)
    first = objective(b)[0]
    objective.kl_coef = 0.3
    second = objective(b)[0]
    objective.kl_coef = 0.0
    base = objective(b)[0]
    torch.testing.assert_close(second - base, 3 * (first - base))


def test_kl_in_the_reward_stays_out_of_the_loss_but_is_reported() -> None:
    config = Algorithm(preset="ppo", kl_coef=0.1)
    b = batch(config)
    loss, metrics = Objective(config)(b)
    torch.testing.assert_close(loss, Objective(Algorithm(preset="ppo"))(replace(b, ref_logprobs=None))[0])
    assert "kl" in metrics


def test_what_is_needed_follows_from_the_config() -> None:
    plain = Objective(Algorithm())
    assert (plain.needs_ref, plain.needs_entropy, plain.needs_old, plain.needs_recompute) == (
        False,
        False,
        True,
        False,
    )
    full = Objective(Algorithm(kl_coef=0.1, entropy_coef=0.1, old_logprobs="recompute"))
    assert (full.needs_ref, full.needs_entropy, full.needs_recompute) == (True, True, True)
    assert not Objective(Algorithm(old_logprobs="rollout")).needs_old
    assert not Objective(Algorithm(preset="rloo")).needs_old
    sft = Objective(Algorithm(loss="sft", kl_coef=0.1, entropy_coef=0.1))
    assert sft.supervised
    assert (sft.needs_ref, sft.needs_entropy, sft.needs_old) == (False, False, False)


def test_missing_parts_are_named() -> None:
    config = Algorithm(kl_coef=0.1, entropy_coef=0.1)
    with pytest.raises(TrainerError, match="reference"):
        Objective(config)(replace(batch(config), ref_logprobs=None))
    with pytest.raises(TrainerError, match="entropy"):
        Objective(config)(replace(batch(config), entropy=None))


def test_supervised_loss_is_the_weighted_negative_log_likelihood() -> None:
    config = Algorithm(loss="sft", aggregation="token_mean")
    b = batch(config)
    b.old_logprobs.fill_(math.nan)
    b.advantages.fill_(math.nan)
    loss, _ = Objective(config)(b)
    torch.testing.assert_close(loss, -b.logprobs[b.mask.bool()].mean())


def custom_loss(batch: TokenBatch) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Twice REINFORCE."""
    return 2 * losses.reinforce_loss(batch.logprobs, batch.advantages), {
        "mine": (batch.mask.sum(), batch.mask.sum())
    }


def test_a_users_loss_takes_the_place_of_the_policy_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "my_loss", sys.modules[__name__])
    config = Algorithm(loss={"kind": "function", "function": "my_loss:custom_loss"}, aggregation="token_mean")
    b = batch(config)
    loss, metrics = Objective(config)(b)
    torch.testing.assert_close(loss, (-2 * b.advantages * b.logprobs)[b.mask.bool()].mean())
    assert "mine" in metrics


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "opd"])
def test_first_on_policy_step_passes_the_guard(name: str) -> None:
    config = Algorithm(preset=name, kl_coef=0.1)
    b = batch(config, dtype=torch.float32)
    same = b.logprobs.detach()
    b = replace(b, old_logprobs=same, rollout_logprobs=same, ref_logprobs=same)
    means = {key: float(total / weight) for key, (total, weight) in Objective(config)(b)[1].items()}
    check_on_policy(means | {"first_kl": means["kl"]})
    assert means["ratio_mean"] == 1.0
    assert derived(means)["importance_ess"] == 1.0


def test_guard_names_what_is_off() -> None:
    with pytest.raises(TrainerError, match="exactly 1"):
        check_on_policy({"ratio_distance": 1e-7, "approx_kl": 0.0})
    with pytest.raises(TrainerError, match="approx_kl must be below"):
        check_on_policy({"ratio_distance": 0.0, "approx_kl": 2e-9})
    with pytest.raises(TrainerError, match="first_kl"):
        check_on_policy({"ratio_distance": 0.0, "approx_kl": 0.0, "first_kl": math.nan})
    with pytest.raises(TrainerError, match="reports no"):
        check_on_policy({})
    check_on_policy({"ratio_distance": 0.0, "approx_kl": 0.0, "first_kl": -1e-12})
