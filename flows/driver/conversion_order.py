"""What a conversion is asked for, in words: names on Hugging Face become folders, and a run's checkpoint has the run's model."""

from pathlib import Path
from typing import Literal

from millrace.connectors.huggingface.hub import is_named, snapshot
from millrace.connectors.trainers.megatron.conversion.conversion import DTYPES, Order
from millrace.connectors.trainers.megatron.conversion.sources import DESCRIBED, Form
from millrace.core.config import RunConfig
from millrace.core.config.model import Model
from millrace.core.errors import ConfigError
from millrace.flows.driver.named_model import at_commit
from millrace.flows.driver.stored_run import run_record, settings_of

DType = Literal["float32", "bfloat16", "float16"]


def order_of(
    source: str,
    target: str,
    model: str | None = None,
    to: Form | None = None,
    dtype: DType | None = None,
    file_gib: float = 4.0,
    merge: bool = False,
) -> Order:
    """The order. source, model: folders, or names on Hugging Face, which are downloaded.

    Without a model, a checkpoint in a run's folder has the run's. Raises ConfigError for an address in an object store.
    """
    for field, url in (("source", source), ("target", target), ("model", model or "")):
        if "://" in url:
            raise ConfigError(
                "weights are read and written on this host's disks",
                where=f"{field} = {url}",
                remedy="copy the folder to a disk, or mount the store, and name that",
            )
    where = _folder(source, weights=True)
    return Order(
        source=where,
        target=Path(target),
        model=_folder(model, weights=False) if model else None if merge else _model_of_run(where),
        to=to or ("hf" if merge else None),
        dtype=DTYPES[dtype] if dtype else None,
        file_bytes=round(file_gib * 2**30),
        merge=merge,
    )


def _folder(path: str, *, weights: bool) -> Path:
    named = Model(path=path)
    return Path(snapshot(named, weights=weights).folder if is_named(named) else path)


def _model_of_run(source: Path) -> Path | None:
    """The folder of the model of the run whose checkpoint this is; None if it is no run's, or has a description beside it."""
    run = source.resolve().parent.parent
    if (source / "config.json").is_file() or (source / DESCRIBED).is_dir():
        return None
    if not (run / "run.json").is_file():
        return None
    record = run_record(str(run.parent), run.name)
    config = RunConfig.model_validate(settings_of(record))
    model = Path(at_commit(config, record.get("model_commit"), weights=False).config.model.path)
    if not model.is_dir():
        reason = f"model.path of its run is {model}, which is no folder here"
        raise ConfigError(reason, where=f"source = {source}", remedy="name it: --model FOLDER")
    return model
