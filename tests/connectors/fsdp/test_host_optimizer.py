"""The optimizer of FSDP's trainer on the host: the same steps, checkpoints and refusals as without it, bit for bit on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.connectors.trainers.fsdp.trained import MOMENTS
from tests.connectors.fsdp.test_fsdp_trainer import fsdp
from tests.support.host_steps import check_refused_steps, equal, figures
from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import Workers

SCHEDULE = {"kind": "linear", "warmup_steps": 1, "decay_steps": 9}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {  # kind of model, ranks, changes
    "float32": ("qwen3", 1, {}),
    "bfloat16": ("qwen3", 1, {"dtype": "bfloat16"}),
    "no clipping": ("qwen3", 1, {"optimizer": {"clip_grad": 0.0}}),
    "two ranks, tied": ("gemma3", 2, {}),
    "context of two": ("qwen3", 2, {"parallel": {"context": 2}}),
    "two copies": ("qwen3_moe", 2, {"parallel": {"replicate": 2}}),
}


def config_of(model: Callable[..., Path], case: str, offload: float, **more: Any) -> dict[str, Any]:
    kind, world, changes = CASES[case]
    optimizer = {**changes.get("optimizer", {}), "offload": offload}
    return fsdp(model(kind), world, **{"schedule": SCHEDULE, **changes, "optimizer": optimizer, **more})


def held(rank: Any) -> dict[str, Any]:
    """All that a rank's steps change."""
    policy = rank.learner.policy
    found: dict[str, Any] = {"schedule": policy.schedule.num_steps}
    for name, each in policy.inner.named_parameters():
        state = policy.optimizer.state[each]
        found[name] = {moment: state[moment].to_local().clone() for moment in MOMENTS}
        found[name] |= {"main": each.detach().to_local().clone(), "step": state["step"].clone()}
    return found


def on_host(rank: Any) -> float:
    """The fraction of a rank's numbers that the host steps."""
    policy = rank.learner.policy
    count = sum(each.to_local().numel() for each in policy.parameters)
    return policy.host.elements / count if policy.host is not None else 0.0


@pytest.mark.parametrize("case", slow_but(CASES, "two ranks, tied"))
def test_steps_are_equal_bit_for_bit_at_every_fraction(
    case: str, workers: Workers, model: Callable[..., Path], batch: str
) -> None:
    made = []
    for offload in (0.0, 0.5, 1.0):
        with workers.group(config_of(model, case, offload)) as group:
            for share in group.run(on_host):
                assert share >= offload
                assert (share == 0) == (offload == 0)
            steps = [group.step(version, batch.format(version))[0] for version in (1, 2, 3)]
            made.append((figures(steps), group.run(held)))
    for steps, states in made[1:]:
        assert steps == made[0][0]
        assert equal(states, made[0][1])


def cut_small(rank: Any) -> int:
    """Let the host step all parameters in chunks of 1000 numbers, which cut parameters and join them; returns how many chunks."""
    from millrace.connectors.trainers.fsdp.host_adamw import ShardedHostAdamW

    policy = rank.learner.policy
    policy.host = ShardedHostAdamW(policy.parameters, 1.0, 1, chunk=1000)
    policy.host.take_over(policy.optimizer)
    return len(policy.host.chunks)


@pytest.mark.slow
def test_the_size_of_chunks_changes_nothing(workers: Workers, model: Callable[..., Path], batch: str) -> None:
    made = []
    for small in (False, True):
        with workers.group(config_of(model, "float32", 0.0)) as group:
            if small:
                assert group.run(cut_small)[0] > 10
            made.append((figures([group.step(v, batch.format(v))[0] for v in (1, 2)]), group.run(held)))
    assert made[0][0] == made[1][0]
    assert equal(made[0][1], made[1][1])


@pytest.mark.parametrize(("before", "after"), [(0.5, 1.0), pytest.param(1.0, 0.0, marks=pytest.mark.slow)])
def test_a_checkpoint_loads_under_another_fraction(
    before: float, after: float, workers: Workers, model: Callable[..., Path], batch: str, tmp_path: Path
) -> None:
    with workers.group(config_of(model, "two ranks, tied", before)) as group:
        group.train([1], batch.format(1))
        group.call("save", str(tmp_path / "saved"))
        saved = group.run(held)
        expected = group.step(2, batch.format(2))[0]
    with workers.group(config_of(model, "two ranks, tied", after)) as group:
        assert group.call("load", str(tmp_path / "saved")) == [1, 1]
        assert equal(group.run(held), saved)
        assert figures([group.step(2, batch.format(2))[0]]) == figures([expected])


def test_refused_steps_change_nothing_on_the_host(
    workers: Workers, model: Callable[..., Path], batch: str, tmp_path: Path
) -> None:
    def config(offload: float) -> dict[str, Any]:
        return config_of(model, "bfloat16", offload)

    check_refused_steps(workers, config, held, batch, tmp_path)


def moved_weights(rank: Any) -> bool:
    """Whether weights that change beside the optimizer, as a checkpoint's do, are those of the next step on the host."""
    policy = rank.learner.policy
    with torch.no_grad():
        for each in policy.parameters:
            each.to_local().mul_(2.0)
    policy.go_on_after(policy.schedule.num_steps)
    return all(torch.equal(shard.main, shard.target) for shard in policy.host.shards)


def test_the_host_takes_weights_that_were_read(workers: Workers, model: Callable[..., Path]) -> None:
    with workers.group(config_of(model, "float32", 1.0)) as group:
        assert group.run(moved_weights) == [True]
