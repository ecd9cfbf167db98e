"""Sets the state of flow runs from outside their processes. Knows nothing of the reasons."""

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
NEWEST = 50  # flow runs of a run to ask about
RECORDED_S = 2.0  # within this time an idle server records the last events of a killed process
LOOK_S = 3.0  # seconds between requests for the state
AT_WORK_TYPES = [StateType.RUNNING, StateType.CANCELLING]
BY_SIGNAL_TYPES = [
    StateType.CRASHED,
    StateType.CANCELLED,
]  # set by Prefect after a signal, and by the driver
# the flow run belongs to another server, or the server answers with an error; RuntimeError: no server answers
UNANSWERED = (ObjectNotFound, PrefectHTTPStatusError, httpx.HTTPError, RuntimeError)


def _of(types: list[StateType]) -> FlowRunFilterState:
    return FlowRunFilterState(type=FlowRunFilterStateType(any_=types))


AT_WORK = _of(AT_WORK_TYPES)


def of_deployment() -> bool:
    """Whether the current flow run was started from a deployment."""
    context = FlowRunContext.get()
    return context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None


async def until_suspended() -> Pause:
    """Wait until the current flow run of a deployment is paused from outside; returns the exception that Prefect expects then.

    Prefect checks only when a task or a flow run starts or ends, so a long rollout would run to its end first.
    """
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    async with get_client() as client:
        while True:
            await asyncio.sleep(LOOK_S)
            # if the server does not answer now, the next request may succeed
            with contextlib.suppress(PrefectHTTPStatusError, httpx.HTTPError):
                state = (await client.read_flow_run(context.flow_run.id)).state
                if state is not None and state.is_paused():
                    return Pause(state=state)


MOST_SUBFLOWS = 1_000_000  # more than one start ever has


def count_apart(subflow: Callable[..., object], start: int) -> None:
    """Number this start's subflow runs so that Prefect takes them for new ones. start: counts the starts of the flow run.

    Prefect identifies subflow runs by their order. After a pause it would take the first one for the first before the pause,
    and count its time from then.
    """
    context = FlowRunContext.get()
    assert context is not None
    context.task_run_dynamic_keys[Task(fn=subflow).task_key] = start * MOST_SUBFLOWS


def cancel_interrupted(flow_run_id: str, since: datetime, message: str) -> None:
    """Mark interrupted subflows and task runs of a flow run, started since then, as cancelled. The flow run keeps its state."""
    with contextlib.suppress(*UNANSWERED), get_client(sync_client=True) as client:
        types = [*AT_WORK_TYPES, *BY_SIGNAL_TYPES]
        _settle_subflows(client, UUID(flow_run_id), lambda: Cancelled(message=message), types, since)


def settle_dead(flow_run_ids: Sequence[str], message: str) -> list[str]:
    """Set a final state for flow runs whose processes are dead, if Prefect still shows them as running; returns their ids.

    Looks at the last NEWEST of them. Flow runs of deployments become cancelled, since the automation would resume a crashed one;
    others become crashed. Paused and scheduled ones stay. If the server does not answer or does not know them, does nothing:
    states are for people only.
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
    """`settle_dead` and, if it found any, `settle_late_tasks` a moment later. For a command that ends afterwards."""
    found = settle_dead(flow_run_ids, message)
    if found:
        time.sleep(RECORDED_S)
        settle_late_tasks(flow_run_ids, message)
    return found


def settle_late_tasks(flow_run_ids: Sequence[str], message: str) -> None:
    """Set a final state for task runs of dead flow runs, if Prefect still shows them as running.

    The server records task runs from events, with a delay, so some appear only after `settle_dead`. If the server does not
    answer, does nothing.
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
    """Mark a flow run whose process was ended on purpose as cancelled, with its running subflows and task runs.

    False if it had already ended in another way, or if the server does not answer or does not know it.
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
    """Set the state of a flow run, and of its subflows and their task runs if their state has one of these types."""
    _settle_subflows(client, flow_run_id, state, types)
    client.set_flow_run_state(flow_run_id, state(), force=True)


def _settle_subflows(
    client: SyncPrefectClient,
    flow_run_id: UUID,
    state: Callable[[], State[None]],
    types: list[StateType],
    since: datetime | None = None,
) -> None:
    """The same for its subflows only. `since`: only subflows that have started since then, or were about to start."""
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
