"""run.json records of older runs, lifted to today's fields. Pure.

A record holds the run's resolved configuration and, as `config_version`, the shape it has. Every reader of a record goes
through `lifted`, so that an older run is resumed, replayed, shown, verified and branched as before.

Records without a version are of version 1, whose fields were flat: each estimator and loss had the fields of all.

`seed_name` is what seeds of samples are derived from besides run.seed: empty, so that runs of one configuration are equal
under any name. Runs from before the field derived seeds from their names, and still do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from millrace.core.config.algorithm import Algorithm
from millrace.core.config.parts.menu import variants
from millrace.core.config.run_config import RunConfig
from millrace.core.errors import ConfigError

VERSION = 2

NEW_FIELDS = {  # fields of version 1 with another path today
    "filter.function": "filter.group_filter",
    "algorithm.shaping_function": "algorithm.shaping",
    "algorithm.advantage_function": "algorithm.advantage.function",
    "algorithm.divide_by_std": "algorithm.advantage.divide_by_std",
    "algorithm.epsilon": "algorithm.advantage.epsilon",
    "algorithm.gamma": "algorithm.advantage.gamma",
    "algorithm.lam": "algorithm.advantage.lam",
    "algorithm.critic": "algorithm.advantage.critic",
    "algorithm.loss_function": "algorithm.loss.function",
    "algorithm.clip_low": "algorithm.loss.clip_low",
    "algorithm.clip_high": "algorithm.loss.clip_high",
    "algorithm.dual_clip": "algorithm.loss.dual_clip",
    "algorithm.sapo_temperatures": "algorithm.loss.temperatures",
}
OUR_PACKAGES = re.compile(
    r"^(core|connectors|tasks|flows|deployments)\.[\w.]+:\w+$"
)  # before they were millrace's


def lifted(record: Mapping[str, Any]) -> dict[str, Any]:
    """A run.json with its configurations (its own, and its parent's if it is a branch) and its seed_name in today's shape.

    Raises ConfigError if a later millrace wrote it, or a configuration in it makes no sense.
    """
    version = record.get("config_version", 1)
    name = record.get("name", "?")
    if version > VERSION:
        raise ConfigError(
            f"config_version {version} is of a later millrace; this one reads up to {VERSION}",
            where=f"run.json of {name}",
            remedy="install that one",
        )
    today = {**record, "config_version": VERSION, "seed_name": record.get("seed_name", name)}
    if version == VERSION:
        return today
    if record.get("config") is not None:
        today["config"] = _from_version_1(record["config"], f"run.json of {name}")
    if "parent" in record and record["parent"].get("config") is not None:
        config = _from_version_1(record["parent"]["config"], f"parent in run.json of {name}")
        today["parent"] = {**record["parent"], "config": config}
    return today


def _from_version_1(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    values = _with_packages(config)
    algorithm = values["algorithm"]
    if algorithm["loss"] != "sft" and algorithm["loss_function"] is not None:
        algorithm["loss"] = "function"
    if algorithm["advantage_function"] is not None:
        algorithm["advantage"] = "function"
    # it computed the same
    if algorithm["aggregation"] == "per_rollout":
        algorithm["aggregation"] = "sequence_mean"
    for choice in ("advantage", "loss"):
        algorithm[choice] = {"kind": algorithm[choice]}
    for old, new in NEW_FIELDS.items():
        _move(values, old.split("."), new.split("."))
    fields = RunConfig.model_fields
    for section in ("engines", "sync"):
        _keep(values[section], variants(fields[section])[values[section]["kind"]])
    for choice in ("advantage", "loss"):
        _keep(algorithm[choice], variants(Algorithm.model_fields[choice])[algorithm[choice]["kind"]])
    try:
        return RunConfig.model_validate(values).model_dump(mode="json")
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise ConfigError(f"its configuration cannot be read: {'; '.join(wrong)}", where=where) from error


def _with_packages(value: Any) -> Any:
    """A copy in which import paths of millrace's modules have today's package."""
    if isinstance(value, Mapping):
        return {name: _with_packages(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_packages(item) for item in value]
    return f"millrace.{value}" if isinstance(value, str) and OUR_PACKAGES.match(value) else value


def _move(values: dict[str, Any], old: list[str], new: list[str]) -> None:
    *above, last = old
    source = values
    for part in above:
        source = source[part]
    value = source.pop(last)
    *above, last = new
    target = values
    for part in above:
        target = target[part]
    target[last] = value


def _keep(values: dict[str, Any], variant: type[BaseModel]) -> None:
    """Remove the fields that this variant does not have; they had no effect under its kind."""
    for name in [name for name in values if name not in variant.model_fields]:
        del values[name]
