"""The schedules of deployments, as a prefect.yaml says them: to create a deployment again deletes those that it has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.exceptions import ObjectNotFound


async def schedules_of(deployments: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """The schedules that deployments have on the server, by name; an empty list for one that is not there."""
    found = {}
    async with get_client() as client:
        for name in deployments:
            try:
                schedules = (await client.read_deployment_by_name(name)).schedules
            except ObjectNotFound:
                schedules = []
            found[name] = [_described(schedule) for schedule in schedules]
    return found


def _described(schedule: DeploymentSchedule) -> dict[str, Any]:
    when = schedule.schedule.model_dump(exclude_none=True)
    if "interval" in when:
        when |= {"interval": when["interval"].total_seconds(), "anchor_date": when["anchor_date"].isoformat()}
    about = {"active": schedule.active, "parameters": schedule.parameters, "slug": schedule.slug}
    return {**when, **{name: value for name, value in about.items() if value is not None}}
