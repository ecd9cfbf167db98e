"""A trainer rank that is stopped amid a step: the step ends with a typed error in the limit, and new ranks make the same weights."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from millrace.connectors.host.process_identity import wait_ended
from millrace.connectors.ray import cluster
from millrace.connectors.ray.actors import Actor
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.trainers.rank import Rank
from millrace.core.config import RunConfig
from millrace.core.contracts.task_records import StepRequest
from millrace.core.errors import ActorLostError, ActorStalledError, StalledError
from millrace.core.waits import Limit
from millrace.tasks.runtime.cluster import Cluster
from millrace.tasks.runtime.recovery import Recovery
from millrace.tasks.runtime.trainer import TrainerRanks
from tests.support.tiny_models import save_tiny_model
from tests.support.trainer_ranks import VOCAB, configuration, samples, write_batch

if sys.platform != "linux":
    pytest.skip("other systems do not stop processes alike", allow_module_level=True)

LIMIT = Limit(2.0)  # of the call that is to stall; starting takes longer
PATIENCE_S = 60.0


@pytest_asyncio.fixture
async def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TrainerRanks]:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
    settings = configuration(save_tiny_model(tmp_path / "model", "qwen3", VOCAB), 2)
    settings["storage"]["root"] = str(tmp_path)
    config = RunConfig.model_validate(settings)
    joined = Cluster(config)
    try:
        yield TrainerRanks(config, joined, RunFolder(str(tmp_path), "a"), nothing, Recovery())
        await joined.end_actors()
    finally:
        cluster.leave()
        cluster.stop_local_head()


async def nothing() -> None:
    """On GPUs of its own the trainer asks nobody for room."""


def members(ranks: Any) -> list[Actor[Rank]]:
    """The actors of the ranks."""
    found: list[Actor[Rank]] = ranks._actors.actors
    return found


async def stopped(ranks: Any, number: int) -> int:
    """Stop a rank's process; the other waits for it in the step's first collective."""
    pid: int = (await members(ranks)[number].state())["actor_pid"]
    os.kill(pid, signal.SIGSTOP)
    return pid


async def until_gone(pid: int) -> None:
    assert not await asyncio.to_thread(wait_ended, processes(pid), PATIENCE_S)


def processes(pid: int) -> list[psutil.Process]:
    """The process, unless it is gone."""
    return [psutil.Process(pid)] if psutil.pid_exists(pid) else []


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.slow
async def test_a_stopped_rank_ends_its_step_in_the_limit_and_new_ranks_make_the_same_weights(
    trainer: TrainerRanks, tmp_path: Path
) -> None:
    batch = write_batch(tmp_path / "batch", [row for step in (1, 2, 3) for row in samples(step)])
    ranks = await trainer.at(0)
    undisturbed = [await ranks.together(Rank.train, StepRequest(version, batch)) for version in (1, 2)]
    await ranks.each(Rank.export, str(tmp_path / "undisturbed"), 2)
    pids = [(await actor.state())["actor_pid"] for actor in members(ranks)]
    for actor in members(ranks):
        actor.limit = LIMIT
    await stopped(ranks, 1)
    began = time.monotonic()
    with pytest.raises(ActorStalledError) as caught:
        await ranks.together(Rank.train, StepRequest(3, batch))
    assert LIMIT.seconds < time.monotonic() - began < 10 * LIMIT.seconds
    said = str(caught.value)
    assert said.startswith(
        "train of trainer-0 to trainer-1: nothing moved for 2 s (run.progress_timeout_s): "
    )
    assert "trainer-1 did not answer; raise run.progress_timeout_s if" in said
    ranks = await trainer.at(0)  # ranks that were ended say no version: new ones are built
    for pid in pids:
        await until_gone(pid)
    again = [await ranks.together(Rank.train, StepRequest(version, batch)) for version in (1, 2)]
    assert [(step["loss"], step["grad_norm"]) for step in again] == [
        (step["loss"], step["grad_norm"]) for step in undisturbed
    ]
    await ranks.each(Rank.export, str(tmp_path / "again"), 2)
    assert weights(tmp_path / "again") == weights(tmp_path / "undisturbed")
    assert (await ranks.together(Rank.train, StepRequest(3, batch)))["version"] == 3


@pytest.mark.slow
async def test_a_rank_that_is_stopped_amid_a_step_by_either_side_is_replaced(
    trainer: TrainerRanks, tmp_path: Path
) -> None:
    """Rank 0 or rank 1, at the first step or a later one; a stopped rank that only saves; a stop that ends in time is no stall."""
    batch = write_batch(tmp_path / "batch", [row for step in (1, 2) for row in samples(step)])
    ranks = await trainer.at(0)
    for version in (1, 2):
        await ranks.together(Rank.train, StepRequest(version, batch))
    await ranks.each(Rank.export, str(tmp_path / "undisturbed"), 2)
    await trainer.end()
    for number, made in ((0, 0), (1, 1)):
        ranks = await trainer.at(0)
        for version in range(1, made + 1):
            await ranks.together(Rank.train, StepRequest(version, batch))
        for actor in members(ranks):
            actor.limit = LIMIT
        pid = await stopped(ranks, number)
        with pytest.raises(
            ActorStalledError, match=f"train of trainer-0 to trainer-1.*trainer-{number} did not"
        ):
            await ranks.together(Rank.train, StepRequest(made + 1, batch))
        await until_gone(pid)
        ranks = await trainer.at(0)
        for version in (1, 2):
            await ranks.together(Rank.train, StepRequest(version, batch))
        await ranks.each(Rank.export, str(tmp_path / f"again-{number}"), 2)
        assert weights(tmp_path / f"again-{number}") == weights(tmp_path / "undisturbed")
    for actor in members(ranks):
        actor.limit = Limit(20.0)
    pid = await stopped(ranks, 1)
    saving = asyncio.create_task(ranks.each(Rank.save, str(tmp_path / "saved")))
    await asyncio.sleep(6)
    os.kill(pid, signal.SIGCONT)
    await saving
    for actor in members(ranks):
        actor.limit = LIMIT
    await stopped(ranks, 0)
    with pytest.raises(StalledError, match="save of trainer-0 to trainer-1"):
        await ranks.each(Rank.save, str(tmp_path / "another"))
    with pytest.raises(ActorLostError):
        await ranks.together(Rank.losses, 2, [])
