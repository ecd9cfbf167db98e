"""The bound of the local server's database: of each run only the newest finished iterations stay in it.

The run folder keeps every iteration; the server's copy is for its web page. Finished runs go as a whole by Prefect's own
vacuum (prefect.toml). What is deleted is used again by SQLite: the file stays as large as it was at most.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from prefect.server.database import PrefectDBInterface, provide_database_interface
from prefect.server.schemas.states import TERMINAL_STATES

log = logging.getLogger(__name__)

EVERY_S = 30.0
BATCH = 50  # iterations deleted in one transaction, which other writers wait for


async def keep_newest(kept: int, every_s: float = EVERY_S) -> None:
    """Delete older iterations now and then; runs until cancelled."""
    while kept:
        await asyncio.sleep(every_s)
        try:
            await delete_older(kept)
        except sa.exc.SQLAlchemyError as error:  # such as a database that is locked: the next time is soon
            log.warning("older iterations stay in Prefect's database for now: %s", error)


async def delete_older(kept: int) -> int:
    """Delete all but the newest `kept` finished iterations of each run, and what hangs on them; returns how many.

    Events that are older than an iteration that goes, whatever they are about, go with it.
    """
    db = provide_database_interface()
    older = await _older(db, kept)
    for first in range(0, len(older), BATCH):
        batch = older[first : first + BATCH]
        await _delete(db, [row.id for row in batch], [row.parent_task_run_id for row in batch])
        await asyncio.sleep(0)
    if older:
        await _delete_events(db, max(row.end_time for row in older))
    return len(older)


async def _older(db: PrefectDBInterface, kept: int) -> list[Any]:
    """The finished iterations that go, of every run: flow runs whose parent is one."""
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
    """Delete iterations with their task runs, states, logs and artifacts. stand_ins: their task runs in the run."""
    shown = sa.select(db.ArtifactCollection.latest_id)  # the web page's newest of each kind
    async with db.session_context(begin_transaction=True, with_for_update=True) as session:
        await session.execute(sa.delete(db.Log).where(db.Log.flow_run_id.in_(iterations)))
        await session.execute(
            sa.delete(db.Artifact).where(
                db.Artifact.flow_run_id.in_(iterations), db.Artifact.id.not_in(shown)
            )
        )
        await session.execute(sa.delete(db.FlowRun).where(db.FlowRun.id.in_(iterations)))
        await session.execute(sa.delete(db.TaskRun).where(db.TaskRun.id.in_(stand_ins)))


async def _delete_events(db: PrefectDBInterface, before: Any) -> None:
    async with db.session_context(begin_transaction=True, with_for_update=True) as session:
        await session.execute(sa.delete(db.EventResource).where(db.EventResource.occurred < before))
        await session.execute(sa.delete(db.Event).where(db.Event.occurred < before))
