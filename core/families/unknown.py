"""Models whose family is not known here: what their config.json says plainly. transformers makes them. No torch."""

from dataclasses import dataclass
from pathlib import Path

from millrace.core.errors import ConfigError
from millrace.core.families.architecture import Architecture, architecture
from millrace.core.families.config_file import WHOLE, read_hf_config, read_object
from millrace.core.families.registry import family_of


@dataclass(frozen=True)
class UnknownModel:
    """What is checked of a model of an unknown family."""

    family: str  # model_type
    vocab: int
    positions: int
    heads: int | None  # of attention; None: the file does not say


def shape_of(folder: str, field: str = "model.path") -> Architecture | None:
    """The architecture of a folder's model; None if its family is not known here. Raises ConfigError as `read_hf_config`."""
    where = f"{field} = {folder}"
    config = read_object(Path(folder) / "config.json", where)
    if family_of(config.get("model_type")) is None:
        return None
    return architecture(read_hf_config(folder, field))


def read_unknown(folder: str, field: str = "model.path") -> UnknownModel:
    """The sizes of a folder's model. Raises ConfigError naming the key that is missing."""
    where = f"{field} = {folder}"
    config = read_object(Path(folder) / "config.json", where)
    text = config.get("text_config")
    keys = {**(text if isinstance(text, dict) else {}), **config}
    for key, kind in (("model_type", str), ("vocab_size", int), ("max_position_embeddings", int)):
        if not isinstance(keys.get(key), kind):
            raise ConfigError(f"config.json has no {key}", where=where, remedy=WHOLE)
    heads = keys.get("num_attention_heads")
    return UnknownModel(
        keys["model_type"],
        keys["vocab_size"],
        keys["max_position_embeddings"],
        heads if isinstance(heads, int) else None,
    )
