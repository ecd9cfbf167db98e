"""The model of a run that gives its name on Hugging Face: at the run's commit, in a folder of this host.

run.json keeps the commit that the first start found. Later starts use it, even if the name then means another commit.
"""

from __future__ import annotations

from typing import NamedTuple

from millrace.connectors.huggingface.hub import is_named, snapshot
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.errors import MissingFileError


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
    try:
        record = RunFolder(config.storage.root, config.run.name).store.read_sealed("run.json")
    except MissingFileError:
        return None
    settings = record["config"] or record["parent"]["config"]
    same = (settings["model"]["path"], settings["model"].get("revision")) == (
        config.model.path,
        config.model.revision,
    )
    return record.get("model_commit") if same else None
