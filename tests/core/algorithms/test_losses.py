"""Losses: gradients by finite differences, and the conventions that frameworks disagree on."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from millrace.core.algorithms import losses

LENGTHS = torch.tensor([3, 1, 4])
MASK = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1])
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def numbers(seed: int, n: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, old log-probs and advantages with no ratio on a bound, where the loss has a kink."""
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(n, generator=g, dtype=torch.float64) * 2 - 0.1
    gap = torch.tensor([0.05, -0.1, 0.4, -0.5, 0.1, 0.35, -0.4, 0.0], dtype=torch.float64)
    return (old + gap).requires_grad_(), old, torch.randn(n, generator=g, dtype=torch.float64) * 2


POLICY: dict[str, Callable[[Tensor, Tensor, Tensor], losses.PolicyLoss]] = {
    "clipped": lambda p, o, a: losses.clipped_policy_loss(p, o, a, **CLIP),
    "dual": lambda p, o, a: losses.clipped_policy_loss(p, o, a, **CLIP, dual_clip=1.33),
    "gspo": lambda p, o, a: losses.gspo_loss(p, o, a, lengths=LENGTHS, mask=MASK, **CLIP),
    "sapo": lambda p, o, a: losses.sapo_loss(p, o, a),
}


@pytest.mark.parametrize("name", POLICY)
@pytest.mark.parametrize("seed", [0, 1])
def test_policy_gradients_match_finite_differences(name: str, seed: int) -> None:
    logprobs, old, a = numbers(seed)
    assert torch.autograd.gradcheck(lambda p: POLICY[name](p, old, a).loss, (logprobs,))


def test_other_gradients_match_finite_differences() -> None:
    logprobs, old, a = numbers(3)
    assert torch.autograd.gradcheck(lambda p: losses.reinforce_loss(p, a), (logprobs,))
    assert torch.autograd.gradcheck(losses.sft_loss, (logprobs,))
    assert torch.autograd.gradcheck(lambda v: losses.value_loss(v, old, a), (logprobs,))
    assert torch.autograd.gradcheck(lambda v: losses.value_loss(v, old, a, clip=0.2), (logprobs,))


def test_cispo_gradient_is_the_clipped_ratio_times_the_advantage() -> None:
    logprobs, old, a = numbers(4)
    loss = losses.cispo_loss(logprobs, old, a, **CLIP).loss
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    ratio = (logprobs.detach() - old).exp()
    torch.testing.assert_close(gradient, -ratio.clamp(0.8, 1.28) * a)


def test_on_policy_every_ratio_loss_has_the_policy_gradient() -> None:
    _, old, a = numbers(5)
    for name in ("clipped", "dual", "sapo"):
        logprobs = old.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(POLICY[name](logprobs, old, a).loss.sum(), logprobs)
        torch.testing.assert_close(gradient, -a)


def test_clipped_tokens_have_no_gradient_and_are_counted() -> None:
    old = torch.zeros(4)
    logprobs = torch.tensor([0.5, -0.5, 0.5, -0.5]).requires_grad_()
    a = torch.tensor([1.0, -1.0, -1.0, 1.0])
    found = losses.clipped_policy_loss(logprobs, old, a, clip_low=0.2, clip_high=0.2)
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs)
    assert found.clipped_high.tolist() == [True, False, False, False]
    assert found.clipped_low.tolist() == [False, True, False, False]
    assert (gradient == 0).tolist() == [True, True, False, False]


def test_dual_clip_bounds_the_loss_of_negative_advantages_only() -> None:
    old, logprobs = torch.zeros(2), torch.full((2,), 3.0)
    found = losses.clipped_policy_loss(
        logprobs, old, torch.tensor([-2.0, 2.0]), clip_low=0.2, clip_high=0.2, dual_clip=3
    )
    torch.testing.assert_close(found.loss, torch.tensor([6.0, -2.4]))
    assert found.clipped_high.tolist() == [True, True]
    with pytest.raises(ValueError, match="above 1"):
        losses.clipped_policy_loss(logprobs, old, old, clip_low=0.2, clip_high=0.2, dual_clip=1)


def test_gspo_ratio_is_the_geometric_mean_over_unmasked_tokens() -> None:
    logprobs, old, a = numbers(6)
    poisoned = torch.where(MASK.bool(), logprobs, torch.nan)
    found = losses.gspo_loss(poisoned, old, a, lengths=LENGTHS, mask=MASK, clip_low=1.0, clip_high=9.0)
    at = 0
    for length in LENGTHS.tolist():
        on = [t for t in range(at, at + length) if MASK[t]]
        expected = math.exp(sum(float(logprobs[t].detach() - old[t]) for t in on) / len(on))
        assert found.ratio[at : at + length].tolist() == pytest.approx([expected] * length)
        at += length


