"""One global batch gives one step, however the model and the batch are cut over ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer_ranks import Workers, configuration

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tensor, sequence and data of four": {"parallel": {"tensor": 2, "sequence": True}},
    "tensor and pipeline of four": {"parallel": {"tensor": 2, "pipeline": 2}},
    "tensor, sequence and context of four": {"parallel": {"tensor": 2, "sequence": True, "context": 2}},
    "tensor": {"parallel": {"tensor": 2}},
    "tensor and sequence": {"parallel": {"tensor": 2, "sequence": True}},
    "pipeline": {"parallel": {"pipeline": 2}},
    "data": {},
    "context": {"parallel": {"context": 2}},
    "data, replicated optimizer": {"optimizer": {"distributed": False}},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "expert": {"parallel": {"expert": 2}},
    "data": {},
    "tensor and sequence": {"parallel": {"tensor": 2, "sequence": True}},
    "tensor, sequence and expert": {"parallel": {"tensor": 2, "sequence": True, "expert": 2}},
    "tensor, sequence, expert and data of four": {"parallel": {"tensor": 2, "sequence": True, "expert": 2}},
    "pipeline": {"parallel": {"pipeline": 2}},
}
SOME = ("one rank", "tensor and sequence", "pipeline", "data", "context")  # others are slow
SOME_OF_EXPERTS = ("one rank", "tensor, sequence and expert", "pipeline")
FIGURES = ("loss", "grad_norm", "kl", "entropy", "logprob_gap_mean", "logprob_gap_max")


def world_of(layout: str) -> int:
    return 1 if layout == "one rank" else 4 if layout.endswith("of four") else 2


def figures(steps: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [{name: step[name] for name in FIGURES} for step in steps]


ALGORITHM = {"kl_coef": 0.1, "entropy_coef": 0.01, "preset": "grpo"}


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.slow)])
def reached(
    request: pytest.FixtureRequest,
    workers: Workers,
    model: Callable[..., Path],
    batch: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """Of every layout: three steps, the same steps again from a checkpoint, and the steps on from another's."""
    found: dict[str, Any] = {}
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in SOME if request.param == "some" else LAYOUTS:
        world = world_of(name)
        with workers.group(configuration(model(), world, algorithm=ALGORITHM, **LAYOUTS[name])) as group:
            group.call("save", f"{folder}/{name}/0")
            first = group.train([1], batch.format(1)) + group.train([2], batch.format(2))
            group.call("save", f"{folder}/{name}/2")
            first += group.train([3], batch.format(3))
            group.call("load", f"{folder}/{name}/0")
            again = [group.train([step], batch.format(step))[0] for step in (1, 2, 3)]
            resumed = {}
            for other in found:
                if ("replicated" in other) == ("replicated" in name):
                    assert group.call("load", f"{folder}/{other}/2") == [2] * world
                    resumed[other] = group.train([3], batch.format(3))[0]
            found[name] = {"steps": first, "again": again, "resumed": resumed}
    return found


def test_losses_and_gradient_norms_are_those_of_one_rank(reached: dict[str, Any]) -> None:
    for layout, found in reached.items():
        for mine, alone in zip(figures(found["steps"]), figures(reached["one rank"]["steps"]), strict=True):
            assert mine == pytest.approx(alone, rel=1e-5, abs=1e-5), layout


def test_repeated_at_the_same_layout_from_a_checkpoint_every_figure_is_bit_equal(
    reached: dict[str, Any],
) -> None:
    for layout, found in reached.items():
        assert figures(found["again"]) == figures(found["steps"]), layout


def test_a_checkpoint_of_any_other_layout_goes_on_as_if_it_were_ones_own(reached: dict[str, Any]) -> None:
    for layout, found in reached.items():
        own = figures(found["steps"])[2]
        for other, resumed in found["resumed"].items():
            assert figures([resumed])[0] == pytest.approx(own, rel=1e-5, abs=1e-5), (layout, other)


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.slow)])
def reached_by_experts(
    request: pytest.FixtureRequest,
    workers: Workers,
    model: Callable[..., Path],
    batch: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """Three steps of a mixture of experts in every layout, and the last from a checkpoint."""
    found: dict[str, Any] = {}
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in SOME_OF_EXPERTS if request.param == "some" else EXPERTS:
        with workers.group(configuration(model("qwen3_moe"), world_of(name), **EXPERTS[name])) as group:
            steps = [group.train([step], batch.format(step))[0] for step in (1, 2)]
            group.call("save", f"{folder}/{name}")
            steps += group.train([3], batch.format(3))
            group.call("load", f"{folder}/{name}")
            found[name] = {"steps": steps, "again": group.train([3], batch.format(3))[0]}
    return found


def test_a_mixture_of_experts_makes_the_steps_of_one_rank(reached_by_experts: dict[str, Any]) -> None:
    for layout, found in reached_by_experts.items():
        for mine, alone in zip(found["steps"], reached_by_experts["one rank"]["steps"], strict=True):
            for figure in ("loss", "grad_norm", "logprob_gap_mean"):
                assert mine[figure] == pytest.approx(alone[figure], rel=1e-5, abs=1e-5), layout


def test_a_mixture_of_experts_goes_on_from_its_checkpoint_bit_equal(
    reached_by_experts: dict[str, Any],
) -> None:
    for layout, found in reached_by_experts.items():
        for figure in ("loss", "grad_norm", "logprob_gap_mean"):
            assert found["again"][figure] == found["steps"][2][figure], layout
