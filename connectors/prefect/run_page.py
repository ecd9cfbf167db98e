"""The page of a training run's flow run: its log, its tags, its events, and artifacts that are updated with each iteration.

Owns the calls to Prefect; callers decide what is shown, and when an event is sent for the server's automations. Artifacts that
are written once are not its concern.
"""

import logging
from typing import Literal
from uuid import UUID

from prefect import tags
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import FlowRunContext, TagsContext
from prefect.events import emit_event
from prefect.logging.handlers import APILogHandler

from millrace.connectors.prefect.server import LOGGERS
from millrace.core.tracker import with_run_tags

Kind = Literal["markdown", "image", "progress"]

__all__ = ["RunPage", "log_to_page", "tags", "untagged"]


def log_to_page() -> None:
    """From now on send millrace's log lines to the page of their flow run, for every way to start it.

    Prefect does this itself only if PREFECT_LOGGING_EXTRA_LOGGERS names the loggers before Prefect is imported.
    """
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not logger.isEnabledFor(logging.INFO):
            logger.setLevel(logging.INFO)
        if not any(isinstance(handler, APILogHandler) for handler in logger.handlers):
            logger.addHandler(APILogHandler())


def untagged() -> TagsContext:
    """A context without tags: each tag of a task run costs a call to the server."""
    return TagsContext(current_tags=set())


class RunPage:
    """The page of one flow run. Can be used from any context of its process."""

    def __init__(self, flow_run_id: str) -> None:
        self.flow_run_id = flow_run_id
        self._handler = APILogHandler()
        self._artifacts: dict[str, UUID] = {}

    def line(self, text: str) -> None:
        """Add a line to the page's log only."""
        record = {"name": LOGGERS[0], "levelno": logging.INFO, "levelname": "INFO", "msg": text}
        self._handler.handle(logging.makeLogRecord({**record, "flow_run_id": self.flow_run_id}))

    async def tag(self, of_run: set[str]) -> None:
        """Set the tags of the flow run's run. Its tags of other kinds stay."""
        async with get_client() as client:
            had = (await client.read_flow_run(UUID(self.flow_run_id))).tags
            await client.update_flow_run(UUID(self.flow_run_id), tags=with_run_tags(had, of_run))

    async def show(self, key: str, kind: Kind, data: str | float, description: str) -> None:
        """Show an artifact. It replaces this process's last artifact with the same key.

        data: Markdown, a picture's address, or progress in percent.
        """
        async with get_client() as client:
            if key in self._artifacts:
                await client.update_artifact(
                    self._artifacts[key], ArtifactUpdate(data=data, description=description)
                )
                return
            made = ArtifactCreate(
                key=key, type=kind, data=data, description=description, flow_run_id=UUID(self.flow_run_id)
            )
            self._artifacts[key] = (await client.create_artifact(made)).id


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
