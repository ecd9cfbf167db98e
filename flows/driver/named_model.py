"""The model of a run: a name on Hugging Face at the run's commit, in a folder of this host, and the type of its weights.

run.json keeps the commit that the first start found. Later starts use it, even if the name then means another commit. With
`model.dtype: auto` a run keeps its type; a new run has the stored type on GPUs, and float32 on a CPU.
"""

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from millrace.connectors.huggingface.hub import is_named, snapshot
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.config.plan.layout import layout_of, visible_gpus
from millrace.core.errors import ConfigError, MissingFileError
from millrace.core.families.tensors import stored_type
from millrace.flows.driver.stored_run import settings_of


class ModelHere(NamedTuple):
    """A configuration whose model.path is a folder, the commit in it if the model was named, and whether its weights are there."""

    config: RunConfig
    commit: str | None
    whole: bool


def model_here(config: RunConfig, weights: bool = True) -> ModelHere:
    """The configuration with its named model's folder instead of the name; missing files are downloaded.

    weights: whether the weights are too. Raises ConfigError as of `snapshot`, StorageError if the run cannot be read.
    """
    if not is_named(config.model):
        return ModelHere(config, None, whole=True)
    return at_commit(config, _commit(config), weights)


def at_commit(config: RunConfig, commit: str | None, weights: bool = True) -> ModelHere:
    """As `model_here`, at this commit; at model.revision if it is None."""
    if not is_named(config.model):
        return ModelHere(config, None, whole=True)
    found = snapshot(config.model, commit, weights)
    model = config.model.model_copy(update={"path": found.folder})
    return ModelHere(config.model_copy(update={"model": model}), found.commit, found.whole)


def _commit(config: RunConfig) -> str | None:
    """The commit that the run or its parent started with; None for a new run, and for a run that started with another name."""
    if (record := _record(config)) is None:
        return None
    model = settings_of(record)["model"]
    same = (model["path"], model.get("revision")) == (config.model.path, config.model.revision)
    return record.get("model_commit") if same else None


def _record(config: RunConfig) -> dict[str, Any] | None:
    """The run.json of the run of this name; None for a new run."""
    try:
        return RunFolder(config.storage.root, config.run.name).store.read_sealed("run.json")
    except MissingFileError:
        return None


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
        values = {**values.get("text_config", {}), **values}
        stored = values.get("dtype") or values.get("torch_dtype")
    return stored or "float32"


def _of_run(config: RunConfig) -> DType | None:
    """The type of the run that has this name, or of its parent; None for a new run."""
    record = _record(config)
    return cast(DType, settings_of(record)["model"]["dtype"]) if record else None
