"""Rules of secrets: a configuration may hold none, because it is stored with the run, in Prefect and in MLflow."""

from collections.abc import Iterator, Mapping
from typing import Any

from millrace.core.config.parts.problems import Problem
from millrace.core.config.parts.redaction import (
    HIDDEN,
    is_known_secret,
    is_reference,
    is_secret_name,
    secret_in_url,
    shown_text,
)
from millrace.core.config.parts.restart import decided
from millrace.core.config.run_config import RunConfig

STORED = "a configuration is stored with the run, in Prefect and in MLflow, and a secret must not be"
EXPORT = "export it under a name you choose and write ${env:NAME}, or save it as a Secret block of Prefect and write ${prefect:BLOCK}"
TAKEN = "options of your functions, env and headers of an MCP server, engines.key and algorithm.teacher_server.key"
URL_REMEDY = {
    "tracking.uri": "leave it out; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or PGPASSWORD",
}
STORE = "leave it out: credentials of storage come from the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


def problems(config: RunConfig) -> Iterator[Problem]:
    """Secrets in URLs and options, and references in fields that are not resolved."""
    for path, value, _ in decided(config):
        yield from _problems(path, value, path)


def _problems(path: str, value: Any, field: str) -> Iterator[Problem]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            place = f"{path}.{name}"
            if is_secret_name(str(name)) and isinstance(item, str) and item and not is_reference(item):
                yield Problem(place, HIDDEN, STORED, EXPORT if is_replaced(field) else "remove it")
            else:
                yield from _problems(place, item, field)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _problems(f"{path}.{number}", item, field)
    elif isinstance(value, str):
        if is_known_secret(value):
            yield Problem(path, shown_text(value), STORED, EXPORT if is_replaced(field) else "leave it out")
        elif secret_in_url(value):
            remedy = EXPORT if is_replaced(field) else URL_REMEDY.get(field, STORE)
            yield Problem(path, shown_text(value), STORED, remedy)
        elif is_reference(value) and not is_replaced(field):
            yield Problem(path, value, f"references are replaced in {TAKEN} alone", "write the value itself")


def is_replaced(field: str) -> bool:
    """Whether references in a field's value are replaced."""
    if field.startswith("engines."):
        return field == "engines.key"
    return field == "algorithm.teacher_server.key" or field.endswith((".options", ".mcp.env", ".mcp.headers"))
