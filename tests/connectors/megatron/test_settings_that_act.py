"""After a load, a step uses the numbers of the configuration; made again, those that it was made under."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.connectors.megatron.test_schedule import of_megatron
from tests.support.settings_table import TRAINED
from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import (
    Group,
    RankFailedError,
    Workers,
    configuration,
)

PARENT = {"lr": 1e-3, "betas": [0.9, 0.98], "eps": 1e-8, "weight_decay": 0.01, "clip_grad": 0.5}
OTHER = {"lr": 3e-4, "betas": [0.5, 0.6], "eps": 1e-2, "weight_decay": 0.5, "clip_grad": 0.01}
KINDS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "replicated": {"optimizer": {"distributed": False}},
    "bfloat16": {"dtype": "bfloat16"},
    "data of two": {"world": 2},
}


def config_of(model: Path, kind: str, numbers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    own = dict(KINDS[kind])
    optimizer = {**numbers, **own.pop("optimizer", {})}
    return configuration(model, own.pop("world", 1), optimizer=optimizer, **own, **changes)


def optimizer_state(rank: Any) -> list[dict[str, Any]]:
    """Of each parameter that the rank steps: value, moments, step count, gradient and whether it decays."""
    found = []
    for part in rank.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                held = part.optimizer.state[parameter]
                found.append(
                    {
                        "value": parameter.detach().float().clone(),
                        "grad": None if parameter.grad is None else parameter.grad.float().clone(),
                        "decays": group["wd_mult"],
                        **{name: value.clone() for name, value in held.items() if name != "param"},
                    }
                )
    return found


def stepped(before: list[dict[str, Any]], grads: list[Any], numbers: dict[str, Any]) -> list[torch.Tensor]:
    """Values after a step of torch's AdamW with these numbers, from these moments and gradients."""
    values = []
    for held, grad in zip(before, grads, strict=True):
        parameter = torch.nn.Parameter(held["value"].clone())
        adam = torch.optim.AdamW(
            [parameter],
            lr=numbers["lr"],
            betas=tuple(numbers["betas"]),
            eps=numbers["eps"],
            weight_decay=numbers["weight_decay"] * held["decays"],
        )
        adam.state[parameter] = {name: held[name].clone() for name in ("step", "exp_avg", "exp_avg_sq")}
        parameter.grad = grad
        adam.step()
        values.append(parameter.detach())
    return values


def check_step(group: Group, version: int, url: str, numbers: dict[str, Any], *given: Any) -> dict[str, Any]:
    """Train a step, and hold every value and the clipping against AdamW with these numbers."""
    before = group.run(optimizer_state)
    figures: dict[str, Any] = group.step(version, url, *given)[0]
    after = group.run(optimizer_state)
    square = 0.0
    for rank_before, rank_after in zip(before, after, strict=True):
        grads = [held["grad"] for held in rank_after]
        square += sum(float(grad.square().sum()) for grad in grads)
        for wanted, held in zip(stepped(rank_before, grads, numbers), rank_after, strict=True):
            torch.testing.assert_close(held["value"], wanted, rtol=0, atol=1e-8)
    assert figures["lr"] == numbers["lr"]
    clipped = min(figures["grad_norm"], numbers["clip_grad"])
    assert square**0.5 == pytest.approx(clipped, rel=1e-3)
    return figures


