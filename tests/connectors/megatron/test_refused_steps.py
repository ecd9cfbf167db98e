"""A refused step changes nothing on any rank, whatever the layout and the models beside the policy: it can be tried again."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from millrace.core.config.trainer import Parallel
from millrace.core.logprob_gap import LogprobGuard
from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import (
    OF_FSDP,
    Group,
    RankFailedError,
    Workers,
    configuration,
    samples,
    write_batch,
)

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp2": {},
    "tp2": {"parallel": {"tensor": 2}},
    "tp2 and sequence": {"parallel": {"tensor": 2, "sequence": True}},
    "pp2": {"parallel": {"pipeline": 2}},
    "cp2": {"parallel": {"context": 2}},
    "vpp2": {"parallel": {"pipeline": 2, "virtual": 2}},
    "ep2": {"parallel": {"expert": 2}},
    "etp2": {"parallel": {"expert_tensor": 2}},
}
BESIDE: dict[str, dict[str, Any]] = {
    "reference": {"preset": "grpo", "kl_coef": 0.1},
    "teacher": {"distillation_coef": 0.5},
    "critic": {"preset": "ppo", "advantage": {"critic": {"lr": 1e-2}}},
}
FIGURES = ("loss", "grad_norm", "kl", "teacher_kl", "value_loss", "critic_grad_norm", "logprob_gap_mean")


def test_every_way_to_cut_the_model_is_in_the_table() -> None:
    cut = {name for changes in LAYOUTS.values() for name in changes.get("parallel", {})}
    assert cut == set(Parallel.model_fields) - OF_FSDP


@pytest.fixture(scope="module")
def iteration(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """URLs of an iteration of two steps, and of the same with a reward and an advantage that are not finite."""
    folder, rows = tmp_path_factory.mktemp("iteration"), samples(1) + samples(2)
    good = write_batch(folder / "good", rows)
    rows[3] |= {"reward": math.inf, "advantage": math.inf}
    return good, write_batch(folder / "bad", rows)


# every layout and every model beside the policy once
@pytest.mark.parametrize(
    ("layout", "beside"),
    slow_but(
        product(LAYOUTS, BESIDE),
        *[("one", beside) for beside in BESIDE],
        *[("dp2", "teacher"), ("tp2 and sequence", "critic"), ("pp2", "reference"), ("cp2", "critic")],
    ),
)
def test_a_refused_step_is_then_made_as_if_it_had_not_been_tried(
    workers: Workers,
    model: Callable[..., Path],
    iteration: tuple[str, str],
    tmp_path: Path,
    layout: str,
    beside: str,
) -> None:
    good, bad = iteration
    kind, algorithm = "qwen3_moe" if layout in ("ep2", "etp2") else "qwen3", dict(BESIDE[beside])
    layers = {"num_hidden_layers": 4} if layout == "vpp2" else {}
    if beside == "teacher":
        algorithm["teacher"] = str(model(kind, num_attention_heads=8, **layers))
    world = 1 if layout == "one" else 2
    config = configuration(model(kind, **layers), world, algorithm=algorithm, **LAYOUTS[layout])
    with workers.group(config) as group:
        group.call("save", str(tmp_path / "start"))
        never_refused = group.train([1, 2], good)
        group.call("load", str(tmp_path / "start"))
        refused(group, 1, bad, "the loss is")
        refused(group, 1, good, "engine and trainer disagree", guard=1e-9)
        again = group.train([1], good)
        refused(group, 2, good, "engine and trainer disagree", guard=1e-9)
        again += group.train([2], good)
    assert figures(again) == figures(never_refused)


@pytest.mark.parametrize("layout", ["one", "pp2"])
def test_a_batch_without_advantages_is_refused_by_every_rank(
    workers: Workers, model: Callable[..., Path], iteration: tuple[str, str], tmp_path: Path, layout: str
) -> None:
    """Before any rank computes: the last pipeline stage alone reads them, and the others would wait for it."""
    rows = samples(1)
    for row in rows:
        row["advantage"] = None
    world = 1 if layout == "one" else 2
    with workers.group(configuration(model(), world, **LAYOUTS[layout])) as group:
        with pytest.raises(
            RankFailedError, match=r"TrainerError.*8 of the step's 8 samples have no advantage"
        ):
            group.step(1, write_batch(tmp_path, rows))
        assert group.train([1], iteration[0])[0]["version"] == 1


def refused(group: Group, version: int, url: str, message: str, guard: float | None = None) -> None:
    with pytest.raises(RankFailedError, match=f"RefusedStepError.*{message}"):
        group.step(version, url, None if guard is None else LogprobGuard(guard))
    assert {state["version"] for state in group.call("state")} == {version - 1}


def figures(steps: list[dict[str, Any]]) -> list[dict[str, float]]:
    found = [{name: step[name] for name in FIGURES if name in step} for step in steps]
    assert all(math.isfinite(value) for step in found for value in step.values())
    return found
