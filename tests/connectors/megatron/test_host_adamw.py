"""Optimizer state on the host: the same steps, checkpoints and refusals as without it, bit for bit on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from benchmarks.gpu.offload import compared, differences
from millrace.connectors.trainers import patches
from millrace.connectors.trainers.megatron.optim.host_adamw import HostAdamW
from millrace.connectors.trainers.megatron.rank import TrainerRank
from millrace.connectors.trainers.memory_errors import check_room_to_offload
from millrace.core.contracts.task_records import StepRequest
from millrace.core.errors import TrainerMemoryError
from tests.support.host_steps import check_refused_steps, equal, figures
from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import Workers, configuration

SCHEDULE = {"kind": "linear", "warmup_steps": 1, "decay_steps": 9}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {  # kind of model, ranks, changes
    "float32": ("qwen3", 1, {}),
    "bfloat16": ("qwen3", 1, {"dtype": "bfloat16"}),
    "no clipping": ("qwen3", 1, {"optimizer": {"clip_grad": 0.0}}),
    "decay in the gradient": ("qwen3", 1, {"megatron_optimizer": {"decoupled_weight_decay": False}}),
    "adapters": ("qwen3", 1, {"lora": {"rank": 4}}),
    "critic": ("qwen3", 1, {"algorithm": {"preset": "ppo"}}),
    "data of two": ("qwen3", 2, {"dtype": "bfloat16"}),
    "tensors of two": ("qwen3", 2, {"parallel": {"tensor": 2, "sequence": True}}),
    "two stages": ("qwen3", 2, {"parallel": {"pipeline": 2}}),
    "experts of two": ("qwen3_moe", 2, {"parallel": {"expert": 2}}),
}


def config_of(model: Path, case: str, offload: float) -> dict[str, Any]:
    _, world, changes = CASES[case]
    own = {"optimizer": {}, **changes}
    own["optimizer"] = {**own["optimizer"], "offload": offload}
    return configuration(model, world, schedule=SCHEDULE, **own)


def held(rank: Any) -> dict[str, Any]:
    """All that a rank's steps change, and what the host steps of it."""
    found: dict[str, Any] = {"schedule": rank.schedule.num_steps}
    models = [rank.learner.policy]
    models += [rank.learner.critic.trainable] if rank.learner.critic is not None else []
    for number, trained in enumerate(models):
        for name, parameter in trained.inner.named_parameters():
            found[f"{number}/{name}"] = parameter.detach().clone()
        for part in trained.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    state = part.optimizer.state[parameter]
                    key = f"{number}/optimizer/{len(found)}"
                    found[key] = {"main": parameter.detach().clone()}
                    found[key] |= {name: value.clone() for name, value in state.items()}
    return found


def on_host(rank: Any) -> float:
    """The fraction of a rank's parameters that the host steps."""
    trained = rank.learner.policy
    parts = trained.optimizer.chained_optimizers
    count = sum(p.numel() for part in parts for group in part.optimizer.param_groups for p in group["params"])
    return trained.host.elements / count if trained.host is not None else 0.0


@pytest.mark.parametrize("case", slow_but(CASES, "bfloat16", "data of two", "experts of two"))
def test_steps_are_equal_bit_for_bit_at_every_fraction(
    case: str, workers: Workers, model: Callable[..., Path], batch: str
) -> None:
    made = []
    for offload in (0.0, 0.5, 1.0):
        with workers.group(config_of(model(CASES[case][0]), case, offload)) as group:
            for share in group.run(on_host):
                assert share >= offload
                assert (share == 0) == (offload == 0)
            steps = [group.step(version, batch.format(version))[0] for version in (1, 2, 3)]
            made.append((figures(steps), group.run(held)))
    assert made[0][0] == made[1][0] == made[2][0]
    assert equal(made[0][1][0], made[1][1][0])
    for number in range(CASES[case][1]):
        assert equal(made[0][1][number], made[2][1][number])


def cut_small(rank: Any) -> int:
    """Let the host step all parameters in chunks of 1000 elements, which cut parameters and join them; returns how many chunks."""
    trained = rank.learner.policy
    trained.host = HostAdamW(trained.optimizer, 1.0, 1, chunk=1000)
    return sum(len(part.chunks) for part in trained.host.parts)


def test_the_size_of_chunks_changes_nothing(workers: Workers, model: Callable[..., Path], batch: str) -> None:
    made = []
    for small in (False, True):
        with workers.group(config_of(model(), "float32", 0.0)) as group:
            if small:
                assert group.run(cut_small)[0] > 10
            made.append((figures([group.step(v, batch.format(v))[0] for v in (1, 2)]), group.run(held)[0]))
    assert made[0][0] == made[1][0]
    assert equal(made[0][1], made[1][1])