def test_gspo_under_sequence_mean_has_the_paper_s_gradient() -> None:
    """d/dp of -A s is -A s / |o| on each unmasked token of a sequence (one sequence, unclipped)."""
    old = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    logprobs = (old + torch.tensor([0.01, -0.02, 0.03], dtype=torch.float64)).requires_grad_()
    a, on = torch.full((3,), 1.5, dtype=torch.float64), torch.ones(3)
    found = losses.gspo_loss(
        logprobs, old, a, lengths=torch.tensor([3]), mask=on, clip_low=0.2, clip_high=0.2
    )
    (gradient,) = torch.autograd.grad(found.loss.mean(), logprobs)
    ratio = math.exp((0.01 - 0.02 + 0.03) / 3)
    torch.testing.assert_close(gradient, torch.full((3,), -1.5 * ratio / 3, dtype=torch.float64))


@given(st.floats(-200, 200))
def test_extreme_gaps_stay_finite(gap: float) -> None:
    for function in POLICY.values():
        p = torch.full((8,), gap, requires_grad=True)
        found = function(p, torch.zeros(8), torch.tensor([1.0, -1.0] * 4))
        (gradient,) = torch.autograd.grad(found.loss.sum(), p)
        assert bool(torch.isfinite(found.loss).all())
        assert bool(torch.isfinite(gradient).all())


def test_half_precision_is_computed_in_fp32() -> None:
    half = torch.tensor([-1.5, -0.25], dtype=torch.bfloat16)
    assert losses.clipped_policy_loss(half, half, half, **CLIP).loss.dtype == torch.float32
    assert losses.sft_loss(half).dtype == torch.float32


def test_value_loss_takes_the_larger_of_plain_and_clipped_error() -> None:
    values, old, returns = torch.tensor([1.0, 1.0]), torch.tensor([0.0, 0.9]), torch.tensor([0.0, 2.0])
    assert losses.value_loss(values, old, returns).tolist() == [0.5, 0.5]
    # first: bounded to 0.2, error 0.04 < 1; second: not bounded
    assert losses.value_loss(values, old, returns, clip=0.2).tolist() == [0.5, 0.5]
    assert losses.value_loss(
        torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([3.0]), clip=0.5
    ).tolist() == [pytest.approx(0.5 * 1.5**2)]


def test_distillation_term_descends_the_reverse_kl() -> None:
    """The policy gradient with the term as advantage is the gradient of -KL(student || teacher), summed over the vocabulary."""
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(6, dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    kl = (logp.exp() * (logp - teacher)).sum()
    (wanted,) = torch.autograd.grad(kl, logits, retain_graph=True)
    term = losses.distillation_term(logp, teacher, 1.0)
    expected_loss = (logp.detach().exp() * losses.reinforce_loss(logp, term)).sum()
    (found,) = torch.autograd.grad(expected_loss, logits)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_top_k_kl_is_the_kl_of_those_tokens_and_the_rest(k: int) -> None:
    """At most the KL over the vocabulary, equal to it where k is all of it, and so are the gradients."""
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(5, 6, dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    whole = (logp.exp() * (logp - teacher)).sum(-1)
    tops, ids = teacher.topk(k)
    found = losses.top_k_kl(logp.gather(1, ids), tops)
    assert (found > 0).all()
    assert (found <= whole + 1e-9).all()
    if k == 6:
        torch.testing.assert_close(found, whole, atol=1e-9, rtol=0)
        (wanted,) = torch.autograd.grad(whole.sum(), logits, retain_graph=True)
        (got,) = torch.autograd.grad(found.sum(), logits)
        torch.testing.assert_close(got, wanted, atol=1e-9, rtol=0)
        return
    ours, theirs = ((x, 1 - x.sum(-1, keepdim=True)) for x in (logp.gather(1, ids).exp(), tops.exp()))
    p, q = torch.cat(ours, -1), torch.cat(theirs, -1)
    torch.testing.assert_close(found, (p * (p / q).log()).sum(-1))


def test_top_k_kl_of_a_certain_teacher_is_finite() -> None:
    """One whose k tokens have all the probability there is, against a policy that has none of it there."""
    ours = torch.tensor([[-30.0, -31.0], [-1e-7, -20.0]], requires_grad=True)
    found = losses.top_k_kl(ours, torch.tensor([[0.0, -100.0], [0.0, -100.0]]))
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert ours.grad is not None
    assert torch.isfinite(ours.grad).all()
