"""When held-out sets are evaluated: the untrained policy, after an iteration, or beside the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from prefect import Task

from millrace.core.contracts.task_records import EvaluateRecord
from millrace.core.periodic import due, evaluates_after
from millrace.flows.driver.iteration_slots import IterationSlot
from millrace.tasks.context import IterationContext
from millrace.tasks.evaluate import evaluate, evaluate_before, is_evaluated_by
from millrace.tasks.reporting import report
from millrace.tasks.run_recorded import run_recorded
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.shards.driver import with_evaluation_shards

EvaluateTask = Task[[IterationContext], Coroutine[Any, Any, EvaluateRecord]]


async def evaluate_untrained(runtime: Runtime) -> None:
    """Held-out accuracy of the untrained policy, kept in the first iteration's folder."""
    if runtime.config.evaluation.sets and not runtime.config.evaluates_in_background:
        record = await _evaluate(IterationContext(runtime, 0), evaluate_before)
        await report.evaluation(runtime, record)


async def evaluate_if_due(ctx: IterationContext) -> None:
    """Evaluate the weights that this iteration made, before the run goes on."""
    if evaluates_after(ctx.config, ctx.index + 1):
        await _evaluate(ctx, evaluate)


async def evaluate_beside(ctx: IterationContext, slot: IterationSlot) -> None:
    """Evaluate the weights that this iteration starts with, if that is due and the previous iteration has not."""
    config = ctx.config
    if not config.evaluates_in_background or not config.evaluation.sets:
        return
    await slot.may_evaluate()
    if due(ctx.index, config.evaluation.every) and not await asyncio.to_thread(is_evaluated_by, ctx):
        await report.evaluation(ctx.runtime, await _evaluate(ctx, evaluate_before))


async def _evaluate(ctx: IterationContext, task: EvaluateTask) -> EvaluateRecord:
    return await run_recorded(task, await with_evaluation_shards(ctx))
