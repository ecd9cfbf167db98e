"""Lowers how far a run goes ahead if the correction weights degenerate (pipeline.min_ess).

Owns that the decision is in run.json before an iteration is drawn under it. millrace.core.accounts.staleness makes the decision.
"""

from __future__ import annotations

import asyncio
import logging

from millrace.connectors.storage.run_folder import DRAWN
from millrace.core.accounts.staleness import LOW_IN_A_ROW, Ahead, lowered
from millrace.core.contracts.ids import iteration_number
from millrace.flows.driver.stored_run import spans_of
from millrace.tasks.runtime.runtime import Runtime

log = logging.getLogger(__name__)
ESS = "train/ess"


async def lower_ahead(runtime: Runtime, index: int) -> None:
    """Decide how far ahead iteration `index` may be, from committed iterations. A drawn iteration keeps its setting."""
    bound, prompts = runtime.config.pipeline.min_ess, runtime.prompts
    if bound is None:
        return
    decided = await asyncio.to_thread(_decide, runtime, index, bound)
    if decided == prompts.ahead:
        return
    await asyncio.to_thread(_record, runtime, decided)
    log.warning(
        "%s was below pipeline.min_ess=%g in %d iterations in a row: from iteration %d on %d may be open ahead, not %d",
        ESS,
        bound,
        LOW_IN_A_ROW,
        iteration_number(index),
        decided.at(index),
        prompts.ahead.at(index),
    )
    prompts.use_ahead(decided)


def _decide(runtime: Runtime, index: int, bound: float) -> Ahead:
    folder, ahead = runtime.run_folder, runtime.prompts.ahead
    if not ahead.at(index) or folder.iteration(index).exists(DRAWN):
        return ahead
    first = max(0, index - ahead.at(index) - LOW_IN_A_ROW)
    manifests = {at: folder.manifest(at) for at in range(first, index - ahead.at(index))}
    ess = {at: made.tasks["metrics"].get(ESS) for at, made in manifests.items() if made}
    return lowered(ahead, index, ess, bound)


def _record(runtime: Runtime, ahead: Ahead) -> None:
    store = runtime.run_folder.store
    record = store.read_sealed("run.json")
    record["ahead"] = spans_of(ahead)
    store.write_sealed("run.json", record)
