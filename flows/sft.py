"""Supervised training: the same trainer, checkpoints and run folder, without engines.

Each iteration draws rows, takes its optimizer steps and saves when due. A row trains its label, or the assistant's messages of
a whole dialogue.
"""

from prefect import flow

from millrace.core.config import RunConfig
from millrace.core.errors import ConfigError
from millrace.core.periodic import evaluates_after
from millrace.flows.drive import DriveResult, drive
from millrace.flows.driver.iteration_slots import IterationSlot, Stage
from millrace.tasks.checkpoint import checkpoint
from millrace.tasks.context import IterationContext
from millrace.tasks.publish import publish_supervised
from millrace.tasks.reporting import report
from millrace.tasks.run_recorded import run_recorded
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.supervised.held_out_loss import held_out_loss, held_out_loss_before
from millrace.tasks.supervised.sample_supervised import sample_supervised
from millrace.tasks.train_step import train_step


@flow(name="sft", flow_run_name="{config.run.name}")
async def sft(config: RunConfig) -> DriveResult:
    """Train on reference answers, resuming from the state in the run folder."""
    if not config.algorithm.supervised:
        raise ConfigError(
            "supervised training needs algorithm.loss=sft",
            where=f"algorithm.loss = {config.algorithm.loss.kind}",
            remedy="set it",
        )
    return await drive(config, sft_iteration, flow_name="sft_iteration")


async def sft_iteration(runtime: Runtime, index: int, slot: IterationSlot) -> None:
    """Draw, train, save when due, measure the held-out loss when due, publish."""
    if index == 0:
        await untrained_loss(runtime)
    ctx = IterationContext(runtime, index)
    await run_recorded(sample_supervised, ctx)
    await run_recorded(train_step, ctx)
    await run_recorded(checkpoint, ctx)
    await slot.reach(Stage.TRAINED)
    if evaluates_after(runtime.config, index + 1):
        await run_recorded(held_out_loss, ctx)
    await run_recorded(publish_supervised, ctx)


async def untrained_loss(runtime: Runtime) -> None:
    """Held-out loss of the untrained model, kept in the first iteration's folder."""
    if runtime.config.evaluation.sets:
        record = await run_recorded(held_out_loss_before, IterationContext(runtime, 0))
        await report.held_out_loss(runtime, record)
