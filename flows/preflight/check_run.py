"""Check whether the run exists: its progress, the iteration to resume at, and refused changes of fields, files and data."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from millrace.connectors.huggingface.hub import is_named
from millrace.connectors.storage.prompts import size_and_hash
from millrace.connectors.storage.run_folder import MANIFEST, RunFolder, numbers_of
from millrace.core.config import RunConfig
from millrace.core.config.data import Source
from millrace.core.config.parts.problems import Problem
from millrace.core.config.parts.restart import Change
from millrace.core.config.reading.findings import by_name
from millrace.core.config.reading.load import readable
from millrace.core.errors import ConfigError, MillraceError, MissingFileError, StorageError
from millrace.flows.driver.fingerprints import of_model
from millrace.flows.driver.named_model import DType
from millrace.flows.driver.rollouts_source import source_problems
from millrace.flows.driver.same_run import (
    check_branch,
    hashed_in,
    refused_in_branch,
    refused_in_run,
    stored_config,
)
from millrace.flows.driver.start_changes import branched_fields, check_same_model
from millrace.flows.driver.stored_run import check_no_run

HASHED = 16 << 20  # size up to which a source is compared by its hash; larger ones by size
PLACES = ("iterations", "checkpoints", "lease")  # places that a run writes to
ANOTHER = "give the new run another run.name"


@dataclass
class StoredRun:
    """What storage holds under the run's name."""

    exists: bool = False
    branch_of: str = ""  # the run that it is a branch of, if the branch was not started yet
    committed: int = 0  # number of committed iterations
    checkpoint: int = 0  # iterations in the newest complete checkpoint; 0 for the initial weights
    dtype: DType | None = None  # type of its weights


def check_run(config: RunConfig, stored: StoredRun) -> list[Problem]:
    """Problems of resuming the run of this name, if there is one, or of its rollouts' source; fills `stored`."""
    problems = _of_run(config, stored)
    return [*problems, *(source_problems(config) if stored.committed < config.run.iterations else ())]


def _of_run(config: RunConfig, stored: StoredRun) -> list[Problem]:
    name = config.run.name
    folder = RunFolder(config.storage.root, name)
    try:
        try:
            record = readable(folder.store.read_sealed("run.json"))
        except MissingFileError:
            check_no_run(folder.store)
            return []
        stored.exists = True
        stored.committed = _committed(folder)
        complete = folder.complete_checkpoints()
        stored.checkpoint = max((done for done in complete if done <= stored.committed), default=0)
        if stored.committed < config.run.iterations:
            _check_writable(folder)
        return list(_refused(config, record, stored))
    except (StorageError, ConfigError) as error:
        return [
            config.problem("run.name", str(error).removesuffix(f"; {error.remedy}"), error.remedy or ANOTHER)
        ]


def _check_writable(folder: RunFolder) -> None:
    """Raise StorageError if the run's folder can be read and not written. An object store has no rights by folder."""
    if not folder.store.local:
        return
    for store in (folder.store, *map(folder.store.child, PLACES)):
        if store.exists(""):
            store.check_writable("run.name")


def _committed(folder: RunFolder) -> int:
    """Iterations up to the last that has a manifest."""
    numbers = reversed(numbers_of(folder.store, "iterations"))
    found = next((index + 1 for index in numbers if folder.iteration(index).exists(MANIFEST)), 0)
    while folder.iteration(found).exists(MANIFEST):  # a manifest that the listing lacks
        found += 1
    return found


def _refused(config: RunConfig, record: dict[str, Any], stored: StoredRun) -> Iterator[Problem]:
    parent, name = record.get("parent") or {}, config.run.name
    before = stored_config(record["config"] or parent["config"], name)
    stored.dtype = before.dtype
    if record["config"] is None:
        stored.branch_of = parent["run"]
        yield from _of_branch(config, before, parent, hashed_in(record))
    else:
        way = (
            f"`millrace branch {before.run.name} NEW --at {stored.checkpoint} --root {shlex.quote(config.storage.root)}`, "
            "then train run.name=NEW"
        )
        for change in refused_in_run(before, config, hashed_in(record)):
            remedy = f"change it in a branch: {way}" if change.restart.branch else ANOTHER
            yield _changed(config, change, f"run {name} has", remedy)
    try:
        if not is_named(config.model):  # else it is the run's own commit
            prints, branched = {"model": of_model(config)}, branched_fields(record, before, config)
            check_same_model(name, record.get("fingerprints"), prints, branched)
    except ConfigError as error:
        reason = error.reason.replace("\n  ", " ").replace("model.path: ", "")
        yield config.problem("model.path", reason, error.remedy)
    if not config.data.allow_changes:
        yield from _data(config, record)


def _of_branch(
    config: RunConfig, before: RunConfig, parent: dict[str, Any], hashed: set[str]
) -> Iterator[Problem]:
    refused = refused_in_branch(before, config, hashed)
    for change in refused:
        yield _changed(config, change, f"its parent {parent['run']} has", "start a new run")
    if not refused:
        try:
            check_branch(before, config, parent, hashed)
        except ConfigError as error:
            yield Problem(error.where, None, error.reason, error.remedy)


def _changed(config: RunConfig, change: Change, whose: str, otherwise: str) -> Problem:
    """A field that differs from the stored one."""
    return Problem(
        by_name(change.path, config.model_dump(mode="json")),
        change.now,
        f"{whose} {change.before!r:.200}, and it may not change: {change.restart.because}",
        f"put it back, or {otherwise}",
    )


def _data(config: RunConfig, record: dict[str, Any]) -> Iterator[Problem]:
    """Sources whose file differs from the file that the run last drew from."""
    spans = record.get("data") or []
    recorded = spans[-1]["sources"] if spans else {}
    for source in config.data.sources:
        before = recorded.get(source.name)
        now = _size_and_hash(source) if before and source.rows is None else None
        if before and now and now != (before["size"], now[1] and before["sha256"]):
            yield Problem(
                f"data.sources.{source.name}.path",
                source.path,
                f"the file changed under run {config.run.name}: it had {before['size']} bytes, and has {now[0]}",
                f"put it back, {ANOTHER}, or set data.allow_changes=true to continue with it",
            )


def _size_and_hash(source: Source) -> tuple[int, str] | None:
    """Size of a source, and its SHA-256 unless it is large; None if it cannot be read, which other checks report."""
    try:
        return size_and_hash(source, HASHED)
    except (OSError, MillraceError):
        return None
