"""Supervised training: the same trainer, checkpoints and run folder, without engines.

Each iteration draws rows, takes its optimizer steps and saves when due. The answer of a row is its label.
"""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import flow

from millrace.core.config import RunConfig
from millrace.core.errors import ConfigError
from millrace.flows.iteration_slots import in_turn, mine
from millrace.flows.run_record import finish_run_record, open_run_record
from millrace.flows.train import driven, driving, prepare
from millrace.tasks.checkpoint import checkpoint
from millrace.tasks.context import IterationContext
from millrace.tasks.publish import publish_supervised
from millrace.tasks.run_recorded import run_recorded
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.sample_supervised import sample_supervised
from millrace.tasks.train_step import train_step


@flow(name="sft", flow_run_name="{config.run.name}")
async def sft(config: RunConfig) -> dict[str, Any]:
    """Train on reference answers; goes on from whatever the run folder holds."""
    if config.algorithm.loss != "sft":
        raise ConfigError(
            f"algorithm.loss = {config.algorithm.loss}: supervised training needs algorithm.loss=sft; set it"
        )
    await prepare(config)
    runtime = Runtime(config)
    first = await asyncio.to_thread(runtime.run_folder.first_open_iteration)
    if first < config.run.iterations:
        async with driving(runtime) as attempt:
            await open_run_record(runtime, attempt)
            await in_turn(sft_iteration, config, first)
            await finish_run_record(runtime)
    return {
        "run": config.run.name,
        "iterations": config.run.iterations,
        "did": max(0, config.run.iterations - first),
    }


@flow(name="sft_iteration")
async def sft_iteration(index: int) -> None:
    """Draw, train, save when due, publish."""
    turn, runtime = mine.get(), driven.get()
    await turn.wait()
    ctx = IterationContext(runtime.config, index, runtime)
    await run_recorded(sample_supervised, ctx)
    await run_recorded(train_step, ctx)
    await run_recorded(checkpoint, ctx)
    turn.trained()
    await run_recorded(publish_supervised, ctx)
    turn.over()
