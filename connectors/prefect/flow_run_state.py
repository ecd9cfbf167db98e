"""The state of a flow run, set from outside its process. Knows nothing of why."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from uuid import UUID

import httpx
from prefect import Task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import State, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound, Pause, PrefectHTTPStatusError
from prefect.states import Cancelled, Crashed

__all__ = [
    "cancel_ended",
    "cancel_interrupted",
    "count_apart",
    "of_deployment",
    "settle_dead",
    "settle_killed",
    "settle_late_tasks",
    "until_suspended",
]

log = logging.getLogger(__name__)
NEWEST = 50  # flow runs of a run that are asked about
RECORDED_S = 2.0  # an idle server has recorded the last events of a killed process by then
LOOK_S = 3.0  # until the next look at the server's state
AT_WORK_TYPES = [StateType.RUNNING, StateType.CANCELLING]
BY_SIGNAL_TYPES = [
    StateType.CRASHED,
    StateType.CANCELLED,
]  # what Prefect makes of a signal, and what the driver does
# of another server, or it does not answer; RuntimeError: no server answers
UNANSWERED = (ObjectNotFound, PrefectHTTPStatusError, httpx.HTTPError, RuntimeError)


def _of(types: list[StateType]) -> FlowRunFilterState:
    return FlowRunFilterState(type=FlowRunFilterStateType(any_=types))


AT_WORK = _of(AT_WORK_TYPES)


def of_deployment() -> bool:
    """Whether the flow run that is at work here was started from a deployment."""
    context = FlowRunContext.get()
    return context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None


async def until_suspended() -> Pause:
    """Wait until the deployment's flow run that is at work here is paused from outside; what Prefect wants raised then.

    Prefect itself looks only where a task or a flow run begins or ends: a long rollout would go on to its end.
    """
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    async with get_client() as client:
        while True:
            await asyncio.sleep(LOOK_S)
            # where this look is not answered, the next one may be
            with contextlib.suppress(PrefectHTTPStatusError, httpx.HTTPError):
                state = (await client.read_flow_run(context.flow_run.id)).state
                if state is not None and state.is_paused():
                    return Pause(state=state)


MOST_SUBFLOWS = 1_000_000  # of one start


def count_apart(subflow: Callable[..., object], start: int) -> None:
    """Have this start's runs of a subflow be new ones. start: its number among the starts of the flow run.

    Prefect finds subflow runs again by their order. After a pause the first one would be taken for the first before it, and
    its time would begin there.
    """
    context = FlowRunContext.get()
    assert context is not None
    context.task_run_dynamic_keys[Task(fn=subflow).task_key] = start * MOST_SUBFLOWS


def cancel_interrupted(flow_run_id: str, since: datetime, message: str) -> None:
    """Mark what a flow run had at work since then, and was interrupted, as cancelled; the flow run itself keeps its state."""
    with contextlib.suppress(*UNANSWERED), get_client(sync_client=True) as client:
        types = [*AT_WORK_TYPES, *BY_SIGNAL_TYPES]
        _settle_subflows(client, UUID(flow_run_id), lambda: Cancelled(message=message), types, since)


def settle_dead(flow_run_ids: Sequence[str], message: str) -> list[str]:
    """Give flow runs, of many the last NEWEST, whose processes are dead a final state, where Prefect still shows them at work; returns their ids.

    Those of deployments are cancelled: one that crashed is resumed by the automation. Others crashed. A flow run that is paused or
    scheduled stays. Without an answer of the server, or on another server, nothing is done: states are for people.
    """
    try:
        with get_client(sync_client=True) as client:
            wanted = FlowRunFilter(
                id=FlowRunFilterId(any_=[UUID(each) for each in flow_run_ids[-NEWEST:]]), state=AT_WORK
            )
            found = client.read_flow_runs(flow_run_filter=wanted)
            for each in found:
                state = Crashed if each.deployment_id is None else Cancelled
                _settle(client, each.id, partial(state, message=message), AT_WORK_TYPES)
    except UNANSWERED as error:
        log.info("states of earlier flow runs stay as they are: %s", error)
        return []
    return [str(each.id) for each in found]


def settle_killed(flow_run_ids: Sequence[str], message: str) -> list[str]:
    """`settle_dead`, and `settle_late_tasks` a moment later if it found any: for a command that ends then."""
    found = settle_dead(flow_run_ids, message)
    if found:
        time.sleep(RECORDED_S)
        settle_late_tasks(flow_run_ids, message)
    return found


def settle_late_tasks(flow_run_ids: Sequence[str], message: str) -> None:
    """Give task runs below flow runs whose processes are dead a final state, where Prefect shows them at work.

    The server records task runs from events, later than it answers: some appear after `settle_dead` has looked. Without an
    answer of the server nothing is done.
    """
    try:
        with get_client(sync_client=True) as client:
            tasks = client.read_task_runs(
                flow_run_filter=FlowRunFilter(
                    parent_flow_run_id=FlowRunFilterParentFlowRunId(
                        any_=[UUID(each) for each in flow_run_ids[-NEWEST:]]
                    )
                ),
                task_run_filter=TaskRunFilter(
                    state=TaskRunFilterState(type=TaskRunFilterStateType(any_=AT_WORK_TYPES))
                ),
            )
            for task in tasks:
                client.set_task_run_state(task.id, Crashed(message=message), force=True)
    except UNANSWERED as error:
        log.info("states of earlier task runs stay as they are: %s", error)


def cancel_ended(flow_run_id: str, message: str) -> bool:
    """Mark a flow run whose process was ended on purpose as cancelled, and what it had at work.

    False for one that ended otherwise before, and where no server answers that knows it.
    """
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(flow_run_id)).state
            if state is None or state.type not in {*AT_WORK_TYPES, *BY_SIGNAL_TYPES}:
                return False
            _settle(
                client,
                UUID(flow_run_id),
                lambda: Cancelled(message=message),
                [*AT_WORK_TYPES, *BY_SIGNAL_TYPES],
            )
    except UNANSWERED:
        return False
    return True


def _settle(
    client: SyncPrefectClient, flow_run_id: UUID, state: Callable[[], State[None]], types: list[StateType]
) -> None:
    """Set the state of a flow run, and of its subflows and their task runs that are in a state of these types."""
    _settle_subflows(client, flow_run_id, state, types)
    client.set_flow_run_state(flow_run_id, state(), force=True)


def _settle_subflows(
    client: SyncPrefectClient,
    flow_run_id: UUID,
    state: Callable[[], State[None]],
    types: list[StateType],
    since: datetime | None = None,
) -> None:
    """The same of its subflows alone, of those that began since then, and of those that were about to begin."""
    parent = FlowRunFilterParentFlowRunId(any_=[flow_run_id])
    begun = FlowRunFilterStartTime(after_=since) if since else None
    children = [
        FlowRunFilter(parent_flow_run_id=parent, state=_of(types), start_time=begun),
        FlowRunFilter(parent_flow_run_id=parent, state=_of([StateType.PENDING])),
    ]
    for child in (each for some in children for each in client.read_flow_runs(flow_run_filter=some)):
        tasks = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[child.id])),
            task_run_filter=TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=types))),
        )
        for task in tasks:
            client.set_task_run_state(task.id, state(), force=True)
        client.set_flow_run_state(child.id, state(), force=True)
