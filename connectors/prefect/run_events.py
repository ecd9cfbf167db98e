"""Events that a flow run sends about itself, for the server's automations. Knows nothing of when to send them."""

from __future__ import annotations

from typing import Literal

from prefect.context import FlowRunContext
from prefect.events import emit_event

RunEvent = Literal["left", "may-go-on"]


def emit_run_event(event: RunEvent) -> None:
    """Send `millrace.flow-run.EVENT` about the current flow run, with its flow and tags as related resources."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    run = context.flow_run
    flow = {
        "prefect.resource.id": f"prefect.flow.{run.flow_id}",
        "prefect.resource.role": "flow",
        "prefect.resource.name": context.flow.name if context.flow else "",
    }
    tags = [{"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"} for tag in run.tags]
    emit_event(
        f"millrace.flow-run.{event}",
        resource={"prefect.resource.id": f"prefect.flow-run.{run.id}", "prefect.resource.name": run.name},
        related=[flow, *tags],
    )
