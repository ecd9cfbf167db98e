"""`millrace stop`: end the actors that a killed driver left of a run. Files stay."""

from __future__ import annotations

import asyncio

from millrace.connectors.ray import actors, cluster, placement
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.flows.tools.browse import run_record, settings_of


def stop_run(root: str, run: str) -> str:
    """End the run's actors and give back their place. Returns what ended."""
    record = run_record(root, run)
    config = RunConfig.model_validate(settings_of(record))
    cluster.start_or_join(config.placement.ray_address, RunFolder(root, run).identity(record.get("id")))
    ended = asyncio.run(actors.end())
    placement.release()
    cluster.leave()
    return f"{ended} actors of {run} ended"
