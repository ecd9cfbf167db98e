"""Experts as grouped products beside experts one after the other: equal bits forward, gradients equal up to rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import expert_checks
from tests.support.trainer_ranks import Group, Workers, configuration


@dataclass
class Case:
    """A model, and how far its outputs and gradients may be."""

    kind: str
    output: float
    gradient: float
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "plain": Case("qwen3_moe", 0.0, 5e-7),
    "bfloat16": Case("qwen3_moe", 0.0, 8e-3, {"dtype": "bfloat16"}),
    # a sigmoid rounds otherwise at the end of a tensor
    "biases and a clamped gate": Case("gpt_oss", 5e-8, 5e-7),
    "whole optimizer": Case("gpt_oss", 5e-8, 5e-7, {"optimizer": {"distributed": False}}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: Any) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def group(case: Case, workers: Workers, model: Callable[..., Path]) -> Iterator[Group]:
    with workers.group(configuration(model(case.kind), **copy.deepcopy(case.options))) as each:
        yield each


@pytest.mark.parametrize("routing", expert_checks.ROUTINGS)
def test_outputs_are_equal_bit_for_bit_and_gradients_up_to_rounding(
    group: Group, case: Case, routing: str
) -> None:
    (far,) = group.run(expert_checks.both_ways, routing)
    assert far["output"] <= case.output
    assert far["gradient"] < case.gradient


def test_equal_tokens_are_rows_of_their_own(group: Group, case: Case) -> None:
    (far,) = group.run(expert_checks.both_ways, "random", True)
    assert far["output"] <= case.output
    assert far["gradient"] < case.gradient


@pytest.mark.parametrize("routing", expert_checks.ROUTINGS)
def test_gradients_are_added_to_totals_in_fp32(group: Group, routing: str) -> None:
    (found,) = group.run(expert_checks.totals, routing)
    assert found["far"] < 1e-6
    assert found["marked"] == found["parameters"] > 0


def _with_unset_memory(rank: Any, routing: str) -> bool:
    """Whether results stay the same if new tensors hold NaN."""

    def unset() -> None:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True

    try:
        return expert_checks.equal_again(rank, routing, unset)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("routing", expert_checks.ROUTINGS)
def test_no_result_depends_on_what_memory_held_before(group: Group, routing: str) -> None:
    assert group.run(_with_unset_memory, routing) == [True]


def test_weights_and_totals_are_read_where_they_lie(group: Group) -> None:
    assert group.run(expert_checks.in_place) == [{"weights": True, "gradients": True}]


def test_frozen_experts_compute_no_gradients_of_their_weights(group: Group, case: Case) -> None:
    (found,) = group.run(expert_checks.frozen)
    trained, frozen = found["products"]
    biases = 2 if case.kind == "gpt_oss" else 0  # whose gradients are grouped products too
    assert (trained, frozen) == (6 + biases, 4)
    assert found["equal"]


def test_the_map_of_a_router_gives_ascending_experts(group: Group) -> None:
    assert group.run(expert_checks.routers_choose) == [True]
