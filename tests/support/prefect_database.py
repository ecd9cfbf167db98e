"""A Prefect database with a run of ten finished iterations and one at work, trimmed to the newest three, and to four events.

Run as a module with PREFECT_API_DATABASE_CONNECTION_URL of a new file; prints what is left, as JSON.
"""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from prefect.server.database import provide_database_interface
from prefect.server.schemas.states import StateType

from millrace.connectors.prefect.retention import delete_older, delete_older_events

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
ITERATIONS = 10


async def main() -> None:
    """Fill, trim twice, count."""
    db = provide_database_interface()
    await db.create_db()
    async with db.session_context(begin_transaction=True) as session:
        flow = db.Flow(name="train")
        session.add(flow)
        await session.flush()
        run = db.FlowRun(flow_id=flow.id, name="a", state_type=StateType.RUNNING)
        session.add(run)
        await session.flush()
        for number in range(ITERATIONS + 1):
            await _add_iteration(db, session, run, number)
    trimmed = [await delete_older(3), await delete_older(3)]
    events = [await delete_older_events(4), await delete_older_events(4)]
    print(json.dumps({"trimmed": trimmed, "events": events, "left": await _left(db)}))


async def _add_iteration(db: Any, session: Any, run: Any, number: int) -> None:
    ended = BEGAN + timedelta(minutes=number)
    at_work = number == ITERATIONS
    stand_in = db.TaskRun(
        flow_run_id=run.id, task_key="iteration", dynamic_key=str(number), name=f"iteration-{number}"
    )
    session.add(stand_in)
    await session.flush()
    iteration = db.FlowRun(
        flow_id=run.flow_id,
        name=f"a-{number}",
        parent_task_run_id=stand_in.id,
        state_type=StateType.RUNNING if at_work else StateType.COMPLETED,
        end_time=None if at_work else ended,
    )
    session.add(iteration)
    await session.flush()
    for task in ("rollout", "train_step"):
        task_run = db.TaskRun(
            flow_run_id=iteration.id, task_key=task, dynamic_key="0", name=f"{task}-{number}"
        )
        session.add(task_run)
        await session.flush()
        session.add(
            db.TaskRunState(
                task_run_id=task_run.id, type=StateType.COMPLETED, name="Completed", timestamp=ended
            )
        )
    session.add(
        db.Log(flow_run_id=iteration.id, name="millrace", level=20, message=f"log-{number}", timestamp=ended)
    )
    picture = db.Artifact(
        flow_run_id=iteration.id, key="picture" if number == 0 else None, data=f"data-{number}"
    )
    session.add(picture)
    await session.flush()
    if number == 0:  # still the newest of its key
        session.add(db.ArtifactCollection(key="picture", latest_id=picture.id))
    event = db.Event(
        id=uuid4(),
        event=f"event-{number}",
        occurred=ended,
        resource_id="r",
        resource={},
        related_resource_ids=[],
        related=[],
        payload={},
        received=ended,
        recorded=ended,
    )
    session.add(event)
    session.add(
        db.EventResource(
            occurred=ended, resource_id=f"r-{number}", resource_role="x", resource={}, event_id=event.id
        )
    )


async def _left(db: Any) -> dict[str, list[str]]:
    columns = {
        "flow runs": db.FlowRun.name,
        "task runs": db.TaskRun.name,
        "logs": db.Log.message,
        "artifacts": db.Artifact.data,
        "events": db.Event.event,
        "resources": db.EventResource.resource_id,
    }
    async with db.session_context() as session:
        left = {name: list((await session.execute(sa.select(c))).scalars()) for name, c in columns.items()}
        left["states"] = [str(n) for n in (await session.execute(sa.select(db.TaskRunState.id))).scalars()]
    return left


if __name__ == "__main__":
    asyncio.run(main())