@pytest.fixture(scope="module")
def saved(
    workers: Workers, model: Callable[..., Path], batch: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """A checkpoint after two steps of the parent's numbers, by kind."""
    folder = tmp_path_factory.mktemp("parents")
    for kind in KINDS:
        with workers.group(config_of(model(), kind, PARENT)) as group:
            for step in (1, 2):
                group.train([step], batch.format(step))
            group.call("save", f"{folder}/{kind}")
    return {kind: f"{folder}/{kind}" for kind in KINDS}


@pytest.mark.parametrize("kind", slow_but(KINDS, "sharded", "bfloat16"))
def test_after_a_load_the_optimizer_has_the_numbers_of_the_configuration_and_the_moments_of_the_checkpoint(
    workers: Workers, model: Callable[..., Path], batch: str, saved: dict[str, str], kind: str
) -> None:
    with workers.group(config_of(model(), kind, PARENT)) as group:
        group.call("load", saved[kind])
        parents = group.run(optimizer_state)
        check_step(group, 3, batch.format(3), PARENT)
    with workers.group(config_of(model(), kind, OTHER)) as group:
        assert group.call("load", saved[kind])[0] == 2
        for mine, theirs in zip(group.run(optimizer_state), parents, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                for name in ("value", "step", "exp_avg", "exp_avg_sq"):
                    assert torch.equal(one[name], other[name])
        check_step(group, 3, batch.format(3), OTHER)
        check_step(group, 4, batch.format(4), OTHER)


def test_after_a_load_the_schedule_is_the_configurations_at_the_checkpoints_step(
    workers: Workers, model: Callable[..., Path], batch: str, tmp_path: Path
) -> None:
    parent = {"kind": "linear", "decay_steps": 2}
    other = {"kind": "cosine", "warmup_steps": 3, "decay_steps": 6, "min_lr": 1e-4}
    with workers.group(configuration(model(), schedule=parent)) as group:
        for step in (1, 2):
            group.train([step], batch.format(step))
        group.call("save", str(tmp_path / "saved"))
    with workers.group(configuration(model(), schedule=other)) as group:
        group.call("load", str(tmp_path / "saved"))
        rates = [group.train([step], batch.format(step))[0]["lr"] for step in (3, 4, 5, 6)]
    assert rates == of_megatron("cosine", 3, 1e-4, steps=6)[2:]


@pytest.mark.parametrize("kind", slow_but(["linear", "cosine"], "cosine"))
def test_a_run_extended_from_two_to_four_iterations_trains_at_the_rates_of_four(
    workers: Workers, model: Callable[..., Path], batch: str, tmp_path: Path, kind: str
) -> None:
    config = configuration(model(), schedule={"kind": kind})
    config["run"]["iterations"] = 2
    with workers.group(config) as group:
        for step in (1, 2):
            group.train([step], batch.format(step))
        group.call("save", str(tmp_path / "saved"))
    config["run"]["iterations"] = 4
    with workers.group(config) as group:
        group.call("load", str(tmp_path / "saved"))
        rates = [group.train([step], batch.format(step))[0]["lr"] for step in (3, 4)]
    assert rates == of_megatron(kind, 0, 0.0, steps=4)[2:]
    assert rates[0] > 0


def test_the_critics_rate_and_the_kl_coefficient_are_the_configurations_after_a_load(
    workers: Workers, model: Callable[..., Path], batch: str, tmp_path: Path
) -> None:
    def config(lr: float, kl_coef: float, target: float | None) -> dict[str, Any]:
        advantage = {"kind": "gae", "critic": {"lr": lr}}
        return configuration(
            model(),
            algorithm={"preset": "ppo", "advantage": advantage, "kl_coef": kl_coef, "kl_target": target},
        )

    with workers.group(config(1e-3, 0.1, 0.01)) as group:
        group.train([1], batch.format(1))
        group.call("save", str(tmp_path / "saved"))
    for target in (None, 0.01):
        with workers.group(config(2e-4, 0.3, target)) as group:
            group.call("load", str(tmp_path / "saved"))
            figures = group.train([2], batch.format(2))[0]
        assert (figures["critic_lr"], figures["kl_coef"]) == (2e-4, 0.3)


def test_after_a_load_the_critics_schedule_is_the_configurations_at_the_checkpoints_step(
    workers: Workers, model: Callable[..., Path], batch: str, tmp_path: Path
) -> None:
    """A schedule of its own, beside the policy's."""

    def config(schedule: dict[str, Any]) -> dict[str, Any]:
        made = configuration(model(), schedule={"kind": "constant"}, algorithm={"preset": "ppo"})
        critic = {"lr": made["trainer"]["optimizer"]["lr"], "schedule": schedule}
        made["algorithm"]["advantage"] = {"kind": "gae", "critic": critic}
        return made

    other = {"kind": "cosine", "warmup_steps": 3, "decay_steps": 6, "min_lr": 1e-4}
    with workers.group(config({"kind": "linear", "decay_steps": 2})) as group:
        for step in (1, 2):
            group.train([step], batch.format(step))
        group.call("save", str(tmp_path / "saved"))
    with workers.group(config(other)) as group:
        group.call("load", str(tmp_path / "saved"))
        rates = [group.train([step], batch.format(step))[0]["critic_lr"] for step in (3, 4, 5, 6)]
    assert rates == of_megatron("cosine", 3, 1e-4, steps=6)[2:]


# a step that is made again


@pytest.fixture(scope="module")
def recorded(workers: Workers, model: Callable[..., Path], batch: str) -> list[dict[str, Any]]:
    """Two steps of the parent's numbers on a schedule."""
    with workers.group(config_of(model(), "sharded", PARENT, schedule={"kind": "linear"})) as group:
        return [group.train([step], batch.format(step))[0] for step in (1, 2)]


def test_a_step_made_again_uses_the_numbers_of_its_time_and_the_next_one_those_of_now(
    workers: Workers, model: Callable[..., Path], batch: str, recorded: list[dict[str, Any]]
) -> None:
    then = [{**PARENT, "lr": step["lr"]} for step in recorded]
    assert then[0]["lr"] != then[1]["lr"]
    with workers.group(config_of(model(), "sharded", OTHER)) as group:
        for step in (1, 2):
            group.run(fill_state)
            again = check_step(group, step, batch.format(step), then[step - 1], None, recorded[step - 1])
            assert (again["loss"], again["grad_norm"]) == (
                recorded[step - 1]["loss"],
                recorded[step - 1]["grad_norm"],
            )
            assert again["settings"]["configuration"] == recorded[step - 1]["settings"]["configuration"]
        check_step(group, 3, batch.format(3), OTHER)


def fill_state(rank: Any) -> None:
    """Give Adam the zeros that its first step makes, so that they can be read before it."""
    from millrace.connectors.trainers.megatron.optim import parameter_state as module

    for part in rank.optimizer.chained_optimizers:
        module.fill_state(part.optimizer)


def test_a_step_of_another_algorithm_is_not_made_again_by_this_trainer(
    workers: Workers, model: Callable[..., Path], batch: str, recorded: list[dict[str, Any]]
) -> None:
    config = config_of(model(), "sharded", PARENT, algorithm={"loss": {"clip_high": 0.28}})
    with (
        workers.group(config) as group,
        pytest.raises(RankFailedError, match=r"algorithm.loss.clip_high = 0.2,"),
    ):
        group.step(1, batch.format(1), None, recorded[0])


def common_state(rank: Any) -> dict[str, Any]:
    return {
        "schedule": rank.learner.policy.schedule.state_dict(),
        "algorithm": rank.learner.algorithm_state(),
    }


def test_a_checkpoint_holds_of_settings_only_what_a_load_leaves_aside(
    workers: Workers, model: Callable[..., Path]
) -> None:
    """A load reads `num_steps` of a schedule, and the KL coefficient where the same one is configured."""
    with workers.group(configuration(model(), algorithm={"preset": "ppo", "kl_coef": 0.1})) as group:
        (state,) = group.run(common_state)
    assert state.keys() == {"schedule", "algorithm"}
    assert state["algorithm"].keys() == {"kl_controller", "reference_version", "critic_schedule"}
    assert state["algorithm"]["kl_controller"] == {"kl_coef": 0.1, "configured": 0.1}


def test_every_field_whose_number_is_trained_is_changed_in_this_file() -> None:
    numbers = {f"trainer.optimizer.{name}" for name in OTHER}
    schedule = {f"trainer.schedule.{name}" for name in ("kind", "warmup_steps", "decay_steps", "min_lr")}
    schedule |= {f"algorithm.advantage.critic.schedule.{name.rpartition('.')[2]}" for name in schedule}
    others = {"run.iterations", "algorithm.advantage.critic.lr", "algorithm.kl_coef"}
    assert numbers | schedule | others == TRAINED
