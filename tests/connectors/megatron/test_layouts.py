"""One global batch gives one step, however the model and the batch are cut over ranks; a checkpoint goes on in any other layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer_ranks import Workers, configuration

FIRST_OF_ONE_LAYER = {"num_layers_in_first_pipeline_stage": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tensor, sequence and data of four": {"parallel": {"tensor": 2, "sequence": True}},
    "tensor and pipeline of four": {"parallel": {"tensor": 2, "pipeline": 2}},
    "tensor, sequence and context of four": {"parallel": {"tensor": 2, "sequence": True, "context": 2}},
    "a key head on two ranks of four": {"parallel": {"tensor": 4, "sequence": True}},
    "pipeline and context of four": {"parallel": {"pipeline": 2, "context": 2}},
    "virtual stages and data of four": {"parallel": {"pipeline": 2, "virtual": 2}},
    "tensor": {"parallel": {"tensor": 2}},
    "tensor and sequence": {"parallel": {"tensor": 2, "sequence": True}},
    "pipeline": {"parallel": {"pipeline": 2}},
    "uneven stages": {"parallel": {"pipeline": 2}, "megatron": FIRST_OF_ONE_LAYER},
    "virtual stages": {"parallel": {"pipeline": 2, "virtual": 2}},
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
    "tensor of experts": {"parallel": {"expert_tensor": 2}},
    "tensor of all but experts": {"parallel": {"tensor": 2, "sequence": True, "expert_tensor": 1}},
    "expert and tensor of experts of four": {"parallel": {"expert": 2, "expert_tensor": 2}},
    "pipeline and expert of four": {"parallel": {"pipeline": 2, "expert": 2}},
    "pipeline": {"parallel": {"pipeline": 2}},
    "virtual stages": {"parallel": {"pipeline": 2, "virtual": 2}},
}
SOME = ("one rank", "tensor and sequence", "virtual stages", "data", "context")  # others are slow
SOME_OF_EXPERTS = ("one rank", "tensor, sequence and expert", "pipeline")
FIGURES = ("loss", "grad_norm", "kl", "entropy", "logprob_gap_mean", "logprob_gap_max")
OF_EXPERTS = ("loss", "grad_norm", "logprob_gap_mean")
ALGORITHM = {"kl_coef": 0.1, "entropy_coef": 0.01, "preset": "grpo"}


def world_of(layout: str) -> int:
    return 1 if layout == "one rank" else 4 if layout.endswith("of four") else 2


def trained(
    workers: Workers,
    model: Path,
    batch: str,
    folder: Path,
    layouts: Mapping[str, Any],
    names: Iterable[str],
    **more: Any,
) -> dict[str, Any]:
    """Of every layout: three steps, the same steps again from a checkpoint, and the last step from each other's checkpoint."""
    found: dict[str, Any] = {}
    for name in names:
        world = world_of(name)
        with workers.group(configuration(model, world, **more, **layouts[name])) as group:
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


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.slow)])
def reached(
    request: pytest.FixtureRequest,
    workers: Workers,
    model: Callable[..., Path],
    batch: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    folder, names = tmp_path_factory.mktemp("checkpoints"), SOME if request.param == "some" else LAYOUTS
    return trained(workers, model(num_hidden_layers=4), batch, folder, LAYOUTS, names, algorithm=ALGORITHM)


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.slow)])
def reached_by_experts(
    request: pytest.FixtureRequest,
    workers: Workers,
    model: Callable[..., Path],
    batch: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    folder, names = (
        tmp_path_factory.mktemp("checkpoints"),
        SOME_OF_EXPERTS if request.param == "some" else EXPERTS,
    )
    return trained(
        workers,
        model("qwen3_moe", num_hidden_layers=4, mlp_only_layers=[0, 1]),
        batch,
        folder,
        EXPERTS,
        names,
    )


def check_steps(found: dict[str, Any], figures: Iterable[str]) -> None:
    """Every layout's steps are one rank's; its own again bit for bit; and its last one from each other's checkpoint."""
    alone = found["one rank"]["steps"]
    for layout, mine in found.items():
        for figure in figures:
            steps = [step[figure] for step in mine["steps"]]
            assert steps == pytest.approx([step[figure] for step in alone], rel=1e-5, abs=1e-5), layout
            assert [step[figure] for step in mine["again"]] == steps, layout
            for other, resumed in mine["resumed"].items():
                assert resumed[figure] == pytest.approx(steps[2], rel=1e-5, abs=1e-5), (layout, other)


def test_a_dense_model_makes_the_steps_of_one_rank_and_goes_on_from_any_checkpoint(
    reached: dict[str, Any],
) -> None:
    check_steps(reached, FIGURES)


def test_a_mixture_of_experts_makes_the_steps_of_one_rank_and_goes_on_from_any_checkpoint(
    reached_by_experts: dict[str, Any],
) -> None:
    check_steps(reached_by_experts, OF_EXPERTS)
