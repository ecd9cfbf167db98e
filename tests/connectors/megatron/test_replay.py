"""A committed step that is made again: under the settings of its time, and compared with what is recorded."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import pytest

from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.storage.store import Store
from millrace.connectors.trainers.megatron.optim.host_adamw import HostAdamW
from millrace.core.config import RunConfig
from millrace.core.contracts.task_records import StepRequest
from millrace.core.errors import CorruptFileError, ReplayedStepError
from millrace.core.replay import with_settings
from millrace.tasks.run_recorded import _lasts
from millrace.tasks.runtime.trainer import bring_up
from tests.support.asked_here import RanksHere
from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import Group, RankFailedError, Workers, configuration, samples, write_batch

SCHEDULE = {"kind": "linear"}


class Ranks(RanksHere):
    """The ranks of a group, as far as bringing them up asks of them."""

    def __init__(self, group: Group, load_error: type[Exception] = RankFailedError) -> None:
        """load_error: what a load that fails raises here, where another process has raised it."""
        self.group = group
        self.load_error = load_error
        self.made: list[dict[str, Any]] = []

    async def load(self, url: str) -> int:
        try:
            return int(self.group.call("load", url)[0])
        except RankFailedError as error:
            raise self.load_error(str(error)) from error

    async def train(self, step: StepRequest) -> Any:
        self.made.append(self.group.call("train", step)[0])
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
            asyncio.run(bring_up(cast(Any, ranks), folder, version, 2))
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
    store = folder.iteration(index)
    made = {"version": steps[-1]["version"], "steps": steps, "rest_s": 0.0, "seconds": 0.0}
    files = [store.entry("batch.parquet").record(), store.write_json("step.json", made).record()]
    for task, record in (("filter", {"files": files[:1]}), ("train_step", {**made, "files": files[1:]})):
        store.write_sealed(f"results/{task}.json", {"metadata": {}, "result": json.dumps(record)})


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


@pytest.mark.parametrize(
    ("name", "factor"), slow_but([("loss", 1 + 1e-12), ("grad_norm", 1 + 1e-12)], ("loss", 1 + 1e-12))
)
def test_a_figure_that_differs_in_its_last_bits_stops_the_replay_naming_iteration_and_step(
    workers: Workers, run: tuple[RunFolder, dict[str, Any], bytes], tmp_path: Path, name: str, factor: float
) -> None:
    folder, config, _ = run
    changed = copied(folder, tmp_path)
    steps = steps_of(folder, 1)
    steps[0][name] = steps[0][name] * factor + 1e-15
    commit(changed, 1, steps)
    with pytest.raises(
        ReplayedStepError, match=rf"iteration 2, step 3: made again, {name} is .*millrace branch"
    ):
        brought_up(workers, config, changed, 4)


class DiesAfterOne(list[Any]):
    """Chunks of a step, of which the process is killed after the first."""

    def __iter__(self) -> Iterator[Any]:
        yield self[0]
        os.kill(os.getpid(), signal.SIGKILL)


def die_between_chunks(rank: Any) -> None:
    """Let the next step of the policy's optimizer die so."""
    trained = rank.learner.policy
    trained.host = HostAdamW(trained.optimizer, 1.0, 1, chunk=1000)
    for part in trained.host.parts:
        assert len(part.chunks) > 2
        part.chunks = DiesAfterOne(part.chunks)


def trained_to_death(workers: Workers, config: dict[str, Any], url: str) -> None:
    with workers.group(config) as group:
        group.train([1], url)
        group.run(die_between_chunks)
        group.train([2], url)


