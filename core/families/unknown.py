"""Models whose family is not known here: what their config.json says plainly. transformers makes them. No torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.core.errors import ConfigError, remedy_of
from millrace.core.families.architecture import Architecture, architecture
from millrace.core.families.config_file import WHOLE, read_hf_config
from millrace.core.families.registry import family_of


@dataclass(frozen=True)
class UnknownModel:
    """What is checked of a model of an unknown family."""

    family: str  # model_type
    vocab: int
    positions: int


def shape_of(folder: str, field: str = "model.path") -> Architecture | None:
    """The architecture of a folder's model; None if its family is not known here. Raises ConfigError as `read_hf_config`."""
    if family_of(_config(folder, field).get("model_type")) is None:
        return None
    return architecture(read_hf_config(folder, field))


def read_unknown(folder: str, field: str = "model.path") -> UnknownModel:
    """The sizes of a folder's model. Raises ConfigError naming the key that is missing."""
    config = _config(folder, field)
    text = config.get("text_config")
    keys = {**(text if isinstance(text, dict) else {}), **config}
    for key, kind in (("model_type", str), ("vocab_size", int), ("max_position_embeddings", int)):
        if not isinstance(keys.get(key), kind):
            raise ConfigError(f"config.json has no {key}", where=f"{field} = {folder}", remedy=WHOLE)
    return UnknownModel(keys["model_type"], keys["vocab_size"], keys["max_position_embeddings"])


def _config(folder: str, field: str) -> dict[str, Any]:
    path, where = Path(folder) / "config.json", f"{field} = {folder}"
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read {path}: {error}", where=where, remedy=remedy_of(error, WHOLE)
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no object", where=where, remedy=WHOLE)
    return config
