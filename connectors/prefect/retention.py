"""Bounds the local server's database, and SQLite's cache of it in memory.

Only each run's newest finished iterations stay, and only the newest events. The run folder keeps every iteration; the server's
copy is for its web page. Prefect's vacuum (prefect.toml) deletes finished runs as a whole. SQLite reuses deleted space, so the
file never shrinks below its largest size.
"""

import asyncio
import contextlib
import itertools
import logging
import sqlite3
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from prefect.server.database import PrefectDBInterface, provide_database_interface
from prefect.server.schemas.states import TERMINAL_STATES

log = logging.getLogger(__name__)

EVERY_S = 30.0
SOON_S = 5.0  # pause after a deletion; short, so that few iterations pile up and the files stay small
BATCH = 10  # iterations per transaction, since other writers wait for it
EVENTS = 2000  # over all runs; each takes 7 KiB, and a short iteration's 34 are two thirds of its share of the database
EVENTS_BATCH = 500  # events per transaction
PAGE_CACHES = 32 * 2**20  # bytes


def bound_page_caches() -> None:
    """Limit the page caches of all of this process's SQLite connections together.

    Prefect gives each of up to 15 connections 80 MB, so that memory grew with the database.
    """
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(f"PRAGMA soft_heap_limit = {PAGE_CACHES}")


async def keep_newest(kept: int) -> None:
    """Delete older iterations and events from time to time, until cancelled. kept: iterations per run; 0 keeps all, and all events."""
    wait_s = EVERY_S
    while kept:
        await asyncio.sleep(wait_s)
        wait_s = EVERY_S
        try:
            if await delete_older(kept) + await delete_older_events(EVENTS):
                wait_s = SOON_S
        except sa.exc.SQLAlchemyError as error:  # such as a locked database: the next attempt follows soon
            log.warning("older iterations stay in Prefect's database for now: %s", error)


async def delete_older(kept: int) -> int:
    """Delete all but the newest `kept` finished iterations of each run, with their rows in other tables; returns the number."""
    db = provide_database_interface()
    older = await _older(db, kept)
    for first in range(0, len(older), BATCH):
        batch = older[first : first + BATCH]
        await _delete(db, [row.id for row in batch], [row.parent_task_run_id for row in batch])
        await asyncio.sleep(0)
    return len(older)


async def delete_older_events(kept: int) -> int:
    """Delete all but the newest `kept` events of any kind; returns the number."""
    db = provide_database_interface()
    oldest_first = sa.select(db.Event.id).order_by(db.Event.occurred, db.Event.id)
    async with db.session_context() as session:
        surplus = await session.scalar(sa.select(sa.func.count()).select_from(db.Event)) - kept
        ids = (await session.execute(oldest_first.limit(max(surplus, 0)))).scalars().all()
    for first in range(0, len(ids), EVENTS_BATCH):
        batch = ids[first : first + EVENTS_BATCH]
        async with db.session_context(begin_transaction=True, with_for_update=True) as session:
            await session.execute(sa.delete(db.EventResource).where(db.EventResource.event_id.in_(batch)))
            await session.execute(sa.delete(db.Event).where(db.Event.id.in_(batch)))
        await asyncio.sleep(0)
    return len(ids)


async def _older(db: PrefectDBInterface, kept: int) -> list[Any]:
    """The finished iterations to delete, of every run. An iteration is a flow run with a parent flow run."""
    query = (
        sa.select(
            db.FlowRun.id,
            db.FlowRun.parent_task_run_id,
            db.FlowRun.end_time,
            db.TaskRun.flow_run_id.label("run"),
        )
        .join(db.TaskRun, db.TaskRun.id == db.FlowRun.parent_task_run_id)
        .where(db.FlowRun.state_type.in_(TERMINAL_STATES), db.FlowRun.end_time.is_not(None))
        .order_by(db.TaskRun.flow_run_id, db.FlowRun.end_time.desc())
    )
    async with db.session_context() as session:
        rows = (await session.execute(query)).all()
    of_runs = itertools.groupby(rows, key=lambda row: row.run)
    return [row for _, iterations in of_runs for row in list(iterations)[kept:]]


async def _delete(db: PrefectDBInterface, iterations: Sequence[UUID], stand_ins: Sequence[UUID]) -> None:
    """Delete iterations with their task runs, states, logs and artifacts. stand_ins: their task runs in the run's flow run."""
    shown = sa.select(db.ArtifactCollection.latest_id)  # those on the web page
    async with db.session_context(begin_transaction=True, with_for_update=True) as session:
        await session.execute(sa.delete(db.Log).where(db.Log.flow_run_id.in_(iterations)))
        await session.execute(
            sa.delete(db.Artifact).where(
                db.Artifact.flow_run_id.in_(iterations), db.Artifact.id.not_in(shown)
            )
        )
        await session.execute(sa.delete(db.FlowRun).where(db.FlowRun.id.in_(iterations)))
        await session.execute(sa.delete(db.TaskRun).where(db.TaskRun.id.in_(stand_ins)))
