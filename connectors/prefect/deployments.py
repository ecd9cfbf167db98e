"""Deployments, their work pool, and the automations of a YAML file on the Prefect server. Knows nothing of what they do."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import yaml
from prefect import Flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.workers.utilities import get_default_base_job_template_for_infrastructure_type

from millrace.core.errors import MillraceError


class Described(TypedDict):
    """A deployment, as described in prefect.yaml."""

    name: str
    entrypoint: str  # import path of its flow
    description: str
    tags: list[str]
    parameters: dict[str, Any]


class Pool(TypedDict):
    """A work pool, and the job variables of deployments on it."""

    name: str
    kind: str
    variables: dict[str, Any]


async def create_deployments(
    described: Sequence[Described], flows: Mapping[str, Flow[..., Any]], pool: Pool, folder: str
) -> None:
    """Create deployments, or update existing ones with the same names, which keep their schedules.

    flows: by entrypoint. folder: the working directory of flow runs. Creates the pool if it does not exist.
    """
    directory = {"prefect.deployments.steps.set_working_directory": {"directory": folder}}
    async with get_client() as client:
        await _make_pool(client, pool)
        ids = {path: await client.create_flow(flow) for path, flow in flows.items()}
        for item in described:
            flow = flows[item["entrypoint"]]
            try:
                await client.create_deployment(
                    ids[item["entrypoint"]],
                    item["name"],
                    entrypoint=item["entrypoint"],
                    description=item["description"],
                    tags=item["tags"],
                    parameters=item["parameters"],
                    parameter_openapi_schema=flow.parameters.model_dump(exclude_unset=True),
                    enforce_parameter_schema=flow.should_validate_parameters,
                    schedules=await _schedules(client, f"{flow.name}/{item['name']}"),
                    work_pool_name=pool["name"],
                    job_variables=pool["variables"],
                    pull_steps=[directory],
                )
            except PrefectHTTPStatusError as error:
                raise MillraceError(
                    f"the Prefect server refuses it: {error.response.text}",
                    where=f"{flow.name}/{item['name']}",
                ) from error


async def _make_pool(client: PrefectClient, pool: Pool) -> None:
    try:
        await client.read_work_pool(pool["name"])
    except ObjectNotFound:
        template = await get_default_base_job_template_for_infrastructure_type(pool["kind"])
        wanted = WorkPoolCreate(name=pool["name"], type=pool["kind"], base_job_template=template or {})
        await client.create_work_pool(wanted)


async def _schedules(client: PrefectClient, name: str) -> list[DeploymentScheduleCreate]:
    """The schedules of a deployment, passed on because creating it again would delete them."""
    try:
        found = (await client.read_deployment_by_name(name)).schedules
    except ObjectNotFound:
        return []
    return [
        DeploymentScheduleCreate(
            schedule=one.schedule, active=one.active, parameters=one.parameters, slug=one.slug
        )
        for one in found
    ]


async def keep_automations(file: Path) -> list[str]:
    """Create the automations of a YAML file, or update existing ones with the same names; returns their names.

    An automation that was disabled on the server stays disabled.
    """
    wanted = [AutomationCore.model_validate(item) for item in yaml.safe_load(file.read_text())["automations"]]
    async with get_client() as client:
        for automation in wanted:
            found = await client.read_automations_by_name(automation.name)
            if found:
                automation.enabled = found[0].enabled
                await client.update_automation(found[0].id, automation)
            else:
                await client.create_automation(automation)
    return [automation.name for automation in wanted]
