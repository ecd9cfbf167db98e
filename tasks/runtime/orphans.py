"""Ends actors of abandoned runs: their driver was killed, and the run folder is missing, another run's, or complete."""

import asyncio
import logging

from millrace.connectors.host.process_identity import ProcessIdentity
from millrace.connectors.prefect.server import ensure_server, server_runs
from millrace.connectors.ray import actors, cluster, placement
from millrace.connectors.storage.driven_runs import DrivenRun, driven_runs, forget_driven
from millrace.connectors.storage.store import Store
from millrace.core.config import RunConfig

log = logging.getLogger(__name__)
NAMESPACE = "orphans"  # no actor is made in it


def driven_run(
    config: RunConfig, identity: str, run_id: str | None = None, flow_run_id: str | None = None
) -> DrivenRun:
    """The note about a run or command that is written before this process makes its actors.

    run_id: from run.json; None for a command, whose actors no other process takes over. flow_run_id: of the training run.
    """
    return DrivenRun(
        identity=identity,
        name=config.run.name,
        url=Store(config.storage.root).child(config.run.name).url,
        run_id=run_id,
        ray_address=config.placement.ray_address,
        driver=ProcessIdentity.own(),
        flow_run_id=flow_run_id,
    )


def orphans(of: str | None = None) -> list[DrivenRun]:
    """Orphaned runs of this host. of: the name of a run, to search for it only.

    Runs on a configured cluster are left out: it may be shared, or out of reach.
    """
    return [
        run
        for run in driven_runs()
        if of in (None, run.name) and run.ray_address is None and run.is_orphaned()
    ]


async def end_orphans(found: list[DrivenRun]) -> list[str]:
    """End the actors of orphaned runs and release their resources. This process must have joined the local Ray head.

    Returns what ended, a sentence a run that had actors.
    """
    sentences = []
    for run in found:
        count = await actors.end_namespace(run.identity)
        await asyncio.to_thread(placement.release_of, run.identity)
        await asyncio.to_thread(_forget, run)
        if count:
            sentences.append(f"{count} actors of {run.name} ({run.url}) ended, which a killed driver left")
    return sentences


def join_and_end_orphans(of: str | None = None) -> list[str]:
    """End orphans from a process that has joined no cluster, and leave the cluster again. Without orphans Ray is not touched."""
    found = orphans(of)
    if not found:
        return []
    if not cluster.head_lives():  # without a head there are no actors
        for run in found:
            _forget(run)
        return []
    cluster.start_or_join(None, NAMESPACE)
    try:
        return asyncio.run(end_orphans(found))
    finally:
        cluster.leave()


def _forget(run: DrivenRun) -> None:
    """Forget a run whose actors have ended, and settle its flow run."""
    if run.flow_run_id and server_runs():
        ensure_server()
        from millrace.connectors.prefect.flow_run_state import settle_killed

        settle_killed([run.flow_run_id], "Its process was killed, and its run folder is gone, or complete.")
    forget_driven(run.identity)
