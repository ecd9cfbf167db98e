"""`millrace stop`: end the driver of a run if it lives on this host, and the actors that a killed one left. Files stay."""

import asyncio
import signal
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from millrace.connectors.host.process_identity import ProcessIdentity
from millrace.connectors.prefect.server import ensure_server, server_runs
from millrace.connectors.ray import actors, cluster, placement
from millrace.connectors.storage.lease import find_driver
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.errors import LeaseHeldError, StorageError, of_run
from millrace.flows.commands.terminal import RootOption, console, guarded
from millrace.flows.driver.stored_run import run_record, settings_of
from millrace.tasks.runtime.orphans import join_and_end_orphans

PROMISED_S = 10.0  # a command ends in this time after SIGTERM
POLL_S = 0.05


def stop(
    run: Annotated[
        str | None, typer.Argument(help="Run to end; without one, processes that killed drivers left.")
    ] = None,
    root: RootOption = "runs",
) -> None:
    """End a run on this host, as Ctrl-C does, or the processes that a killed run left. Files stay; train resumes it."""
    console.print(guarded(lambda: stop_left() if run is None else stop_run(root, run)), soft_wrap=True)


def stop_run(root: str, run: str) -> str:
    """End a run's processes: its driver as Ctrl-C does, then remaining actors, whose resources are released.

    Returns lines about what ended. Raises LeaseHeldError for a driver that this process cannot end, naming its host. If the
    run's folder is gone, ends the actors that its killed driver left; raises StorageError if there are none.
    """
    folder = RunFolder(root, run)
    driver = find_driver(folder.store)
    ended = []
    if driver and end_driver(driver, run, folder.store.url):
        ended = [f"{driver}, which drove {run}, ended"]
    left = join_and_end_orphans(of=run)
    try:
        record = run_record(root, run)
    except StorageError:
        if not left:
            raise
        return "; ".join([*ended, *left])
    ended += _settled(record, stopped=bool(ended))
    return "; ".join([*ended, *left, f"{end_actors(root, run)} actors of {run} ended"])


def stop_left() -> str:
    """End the actors of runs whose driver was killed and was not restarted. Returns lines about what ended."""
    return "; ".join(join_and_end_orphans()) or "nothing was left by killed drivers"


def _settled(record: Mapping[str, Any], *, stopped: bool) -> list[str]:
    """Set a final state on Prefect's page for the run's flow runs; returns lines about it.

    stopped: whether the newest flow run was just ended on purpose.
    """
    attempts = record.get("attempts") or []
    flow_runs = [attempt["flow_run_id"] for attempt in attempts if attempt.get("flow_run_id")]
    if not flow_runs or not server_runs():
        return []  # the next start reports it
    ensure_server()
    from millrace.connectors.prefect.flow_run_state import cancel_ended, settle_killed

    said = []
    if stopped and cancel_ended(flow_runs[-1], "Ended by millrace stop. What finished is kept."):
        said.append("its flow run is cancelled")
    killed = settle_killed(flow_runs, "Its process was killed. What finished is kept.")
    if killed:
        said.append(f"{len(killed)} flow runs of killed drivers have a final state")
    return said


def end_actors(root: str, run: str) -> int:
    """End the run's actors and release their resources, under any driver. Returns how many ended."""
    record = run_record(root, run)
    config = RunConfig.model_validate(settings_of(record))
    if not (config.placement.ray_address or cluster.head_lives()):
        return 0  # without a head there are no actors
    identity = RunFolder(root, run).identity(str(record.get("id")))
    cluster.start_or_join(config.placement.ray_address, identity)
    ended = asyncio.run(actors.end())
    placement.release()
    cluster.leave()
    return ended


def end_driver(driver: ProcessIdentity, run: str, url: str) -> bool:
    """End a driver by SIGTERM and wait until it is gone; False if it had ended before. Raises LeaseHeldError if it survives."""
    if driver.lives() is None:
        raise LeaseHeldError(
            f"driven by {driver}, on another host or in another container than this process",
            where=url,
            remedy=f"there, `millrace stop {of_run(run, url)}` or `kill {driver.pid}` ends it",
        )
    try:
        was_alive = driver.send_signal(signal.SIGTERM)
    except PermissionError as error:
        raise LeaseHeldError(
            f"driven by {driver}, which another user started", where=url, remedy="ask its user to end it"
        ) from error
    until = time.monotonic() + PROMISED_S
    while driver.lives():
        if time.monotonic() > until:
            raise LeaseHeldError(
                f"{driver} drives it and did not end within {PROMISED_S:g} s of SIGTERM",
                where=url,
                remedy=f"`kill -9 {driver.pid}` ends it; then `millrace stop {of_run(run, url)}` ends its remaining processes",
            )
        time.sleep(POLL_S)
    return was_alive
