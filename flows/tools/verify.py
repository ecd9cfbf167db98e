"""`millrace verify`: every hash, the ledger and the lineage of a run, checked again from storage alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from rich.progress import track

from millrace.connectors.storage.parts import read_parts
from millrace.connectors.storage.run_folder import COMPLETE, RunFolder
from millrace.connectors.storage.store import Store
from millrace.core.config import RunConfig
from millrace.core.contracts.ids import derived_seed, iteration_number
from millrace.core.contracts.sample import columns
from millrace.core.errors import DataError, StorageError
from millrace.core.ledger import Ledger
from millrace.core.lineage import (
    Drawn,
    Generated,
    Judged,
    Scored,
    StoredIteration,
    Trained,
    inconsistencies,
)
from millrace.flows.tools.browse import run_record, settings_of

Row = TypeVar("Row")


@dataclass
class Verdict:
    """How much was checked, and what is wrong with it."""

    problems: list[str] = field(default_factory=list)
    iterations: int = 0
    files: int = 0
    trained_samples: int = 0
    checkpoints: int = 0
    open_iteration: int | None = None


def verify_run(root: str, run: str) -> Verdict:
    """Check a run. Raises StorageError if there is no such run."""
    record, folder, verdict = run_record(root, run), RunFolder(root, run), Verdict()
    config = RunConfig.model_validate(settings_of(record))
    try:
        committed = sorted(folder.manifests())
    except StorageError as error:
        verdict.problems.append(str(error))
        return verdict
    for index in track(committed, description=f"verifying {run}", transient=True):
        broken = folder.verify(index)
        verdict.problems += broken
        manifest = folder.manifest(index)
        assert manifest is not None
        verdict.files += len(manifest.files)
        if not broken:
            verdict.problems += _lineage(folder, config, index, verdict)
        verdict.iterations += 1
    verdict.problems += _ledger(folder, record, config)
    for done in folder.complete_checkpoints():
        verdict.problems += _checkpoint(folder.store.child(folder.checkpoint_path(done)))
        verdict.checkpoints += 1
    if folder.store.list(folder.iteration_path(len(committed))):
        verdict.open_iteration = len(committed)
    return verdict


def _lineage(folder: RunFolder, config: RunConfig, index: int, verdict: Verdict) -> list[str]:
    store, steps = folder.iteration(index), config.steps_per_iteration
    supervised = config.algorithm.supervised
    stored = StoredIteration(
        index=index,
        prompts=_rows(store, "prompts", Drawn),
        rollouts=[] if supervised else _parts(store, "rollouts", Generated),
        rewards=[] if supervised else _parts(store, "rewards", Scored),
        verdicts=_rows(store, "verdicts", Judged),
        batch=_rows(store, "batch", Trained),
        steps=store.read_json("step.json")["steps"],
    )
    verdict.trained_samples += len(stored.batch)
    return inconsistencies(stored, range(index * steps + 1, (index + 1) * steps + 1))


def _rows(store: Store, kind: str, row: type[Row]) -> list[Row]:
    rows: list[Row] = store.read_table(f"{kind}.parquet", kind, columns=columns(row)).to_pylist()
    return rows


def _parts(store: Store, kind: str, row: type[Row]) -> list[Row]:
    rows: list[Row] = read_parts(store, kind, kind, columns=columns(row)).to_pylist()
    return rows


def _ledger(folder: RunFolder, record: dict[str, Any], config: RunConfig) -> Iterator[str]:
    """Draw every iteration again from the history before it: the ledger must draw the same groups."""
    history = folder.history()
    spans = record.get("data") or []
    ends = [*(span["since"] for span in spans[1:]), len(history)]
    for span, end in zip(spans, ends, strict=True):
        since, seed = span["since"], config.run.seed
        sources = {s.name: (s.weight, span["sources"][s.name]["usable"]) for s in config.data.sources}
        ledger = Ledger(
            derived_seed(seed, "data", since) if since else seed,
            sources,
            shuffle=config.data.shuffle,
            first=since,
        )
        for index in range(since, end):
            keys = history[index].keys()
            drawn = ledger.draw(index, config.rollout.prompts, len(keys) - config.rollout.prompts)
            if [draw.key for draw in drawn] != keys:
                yield (
                    f"iteration {iteration_number(index)} holds other groups than the ledger draws after the "
                    "iterations before it"
                )
                return
            try:
                ledger.apply(history[index])
            except DataError as error:
                yield str(error)
                return


def _checkpoint(store: Store) -> Iterator[str]:
    marker = store.read_json(COMPLETE)
    for entry in marker["files"]:
        problem = _file_problem(partial(_hash, store, entry["path"]), entry["sha256"])
        if problem:
            yield f"{store.url_of(entry['path'])}: {problem}"


def _file_problem(hash_of: Callable[[], str], expected: str) -> str | None:
    try:
        actual = hash_of()
    except StorageError as error:
        return str(error)
    if actual == expected:
        return None
    return "its content does not have the hash that complete.json names; restore the file"


def _hash(store: Store, path: str) -> str:
    digest = hashlib.sha256()
    for block in store.blocks(path):
        digest.update(block)
    return digest.hexdigest()
