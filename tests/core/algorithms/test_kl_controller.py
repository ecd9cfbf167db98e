"""The KL coefficient from step to step."""

from __future__ import annotations

import pytest

from millrace.core.algorithms.kl import KLController
from millrace.core.config.algorithm import Algorithm


def test_adaptive_coefficient_moves_towards_the_target_and_survives_a_restart() -> None:
    config = Algorithm(kl_coef=0.1, kl_target=0.05, kl_horizon=100)
    controller = KLController(config)
    assert controller.update(1.0, 50) == pytest.approx(0.11)  # too far: error clipped at +0.2
    assert controller.update(0.0, 50) == pytest.approx(0.099)
    assert controller.update(0.05, 50) == pytest.approx(0.099)
    again = KLController(config)
    again.restore(controller.state())
    assert again.value == controller.value


def test_fixed_coefficient_stays() -> None:
    controller = KLController(Algorithm(kl_coef=0.1))
    assert controller.update(9.0, 100) == 0.1
    controller.restore({"kl_coef": 5.0})
    assert controller.value == 0.1


def test_a_branch_that_configures_another_coefficient_begins_with_it() -> None:
    parent = KLController(Algorithm(kl_coef=0.1, kl_target=0.05))
    parent.update(1.0, 50)
    branch = KLController(Algorithm(kl_coef=0.4, kl_target=0.05))
    branch.restore(parent.state())
    assert branch.value == 0.4
    branch.update(1.0, 50)
    again = KLController(Algorithm(kl_coef=0.4, kl_target=0.05))
    again.restore(branch.state())
    assert again.value == branch.value
