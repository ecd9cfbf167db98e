"""Flows of deployments that start from a YAML file: a file on the worker's host, or a recipe that ships with millrace.

The loops are in flows/train.py and flows/sft.py.
"""

from typing import Any

import yaml
from prefect import flow
from prefect.context import FlowRunContext

from millrace.core.config import RunConfig
from millrace.core.config.reading.files import read_files
from millrace.core.config.reading.load import load_config
from millrace.core.errors import ConfigError
from millrace.flows.drive import DriveResult
from millrace.flows.sft import sft
from millrace.flows.train import train


def name_of_file(given: dict[str, Any]) -> str:
    """The name of the run that a file and overrides ask for. If the file has none, its path: the flow reports the error."""
    if named := _overridden(given):
        return named
    try:
        return str(read_files(given["path"])["run"]["name"])
    except (ConfigError, LookupError, TypeError):
        return str(given["path"])


def _overridden(given: dict[str, Any]) -> str | None:
    """The name that overrides give the run."""
    names = [item.partition("=")[2] for item in given.get("overrides") or () if item.startswith("run.name=")]
    return names[-1] if names else None


@flow(name="train", flow_run_name=lambda: name_of_file(_given()))
async def train_file(path: str, overrides: tuple[str, ...] = ()) -> DriveResult:
    """Train the run of a file, by RL or supervised; the same run name resumes.

    Args:
        path: YAML file with the configuration. A relative path means the worker's folder.
        overrides: Fields to set: key=value, dotted, as in run.name=a.
    """
    return await _train(load_config(path, overrides))


def _run_name() -> str:
    """The run's name in the parameters, without validation."""
    given = _given()
    return str(_overridden(given) or given["config"]["run"]["name"])


@flow(name="train", flow_run_name=_run_name)
async def train_recipe(config: RunConfig, overrides: tuple[str, ...] = ()) -> DriveResult:
    """Train a recipe, by RL or supervised, with your changes; the same run name resumes.

    Args:
        config: The recipe, filled in. Relative paths mean the worker's folder.
        overrides: Fields to set on top: key=value, dotted, as in run.name=a. They are for `prefect deployment run`.
    """
    return await _train(with_overrides(_given()) if overrides else config)


def with_overrides(parameters: dict[str, Any]) -> RunConfig:
    """The configuration of a flow run's parameters with its overrides on top.

    It starts from the unvalidated parameters, so that a preset fills fields by the last choice: a validated configuration no
    longer tells which fields were given.
    """
    text = yaml.safe_dump(parameters["config"])
    return load_config(None, parameters.get("overrides") or (), text)


def _given() -> dict[str, Any]:
    """The unvalidated parameters of this flow run."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    assert run is not None, "called within the flow"
    return run.parameters


async def _train(config: RunConfig) -> DriveResult:
    return await (sft.fn if config.algorithm.supervised else train.fn)(config)
