"""Grouped experts with adapters beside experts one after the other: equal bits forward, gradients equal up to rounding."""

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

EXPERTS = r"model\.layers\.\d+\.mlp\.experts\.\d+\."


@dataclass
class Case:
    """Adapters, and how far outputs and gradients may be."""

    rank: int
    targets: str
    output: float
    gradient: float
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "all": Case(4, "(gate|up|down)_proj", 0.0, 1e-6),
    # rows of 12 bytes, which grouped products do not take
    "rank 3": Case(3, "(gate|up|down)_proj", 5e-7, 1e-6),
    "first product": Case(4, "(gate|up)_proj", 0.0, 1e-6),
    "second product": Case(4, "down_proj", 0.0, 1e-6),
    "bfloat16": Case(4, "(gate|up|down)_proj", 4e-3, 2e-2, {"dtype": "bfloat16"}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: Any) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def group(case: Case, workers: Workers, model: Callable[..., Path]) -> Iterator[Group]:
    lora = {"rank": case.rank, "alpha": 12.0, "targets": f"{EXPERTS}{case.targets}"}
    config = configuration(model("qwen3_moe"), lora=lora, **copy.deepcopy(case.options))
    with workers.group(config) as each:
        yield each


def _products(rank: Any) -> dict[str, bool]:
    """Whether the experts with adapters are computed by grouped products, unless asked otherwise."""
    from millrace.connectors.trainers.megatron.model.experts import one_by_one

    given = expert_checks.Mixture(rank, "random")
    found = {}
    for name, way in (("grouped", None), ("one by one", one_by_one)):
        with way() if way else torch.enable_grad(), expert_checks.Products() as counted:
            given.passes()
        found[name] = counted.count > 0
    return found


@pytest.mark.parametrize("routing", expert_checks.ROUTINGS)
def test_outputs_and_gradients_are_those_of_experts_one_after_the_other(
    group: Group, case: Case, routing: str
) -> None:
    (far,) = group.run(expert_checks.both_ways, routing)
    assert far["output"] <= case.output
    assert far["gradient"] < case.gradient


def test_products_are_grouped(group: Group) -> None:
    assert group.run(_products) == [{"grouped": True, "one by one": False}]
