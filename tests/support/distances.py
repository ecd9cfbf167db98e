"""How far apart two tensors are."""

from __future__ import annotations

from torch import Tensor


def distance(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    found, expected = found.double().cpu(), expected.detach().double().cpu()
    assert found.isfinite().all()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-9))
