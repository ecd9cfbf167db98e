"""The state of a flow run, set from outside its process. Knows nothing of why."""

from __future__ import annotations

from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Cancelled

__all__ = ["cancel_ended", "of_deployment"]


def of_deployment() -> bool:
    """Whether the flow run that is at work here was started from a deployment."""
    context = FlowRunContext.get()
    return context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None


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
