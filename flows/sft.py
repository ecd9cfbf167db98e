"""Supervised training: the same trainer, checkpoints and run folder, without engines.

Each iteration draws rows, takes its optimizer steps and saves when due. The answer of a row is its label.
"""

from __future__ import annotations

from prefect import flow

from millrace.core.config import RunConfig
from millrace.core.errors import ConfigError
from millrace.flows.driver.drive import DriveResult, drive
from millrace.flows.driver.iteration_slots import IterationSlot
from millrace.tasks.checkpoint import checkpoint
from millrace.tasks.context import IterationContext
from millrace.tasks.publish import publish_supervised
from millrace.tasks.run_recorded import run_recorded
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.sample_supervised import sample_supervised
from millrace.tasks.train_step import train_step


@flow(name="sft", flow_run_name="{config.run.name}")
async def sft(config: RunConfig) -> DriveResult:
    """Train on reference answers, going on from whatever the run folder holds."""
    if not config.algorithm.supervised:
        raise ConfigError(
            "supervised training needs algorithm.loss=sft",
            where=f"algorithm.loss = {config.algorithm.loss.kind}",
            remedy="set it",
        )
    return await drive(config, sft_iteration, flow_name="sft_iteration")


async def sft_iteration(runtime: Runtime, index: int, slot: IterationSlot) -> None:
    """Draw, train, save when due, publish."""
    await slot.may_work()
    ctx = IterationContext(runtime.config, index, runtime)
    await run_recorded(sample_supervised, ctx)
    await run_recorded(train_step, ctx)
    await run_recorded(checkpoint, ctx)
    slot.hand_over()
    await run_recorded(publish_supervised, ctx)
    slot.done()
