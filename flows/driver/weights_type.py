"""Resolves `model.dtype: auto`: a run keeps its type; a new run has the stored type on GPUs, and float32 on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, cast

from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.config.plan.layout import layout_of, visible_gpus
from millrace.core.errors import ConfigError, MissingFileError
from millrace.core.families.tensors import stored_type
from millrace.flows.driver.stored_run import settings_of

DType = Literal["float32", "bfloat16"]


def settled(config: RunConfig) -> RunConfig:
    """The configuration with `auto` replaced by the run's type. model.path is a folder.

    Raises ConfigError if the user must choose for a new run, StorageError if the run cannot be read.
    """
    return (
        config.with_dtype(_of_run(config) or of_new_run(config)) if config.model.dtype == "auto" else config
    )


def of_new_run(config: RunConfig) -> DType:
    """The type of `auto` for a new run on this host. Raises ConfigError for a stored type that cannot be trained."""
    if layout_of(config, visible_gpus()).device == "cpu":
        return "float32"
    stored = stored_as(config.model.path)
    if stored == "float16":
        raise ConfigError(
            "auto is the type that the checkpoint is stored in, and float16 cannot be trained",
            where="model.dtype",
            remedy="set it to bfloat16, which rounds the weights, or to float32, which keeps them and needs twice the memory",
        )
    return cast(DType, stored)


def stored_as(folder: str) -> str:
    """The type of a folder's weights: from its files, else from config.json, else float32."""
    file = Path(folder) / "config.json"
    if not (stored := stored_type(folder)) and file.exists():
        values = json.loads(file.read_text(encoding="utf-8"))
        stored = values.get("dtype") or values.get("torch_dtype")
    return stored or "float32"


def _of_run(config: RunConfig) -> DType | None:
    """The type of the run that has this name, or of its parent; None for a new run."""
    try:
        record = RunFolder(config.storage.root, config.run.name).store.read_sealed("run.json")
    except MissingFileError:
        return None
    return cast(DType, settings_of(record)["model"]["dtype"])
