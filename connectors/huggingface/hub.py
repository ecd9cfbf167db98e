"""Models given by their Hugging Face name: found in the cache on this host, or downloaded to it.

huggingface_hub does the work, so HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE and HF_TOKEN have their usual meaning. No token is shown or
stored here.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from millrace.core.config.model import Model
from millrace.core.config.parts.redaction import shown_text
from millrace.core.config.reading.files import is_name
from millrace.core.errors import ConfigError

log = logging.getLogger(__name__)

GET = "give a checkpoint folder: one you have, or one made by `hf download NAME --local-dir FOLDER`"
SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "tokenizer*")  # configuration, tokenizer, chat template
WEIGHTS = "*.safetensors"
PATIENCE_S = 5.0  # seconds for the site's answer


@dataclass(frozen=True)
class Snapshot:
    """A model at one commit. `whole`: the folder has the weights too."""

    folder: str
    commit: str
    whole: bool


def is_named(model: Model) -> bool:
    """Whether model.path is a name on Hugging Face, not a folder."""
    return is_name(model.path) and not Path(model.path).exists()


def snapshot(model: Model, commit: str | None = None, weights: bool = True) -> Snapshot:
    """The files of a named model on this host. Downloads missing files.

    commit: the run's commit, if it has one; otherwise model.revision decides. weights: download the weights too.
    If the network or the site does not answer, uses the cache. Raises ConfigError naming field and remedy.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HTTPError, RevisionNotFoundError  # type: ignore[attr-defined]  # of the library below

    files = [*SMALL, *([WEIGHTS] if weights else [])]
    if commit and (held := _cached(model, commit, files)):
        return _found(model, held, weights)
    revision = commit or model.revision
    try:
        # before the download, which would wait half a minute for a site that does not answer
        HfApi().model_info(model.path, revision=revision, timeout=PATIENCE_S)
        folder = snapshot_download(model.path, revision=revision, allow_patterns=files)
    except (OSError, ValueError, HTTPError) as error:
        in_cache = _cached(model, revision, files)
        if in_cache is None or isinstance(error, RevisionNotFoundError):
            raise _refusal(model, commit, error) from None
        folder = in_cache
    return _found(model, folder, weights)


def _found(model: Model, folder: str, weights: bool) -> Snapshot:
    commit = Path(folder).name
    log.info("%s at commit %s is in %s", model.path, commit, folder)
    return Snapshot(folder, commit, weights or _cached(model, commit, [*SMALL, WEIGHTS]) is not None)


def _cached(model: Model, revision: str | None, files: list[str]) -> str | None:
    """The folder of a revision in the cache; None unless it holds all of these files that the model has."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, IncompleteSnapshotError

    try:
        return snapshot_download(model.path, revision=revision, allow_patterns=files, local_files_only=True)
    except (EntryNotFoundError, IncompleteSnapshotError, HFValidationError):
        return None


def _refusal(model: Model, commit: str | None, error: Exception) -> ConfigError:
    """The error for the user, made from huggingface_hub's error."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return ConfigError(
            "no such folder, and on Hugging Face its terms must be accepted first",
            where="model.path",
            remedy=f"accept them at https://huggingface.co/{model.path}, and set HF_TOKEN to your token",
        )
    if isinstance(error, RepositoryNotFoundError):
        return ConfigError(
            "no such folder, and Hugging Face shows no such model to you",
            where="model.path",
            remedy="correct it, or for a private model set HF_TOKEN to a token that may read it",
        )
    if isinstance(error, RevisionNotFoundError):
        return ConfigError(
            f"{model.path} has no such branch, tag or commit",
            where="model.revision",
            remedy="correct it, or leave it out for the newest commit",
        )
    at = f" at commit {commit}" if commit else f" at {model.revision}" if model.revision else ""
    lines = shown_text(str(error.__cause__ or error)).strip().splitlines()
    return ConfigError(
        f"no such folder, Hugging Face's cache on this host does not hold it{at}, and Hugging Face does not answer "
        f"({lines[0] if lines else type(error).__name__})",
        where="model.path",
        remedy=f"try again with a network, or {GET}",
    )