@pytest.mark.parametrize(
    ("before", "after"), [(0.5, 1.0), (1.0, 0.0), (0.0, 1.0)], ids=["more", "none", "all"]
)
@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_loads_under_another_fraction_and_layout(
    before: float,
    after: float,
    world: int,
    workers: Workers,
    model: Callable[..., Path],
    batch: str,
    tmp_path: Path,
) -> None:
    """Saved by ranks of two, each of which holds a piece of a parameter that was cut between them, and loaded by one or two."""
    with workers.group(config_of(model(), "data of two", before)) as group:
        group.train([1], batch.format(1))
        group.call("save", str(tmp_path / "saved"))
        saved = group.run(held)
        expected = group.step(2, batch.format(2))[0]
    loading = configuration(model(), world, schedule=SCHEDULE, dtype="bfloat16", optimizer={"offload": after})
    with workers.group(loading) as group:
        assert group.call("load", str(tmp_path / "saved")) == [1] * world
        if world == 2:
            assert equal(group.run(held), saved)
        again = group.step(2, batch.format(2))[0]
    assert again["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    if world == 2:
        assert figures([again]) == figures([expected])


def test_refused_steps_change_nothing_on_the_host(
    workers: Workers, model: Callable[..., Path], batch: str, tmp_path: Path
) -> None:
    def config(offload: float) -> dict[str, Any]:
        return config_of(model(), "bfloat16", offload)

    check_refused_steps(workers, config, held, batch, tmp_path)


def test_the_kernel_beside_a_gpu_equals_adamw_within_rounding() -> None:
    """Ten steps of the fused kernel, which divides the gradient, beside torch's plain AdamW on a gradient that is multiplied."""
    torch.manual_seed(0)
    plain, fused = (torch.nn.Parameter(torch.randn(1000) * 0.02) for _ in range(2))
    fused.data.copy_(plain.data)
    one = torch.optim.AdamW([plain], lr=1e-4, betas=(0.9, 0.98), weight_decay=0.1, foreach=False)
    other = torch.optim.AdamW([fused], lr=1e-4, betas=(0.9, 0.98), weight_decay=0.1, fused=True)
    for _ in range(10):
        gradient = torch.randn(1000)
        plain.grad, fused.grad = gradient * (1 / 7.3), gradient.clone()
        patches.set_gradient_divisor(other, torch.tensor(7.3))
        one.step()
        other.step()
    assert float((plain - fused).abs().max()) < 10 * 2**-23 * float(plain.abs().max())


def test_too_little_memory_on_the_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    available = SimpleNamespace(available=100 * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    check_room_to_offload(2**30, 8)
    with pytest.raises(TrainerMemoryError, match=r"9 ranks need 108.0 GiB.*trainer.optimizer.offload"):
        check_room_to_offload(2**30, 9)


class SideHere:
    """A trainer of the benchmark in a rank's process, on the CPU."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.rank = TrainerRank(config, 0, 1)
        self.rank.setup(self.rank.address())
        self.version = 0

    def step(self, url: str) -> dict[str, Any]:
        self.version += 1
        made = self.rank.train(StepRequest(self.version, url))
        return {"loss": made["loss"], "grad_norm": made["grad_norm"], "phases": made["seconds"]}

    def close(self) -> None:
        self.rank.shutdown()


def benchmark(rank: Any, model: Path, batch: str) -> list[dict[str, Any]]:
    rank.shutdown()
    configs = {fraction: config_of(model, "bfloat16", fraction) for fraction in (0.0, 0.5, 1.0)}
    urls = [batch.format(version) for version in (1, 2, 3)]
    return compared(list(configs), lambda fraction: SideHere(configs[fraction]), urls, "cpu")


def test_the_benchmark_finds_fractions_equal_on_a_cpu(
    workers: Workers, model: Callable[..., Path], batch: str
) -> None:
    with workers.group(config_of(model(), "bfloat16", 0.0)) as group:
        (found,) = group.run(benchmark, model(), batch)
    assert [figures["offload"] for figures in found] == [0.0, 0.5, 1.0]
    assert found[0]["on_host"] == 0 < found[1]["on_host"] < found[2]["on_host"]
    for each in found[1:]:
        assert each["first_step"] == {"last_places": 0.0, "unequal": 0.0}
        assert (each["loss"], each["grad_norm"]) == (found[0]["loss"], found[0]["grad_norm"])


def test_a_difference_is_counted_in_last_places() -> None:
    one = [torch.tensor([1.0, 1.5, 0.02]), torch.tensor([3.0])]
    other = [torch.tensor([1.0 + 2**-23, 1.5, 0.02]), torch.tensor([3.0 - 3 * 2**-22])]
    assert differences(one, other, "cpu", 1e-6) == {"last_places": 3.0, "unequal": 0.5}
