"""A committed step that is made again: under the settings of its time, and compared with what is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import pytest

from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.contracts.handles import TrainerHandle
from millrace.core.errors import ReplayedStepError
from millrace.core.replay import with_settings
from millrace.tasks.run_recorded import _lasts
from millrace.tasks.runtime.trainer import bring_up
from tests.support.trainer_ranks import Group, Workers, configuration, samples, write_batch

SCHEDULE = {"kind": "linear"}


class Ranks:
    """The ranks of a group, as far as bringing them up asks of them."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.made: list[dict[str, Any]] = []

    async def train(self, version: int, url: str, gap: float | None, recorded: Any = None) -> Any:
        self.made.append(self.group.call("train", version, url, gap, recorded)[0])
        return self.made[-1]


def iterations(config: dict[str, Any], count: int) -> dict[str, Any]:
    return {**config, "run": {**config["run"], "iterations": count}}


def brought_up(
    workers: Workers, config: dict[str, Any], folder: RunFolder, version: int
) -> list[dict[str, Any]]:
    """The steps that new ranks make again to hold a version."""
    with workers.group(config) as group:
        ranks = Ranks(group)
        try:
            asyncio.run(bring_up(cast(TrainerHandle, ranks), folder, version, 2))
        finally:
            ranks.made.append({"weights": group.run(weights)})
    return ranks.made


def weights(rank: Any) -> bytes:
    return b"".join(parameter.detach().numpy().tobytes() for parameter in rank.policy.parameters())


@pytest.fixture(scope="module")
def run(
    workers: Workers, model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunFolder, dict[str, Any], bytes]:
    """Two committed iterations of two steps each under a linear schedule over two iterations, without a checkpoint."""
    root = tmp_path_factory.mktemp("run")
    config = iterations(configuration(model(), schedule=SCHEDULE, global_batch=4), 2)
    folder = RunFolder(str(root), "a")
    with workers.group(config) as group:
        for index in (0, 1):
            first = 2 * index + 1
            rows = samples(first, count=4) + samples(first + 1, count=4)
            url = write_batch(root / "a" / folder.iteration_path(index), rows)
            steps = group.train([first, first + 1], url)
            commit(folder, index, steps)
        (trained,) = group.run(weights)
    return folder, config, trained


def commit(folder: RunFolder, index: int, steps: list[dict[str, Any]]) -> None:
    record = {"version": steps[-1]["version"], "steps": steps, "rest_s": 0.0, "seconds": 0.0}
    folder.iteration(index).write_json("step.json", record)
    folder.iteration(index).write_json("results/train_step.json", record)


def steps_of(folder: RunFolder, index: int) -> list[dict[str, Any]]:
    return deepcopy(folder.iteration(index).read_json("step.json")["steps"])


def test_a_run_that_is_extended_before_its_first_checkpoint_makes_its_steps_again_at_their_rates(
    workers: Workers, run: tuple[RunFolder, dict[str, Any], bytes]
) -> None:
    folder, config, trained = run
    *again, last = brought_up(workers, iterations(config, 5), folder, 4)
    recorded = steps_of(folder, 0) + steps_of(folder, 1)
    assert [step["lr"] for step in recorded] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    for name in ("lr", "loss", "grad_norm"):
        assert [step[name] for step in again] == [step[name] for step in recorded]
    assert last["weights"] == [trained]


def test_steps_without_settings_are_made_again_at_the_recorded_rates(
    workers: Workers, run: tuple[RunFolder, dict[str, Any], bytes], tmp_path: Path
) -> None:
    """As an earlier release stored them, whose rates were the next step's."""
    folder, config, _ = run
    again = brought_up(workers, iterations(config, 5), older(folder, tmp_path), 4)
    assert [step["lr"] for step in again[:4]] == pytest.approx([7.5e-4, 5e-4, 2.5e-4, 0.0])


def older(folder: RunFolder, root: Path) -> RunFolder:
    copy = RunFolder(str(root), "a")
    for index, rates in ((0, (7.5e-4, 5e-4)), (1, (2.5e-4, 0.0))):
        path = f"{folder.iteration_path(index)}/batch.parquet"
        copy.store.write(path, folder.store.read(path))
        steps = steps_of(folder, index)
        for step, rate in zip(steps, rates, strict=True):
            del step["settings"]
            step["lr"] = rate
        commit(copy, index, steps)
    return copy


@pytest.mark.parametrize(("name", "factor"), [("loss", 1 + 1e-12), ("grad_norm", 1 + 1e-12)])
def test_a_figure_that_differs_in_its_last_bits_stops_the_replay_naming_iteration_and_step(
    workers: Workers, run: tuple[RunFolder, dict[str, Any], bytes], tmp_path: Path, name: str, factor: float
) -> None:
    folder, config, _ = run
    changed = older(folder, tmp_path)
    commit(changed, 0, steps_of(folder, 0))
    steps = steps_of(folder, 1)
    steps[0][name] = steps[0][name] * factor + 1e-15
    commit(changed, 1, steps)
    with pytest.raises(
        ReplayedStepError, match=rf"iteration 2, step 3: made again, {name} is .*millrace branch"
    ):
        brought_up(workers, config, changed, 4)


def test_under_another_layout_a_step_may_differ_within_the_tolerance(
    workers: Workers, run: tuple[RunFolder, dict[str, Any], bytes], tmp_path: Path
) -> None:
    folder, config, _ = run
    two_ranks = {**config, "trainer": {**config["trainer"], "world_size": 2}}
    again = brought_up(workers, two_ranks, folder, 4)
    assert [step["loss"] for step in again[:4]] != [
        step["loss"] for i in (0, 1) for step in steps_of(folder, i)
    ]
    changed = older(folder, tmp_path)
    steps = steps_of(folder, 0)
    steps[1]["grad_norm"] *= 1.05
    commit(changed, 0, steps)
    with pytest.raises(ReplayedStepError, match="iteration 1, step 2: made again, grad_norm is"):
        brought_up(workers, two_ranks, changed, 4)


def test_a_replayed_step_that_differs_is_not_tried_again() -> None:
    assert _lasts(ReplayedStepError("it differs"))


def test_the_configuration_of_a_recorded_step_is_its_own(
    run: tuple[RunFolder, dict[str, Any], bytes],
) -> None:
    folder, config, _ = run
    then = RunConfig.model_validate(config)
    other = {"preset": "ppo", "loss": {"kind": "gspo"}, "kl_coef": 0.3}
    trainer = {**config["trainer"], "optimizer": {"lr": 1e-9}, "threads": 1}
    now = RunConfig.model_validate({**config, "algorithm": other, "trainer": trainer})
    restored = with_settings(now, cast(Any, steps_of(folder, 0)[0]))
    assert restored.algorithm == then.algorithm
    assert restored.trainer.optimizer == then.trainer.optimizer
    assert restored.trainer.schedule == then.trainer.schedule
