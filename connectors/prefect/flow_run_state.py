"""The state of a flow run, set from outside its process. Knows nothing of why."""

from __future__ import annotations

import asyncio
import contextlib
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound, Pause, PrefectHTTPStatusError
from prefect.states import Cancelled

__all__ = ["cancel_ended", "of_deployment", "until_suspended"]

LOOK_S = 3.0  # until the next look at the server's state


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


def cancel_ended(flow_run_id: str, message: str) -> bool:
    """Mark a deployment's flow run, whose process was ended on purpose, as cancelled: else it is resumed.

    False where there is none that runs, or ran until its process ended.
    """
    try:
        with get_client(sync_client=True) as client:
            found = client.read_flow_run(UUID(flow_run_id))
            state = found.state
            if found.deployment_id is None or state is None or not (state.is_running() or state.is_crashed()):
                return False
            client.set_flow_run_state(UUID(flow_run_id), Cancelled(message=message), force=True)
    except (ObjectNotFound, PrefectHTTPStatusError, httpx.HTTPError, RuntimeError):
        return False  # of another server, or it does not answer; RuntimeError: no server answers
    return True