@pytest.mark.parametrize("offload", [0.0, 1.0])
def test_a_step_that_was_killed_between_chunks_on_the_host_is_made_again(
    workers: Workers, run: tuple[RunFolder, dict[str, Any], bytes], offload: float
) -> None:
    """New ranks make all steps again, also with another fraction of the optimizer on the host than the record's, which is 0."""
    folder, config, trained = run
    optimizer = {**config["trainer"]["optimizer"], "offload": offload}
    on_host = {**config, "trainer": {**config["trainer"], "optimizer": optimizer}}
    with pytest.raises(RankFailedError, match="the process died"):
        trained_to_death(workers, config, folder.iteration(0).url_of("batch.parquet"))
    *again, last = brought_up(workers, on_host, folder, 4)
    recorded = steps_of(folder, 0) + steps_of(folder, 1)
    for name in ("lr", "loss", "grad_norm"):
        assert [step[name] for step in again] == [step[name] for step in recorded]
    assert last["weights"] == [trained]


@pytest.mark.slow
def test_under_another_layout_a_step_may_differ_within_the_tolerance(
    workers: Workers, run: tuple[RunFolder, dict[str, Any], bytes], tmp_path: Path
) -> None:
    folder, config, _ = run
    two_ranks = {**config, "trainer": {**config["trainer"], "world_size": 2}}
    again = brought_up(workers, two_ranks, folder, 4)
    assert [step["loss"] for step in again[:4]] != [
        step["loss"] for i in (0, 1) for step in steps_of(folder, i)
    ]
    changed = copied(folder, tmp_path)
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


def copied(folder: RunFolder, root: Path) -> RunFolder:
    copy = RunFolder(str(root), "a")
    for path in folder.store.list():
        copy.store.write(path, folder.store.read(path))
    return copy


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_batch_that_is_not_the_committed_one_is_not_trained(
    workers: Workers, run: tuple[RunFolder, dict[str, Any], bytes], tmp_path: Path
) -> None:
    """It was: negated advantages gave other weights, in silence."""
    folder, config, _ = run
    changed = copied(folder, tmp_path)
    rows = [{**row, "advantage": -row["advantage"]} for row in samples(3, count=4) + samples(4, count=4)]
    write_batch(tmp_path / "a" / folder.iteration_path(1), rows)
    with pytest.raises(RankFailedError, match=r"CorruptFileError: .*000001/batch\.parquet: its sha256 is"):
        brought_up(workers, config, changed, 4)


def test_a_broken_newest_checkpoint_gives_way_to_the_one_before_and_replay_makes_the_rest(
    workers: Workers,
    run: tuple[RunFolder, dict[str, Any], bytes],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, config, trained = run
    saved = copied(folder, tmp_path)
    urls = [saved.store.url_of(saved.checkpoint_path(done)) for done in (1, 2)]
    with workers.group(config) as group:
        for index, url in enumerate(urls):
            group.train([2 * index + 1, 2 * index + 2], saved.iteration(index).url_of("batch.parquet"))
            group.call("save", url)
    flip(Path(urls[1]) / "__0_0.distcp")
    broken: list[int] = []
    with workers.group(config) as group:
        ranks = cast(Any, Ranks(group, CorruptFileError))
        result = asyncio.run(bring_up(ranks, saved, 4, 2, on_broken=broken.append))
        assert group.run(weights) == [trained]
    assert (result.checkpoint, result.loaded_version, broken) == (1, 2, [2])
    assert "checkpoint 2 is not whole" in caplog.text
    flip(Path(urls[0]) / "complete.json")
    with workers.group(config) as group:
        ranks = cast(Any, Ranks(group, CorruptFileError))
        assert asyncio.run(bring_up(ranks, saved, 4, 2)).checkpoint is None
        assert group.run(weights) == [trained]


def test_a_complete_checkpoint_of_another_version_is_kept_until_its_folder_is_removed(
    workers: Workers, run: tuple[RunFolder, dict[str, Any], bytes], tmp_path: Path
) -> None:
    folder, config, _ = run
    url = str(tmp_path / "checkpoint")
    with workers.group(config) as group:
        group.call("save", url)
        group.train([1], folder.iteration(0).url_of("batch.parquet"))
        with pytest.raises(RankFailedError, match="weight version 0, not 1.*remove its folder and start"):
            group.call("save", url)
        shutil.rmtree(url)
        group.call("save", url)
        assert Store(url).read_sealed("complete.json")["version"] == 1
