"""The weights of a stored run after some iteration, as a Hugging Face folder: the model itself, an export, or made again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from millrace.connectors.ray import cluster
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.errors import StorageError
from millrace.flows.commands.replay import configuration_of, export_folder, export_ranks, ranks_alone
from millrace.flows.preflight.check_references import pass_blocks_on
from millrace.tasks.runtime.trainer import bring_up


def iterations_done(folder: RunFolder, at: int | None) -> int:
    """The iteration that was asked for, by default the newest committed one. Raises StorageError if it is not committed."""
    committed = folder.first_open_iteration()
    done = committed if at is None else at
    if not 0 <= done <= committed:
        raise StorageError(
            f"has {committed} committed iterations",
            where=folder.store.url,
            remedy=f"ask for 0 <= at <= {committed}",
        )
    return done


def configuration_after(record: Mapping[str, object], folder: RunFolder, done: int) -> RunConfig:
    """The configuration under which the newest of these iterations was trained."""
    if folder.first_open_iteration():
        return configuration_of(record, folder, max(0, done - 1))
    return RunConfig.model_validate(record["config"])


def weights_after(config: RunConfig, folder: RunFolder, run_id: str, done: int, into: Path) -> str:
    """A folder with the weights after `done` iterations: the model's, or `into`, which is filled.

    They come from the export after the iteration, or are made again from an earlier checkpoint and the stored batches.
    """
    if done == 0:
        return config.model.path
    if folder.store.list(f"exports/{done:06d}"):
        export_folder(folder, done, into)
    else:
        _make_again(config, folder, run_id, done, into)
    return str(into)


def _make_again(config: RunConfig, folder: RunFolder, run_id: str, done: int, into: Path) -> None:
    pass_blocks_on(config)
    cluster.start_or_join(config.placement.ray_address, f"{folder.identity(run_id)}-evaluation")
    try:
        asyncio.run(_weights(config, folder, done, into))
    finally:
        cluster.leave()


async def _weights(config: RunConfig, folder: RunFolder, done: int, into: Path) -> None:
    steps = config.steps_per_iteration
    async with ranks_alone(config) as ranks:
        await bring_up(ranks, folder, done * steps, steps)
        await export_ranks(config, ranks, done * steps, into)
