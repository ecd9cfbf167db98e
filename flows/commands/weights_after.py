"""The weights of a stored run after some iteration, as a Hugging Face folder: the model itself, an export, or made again.

With trainer.lora it holds the model's weights with the adapters added, as engines get them with sync.lora=merged.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.connectors.ray import cluster
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.storage.sampled_hash import sampled_hash
from millrace.core.config import RunConfig
from millrace.core.errors import ConfigError, StorageError, remedy_of
from millrace.core.families.adapters import holds_adapters
from millrace.flows.commands.replay import configuration_of, export_folder, export_ranks, ranks_alone
from millrace.flows.preflight.check_references import pass_blocks_on
from millrace.tasks.runtime.trainer import bring_up

BASE = "put back the folder that the run was trained from"
STARTED = "put back the folder of adapters that the run started from"


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


def weights_after(
    config: RunConfig, folder: RunFolder, record: Mapping[str, Any], done: int, into: Path
) -> str:
    """A folder with the weights after `done` iterations: the model's, or `into`, which is filled. record: run.json.

    They come from the export after the iteration, or are made again from an earlier checkpoint and the stored batches.
    Raises ConfigError if the adapters of the run belong to other weights than model.path has.
    """
    lora = config.trainer.lora
    if done == 0:
        if lora is None or lora.path is None:
            return config.model.path
        _check_same(record, "trainer.lora.path", Path(lora.path), STARTED)
        _merge(config, record, Path(lora.path), into)
    elif folder.store.list(f"exports/{done:06d}"):
        stored = into.with_name(f"{into.name}-stored")
        export_folder(folder, done, stored)
        if holds_adapters(stored):
            _merge(config, record, stored, into)
            shutil.rmtree(stored)
        else:
            stored.rename(into)
    else:
        _make_again(config, folder, str(record.get("id")), done, into)
    return str(into)


def _merge(config: RunConfig, record: Mapping[str, Any], adapters: Path, into: Path) -> None:
    """Write the model of model.path with the adapters of a PEFT folder. Raises ConfigError if it is not the run's."""
    # imports torch
    from millrace.connectors.trainers.megatron.conversion.conversion import DTYPES, Conversion, Order

    model = Path(config.model.path)
    _check_same(record, "model.path", model, BASE)
    Conversion(Order(adapters, into, model, to="hf", dtype=DTYPES[config.dtype], merge=True)).convert()


def _check_same(record: Mapping[str, Any], field: str, folder: Path, remedy: str) -> None:
    """Raise ConfigError, naming the file, if a folder has other weights than at the run's last start."""
    try:
        now = {path.name: sampled_hash(path) for path in folder.glob("*.safetensors")}
    except OSError as error:
        raise ConfigError(str(error), where=f"{field} = {folder}", remedy=remedy_of(error, remedy)) from error
    prints = (record.get("fingerprints") or {"model": {}})["model"]
    start = f"{field}: "
    named = {name.removeprefix(start): value for name, value in prints.items() if name.startswith(start)}
    stored = {name: value for name, value in named.items() if name.endswith(".safetensors")}
    for name in sorted({*stored, *now}):
        if stored and stored.get(name) != now.get(name):
            reason = f"the run's adapters belong to another {name} than is there"
            raise ConfigError(reason, where=f"{field} = {folder}", remedy=remedy)


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
        await export_ranks(config, ranks, done * steps, into, merged=True)
