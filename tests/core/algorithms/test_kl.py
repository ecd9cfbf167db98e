"""KL estimators against exact sums over a vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from millrace.core.algorithms.kl import kl_estimate

KINDS = ("k1", "k2", "k3", "low_var", "abs")


def distributions(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(8, generator=g, dtype=torch.float64) * 0.5).requires_grad_()
    ref, old = (torch.randn(8, generator=g, dtype=torch.float64).mul(0.5).log_softmax(-1) for _ in range(2))
    return logits, ref, old


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_expected_value_is_the_kl(kind: str) -> None:
    logits, ref, _ = distributions(0)
    logp = logits.log_softmax(-1).detach()
    exact = (logp.exp() * (logp - ref)).sum()
    torch.testing.assert_close((logp.exp() * kl_estimate(logp, ref, kind)).sum(), exact)


def test_expected_gradient_of_k1_in_the_loss_is_zero_and_of_k2_that_of_the_kl() -> None:
    logits, ref, _ = distributions(1)
    logp = logits.log_softmax(-1)
    p = logp.detach().exp()
    (exact,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)
    (k1,) = torch.autograd.grad((p * kl_estimate(logp, ref, "k1")).sum(), logits, retain_graph=True)
    (k2,) = torch.autograd.grad((p * kl_estimate(logp, ref, "k2")).sum(), logits)
    torch.testing.assert_close(k1, torch.zeros_like(k1), atol=1e-12, rtol=0)
    torch.testing.assert_close(k2, exact)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_weighted_form_is_unbiased_off_policy_in_value_and_gradient(kind: str) -> None:
    logits, ref, old = distributions(2)
    logp = logits.log_softmax(-1)
    exact = (logp.exp() * (logp - ref)).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    estimate = (old.exp() * kl_estimate(logp, ref, kind, old_logprobs=old)).sum()  # type: ignore[arg-type]
    (found,) = torch.autograd.grad(estimate, logits)
    torch.testing.assert_close(estimate, exact)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_tokens_are_exact_zeros_even_over_nan(kind: str) -> None:
    p = torch.tensor([-1.0, math.nan, -3.0, math.inf], requires_grad=True)
    ref = torch.tensor([-1.5, -2.0, math.nan, -math.inf])
    old = torch.tensor([-1.2, math.nan, math.nan, math.nan])
    for weighted in (None, old):
        found = kl_estimate(p, ref, kind, mask=torch.tensor([1, 0, 0, 0]), old_logprobs=weighted)
        (gradient,) = torch.autograd.grad(found.sum(), p)
        assert found[1:].tolist() == [0, 0, 0]
        assert gradient[1:].tolist() == [0, 0, 0]
        assert bool(torch.isfinite(found).all())
        assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("kind", KINDS)
@given(st.floats(-30, 30), st.floats(-30, 0))
def test_bounds(kind: str, d: float, at: float) -> None:
    p = torch.tensor([at], dtype=torch.float64, requires_grad=True)
    found = kl_estimate(p, torch.tensor([at - d], dtype=torch.float64), kind)
    (gradient,) = torch.autograd.grad(found.sum(), p)
    assert bool(torch.isfinite(gradient).all())
    if kind != "k1":
        assert float(found.detach()) >= -1e-12
    if kind == "low_var":
        assert float(found.detach()) <= 10


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var"])
def test_gradients_match_finite_differences(kind: str) -> None:
    p = torch.tensor([-1.0, -0.2, -3.0], dtype=torch.float64, requires_grad=True)
    ref, old = torch.tensor([-1.4, -0.1, -2.0]).double(), torch.tensor([-1.1, -0.3, -2.9]).double()
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref, kind, old_logprobs=old), (p,))


def test_equal_policies_have_zero_kl() -> None:
    p = torch.tensor([-0.3, -7.0])
    for kind in KINDS:
        assert kl_estimate(p, p, kind).tolist() == [0, 0]


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]
