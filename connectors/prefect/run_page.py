"""The page of a training run's flow run: its log, its tags, and artifacts that are kept up to date while iterations come.

Owns the calls to Prefect; decides nothing of what is shown. Artifacts that are written once belong to whoever makes them.
"""

from __future__ import annotations

import logging
from typing import Literal
from uuid import UUID

from prefect import tags
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import TagsContext
from prefect.logging.handlers import APILogHandler

from millrace.connectors.prefect.server import LOGGERS
from millrace.core.contracts.tracker import with_run_tags

Kind = Literal["markdown", "image", "progress"]

__all__ = ["RunPage", "log_to_page", "tags", "untagged"]


def log_to_page() -> None:
    """From now on millrace's log lines reach the page of the flow run that they belong to, however it was started.

    Prefect does so itself where PREFECT_LOGGING_EXTRA_LOGGERS names them before it is imported.
    """
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not logger.isEnabledFor(logging.INFO):
            logger.setLevel(logging.INFO)
        if not any(isinstance(handler, APILogHandler) for handler in logger.handlers):
            logger.addHandler(APILogHandler())


def untagged() -> TagsContext:
    """Within, what is created gets no tags: for a task run each of them is a call to the server."""
    return TagsContext(current_tags=set())


class RunPage:
    """The page of one flow run, from wherever its process is at work."""

    def __init__(self, flow_run_id: str) -> None:
        self.flow_run_id = flow_run_id
        self._handler = APILogHandler()
        self._artifacts: dict[str, UUID] = {}

    def line(self, text: str) -> None:
        """Add a line to the page's log, and to no other one."""
        record = {"name": LOGGERS[0], "levelno": logging.INFO, "levelname": "INFO", "msg": text}
        self._handler.handle(logging.makeLogRecord({**record, "flow_run_id": self.flow_run_id}))

    async def tag(self, of_run: set[str]) -> None:
        """Give the flow run the tags of its run, besides those of other kinds that it has."""
        async with get_client() as client:
            had = (await client.read_flow_run(UUID(self.flow_run_id))).tags
            await client.update_flow_run(UUID(self.flow_run_id), tags=with_run_tags(had, of_run))

    async def show(self, key: str, kind: Kind, data: str | float, description: str) -> None:
        """Show an artifact, in place of what this process last showed under its key.

        data: Markdown, the address of a picture, or percents of progress.
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
