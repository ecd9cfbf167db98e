"""How full experts and ranks are: against counts of what the routers gave, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.expert_parallel import Job, figures_of
from millrace.connectors.trainers.megatron.model.expert_loads import ExpertLoads
from millrace.core.contracts.task_records import StepRequest
from tests.support.expert_checks import experts_layers
from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import Workers, configuration

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, changes
    "one rank": (1, {}),
    "computed again": (1, {"recompute": "full"}),
    "data of two": (2, {}),
    "experts of two": (2, {"parallel": {"expert": 2}}),
    "tensors and experts of two": (2, {"parallel": {"tensor": 2, "sequence": True, "expert": 2}}),
    "tensors of experts of two": (2, {"parallel": {"tensor": 2, "sequence": True}}),
    "stages of two": (2, {"parallel": {"pipeline": 2}}),
}


def counted(rank: Any, url: str) -> tuple[dict[str, float], list[list[Any]]]:
    """A step's metrics; and by layer [passes, E] how many tokens of this rank the router gave each expert, in passes with gradients."""
    layers = experts_layers(rank)
    seen: list[list[Any]] = [[] for _ in layers]

    def see(of_layer: list[Any]) -> Callable[..., None]:
        def hook(_part: Any, _inputs: Any, out: Any) -> None:
            if torch.is_grad_enabled():
                of_layer.append(out[1].sum(0).tolist())

        return hook

    hooks = [layer.router.register_forward_hook(see(of)) for layer, of in zip(layers, seen, strict=True)]
    metrics = rank.train(StepRequest(1, url))
    for hook in hooks:
        hook.remove()
    return metrics, seen


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "one rank", "computed again", "experts of two"))
def test_a_step_says_how_full_the_fullest_expert_is_and_how_long_ranks_wait(
    layout: str, workers: Workers, model: Callable[..., Path], batch: str
) -> None:
    world, changes = LAYOUTS[layout]
    with workers.group(configuration(model("qwen3_moe"), world, **changes)) as group:
        found = group.run(counted, batch.format(1))
    metrics = found[0][0]
    stages = changes.get("parallel", {}).get("pipeline", 1)
    # of each layer [ranks, passes, E]; each rank of a pipeline has other layers
    of_ranks = [seen for _, seen in found]
    layers = (
        [torch.tensor([layer]) for seen in of_ranks for layer in seen]
        if stages > 1
        else [torch.tensor(each) for each in zip(*of_ranks, strict=True)]
    )
    rows = torch.stack([layer.sum((0, 1)).double() for layer in layers])
    assert metrics["expert_imbalance"] == pytest.approx(float((rows.amax(1) / rows.mean(1)).mean()))
    assert metrics["expert_imbalance"] > 1
    experts = changes.get("parallel", {}).get("expert", 1)
    if experts == 1:
        assert "expert_wait" not in metrics
        return
    waits = []
    for layer in layers:
        for meeting in layer.sum(0).double():
            of_rank = meeting.view(experts, -1).sum(1)
            waits.append(float(1 - of_rank.mean() / of_rank.max()))
    assert metrics["expert_wait"] == pytest.approx(sum(waits) / len(waits), abs=1e-6)
    assert 0 < metrics["expert_wait"] < 1 - 1 / experts


def test_a_dense_model_has_no_experts_to_count(
    workers: Workers, model: Callable[..., Path], batch: str
) -> None:
    with workers.group(configuration(model())) as group:
        metrics = group.step(1, batch.format(1))[0]
    assert not {"expert_imbalance", "expert_wait"} & set(metrics)


@pytest.mark.parametrize(
    ("rows", "wait"), [([3, 1], 1 / 3), ([2, 2], 0.0), ([4, 0, 0, 0], 0.75), ([0, 0], 0.0)]
)
def test_ranks_wait_for_the_fullest(rows: list[int], wait: float) -> None:
    loads = ExpertLoads()
    loads.add(torch.ones(2, 3, dtype=torch.bool))
    loads.add_meeting(torch.tensor(rows))
    counts, waits, meetings = loads.take() or pytest.fail("nothing was counted")
    assert (counts.tolist(), float(waits), meetings) == ([2.0, 2.0, 2.0], pytest.approx(wait), 1)
    assert loads.take() is None


def test_the_benchmark_of_expert_parallel_ranks(
    workers: Workers, model: Callable[..., Path], batch: str
) -> None:
    config = configuration(model("qwen3_moe"), 2, dtype="bfloat16", parallel={"expert": 2})
    job = Job(config, [batch.format(step) for step in range(1, 5)], [20, 28], (1e6, 5e5), 1e12)
    with workers.group(config) as group:
        found = group.run(figures_of, job)
    for figures in found:
        assert len(figures["all_seconds"]) == 1
        assert figures["whole"]["share_of_peak"] == pytest.approx(1e-6 / figures["whole"]["seconds"])
        assert figures["layers"]["tokens_per_second"] == pytest.approx(48 / figures["layers"]["seconds"])
        assert figures["expert_imbalance"] == found[0]["expert_imbalance"] > 1
        assert 0 < figures["expert_wait"] < 0.5
