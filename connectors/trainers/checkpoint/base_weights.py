"""The weights that a checkpoint of adapters belongs to: it names them by their hashes, and is loaded beside no others."""

from collections.abc import Mapping
from pathlib import Path

from millrace.connectors.storage.sampled_hash import sampled_hash
from millrace.connectors.trainers.checkpoint.folders import on_rank_0
from millrace.core.config import RunConfig
from millrace.core.errors import TrainerError

BASE = "base"  # of complete.json


def base_marked(config: RunConfig) -> dict[str, dict[str, str]]:
    """What complete.json says of the weights beside adapters; empty without trainer.lora."""
    return {} if config.trainer.lora is None else {BASE: _hashes(Path(config.model.path))}


def check_base(config: RunConfig, marker: Mapping[str, dict[str, str]], url: str) -> None:
    """Raise TrainerError, on every rank, if a checkpoint has adapters and the run trains all weights, or the other way round, or if
    its adapters belong to other weights. All ranks must call it."""
    now = on_rank_0(lambda: base_marked(config)).get(BASE)
    stored = marker.get(BASE)
    if stored == now:
        return
    if stored is None or now is None:
        holds = "all weights" if stored is None else "adapters alone"
        raise TrainerError(
            f"holds {holds}",
            where=url,
            remedy="set trainer.lora as the run had it that saved the checkpoint",
        )
    name = min(name for name in stored.keys() | now.keys() if stored.get(name) != now.get(name))
    raise TrainerError(
        f"its adapters belong to another {name} than that of model.path = {config.model.path}",
        where=url,
        remedy="name the model that they were trained beside",
    )


def _hashes(folder: Path) -> dict[str, str]:
    """The hashes of the files that hold weights."""
    return {path.name: sampled_hash(path) for path in sorted(folder.glob("*.safetensors"))}
