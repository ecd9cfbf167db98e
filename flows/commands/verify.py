"""`millrace verify`: every hash, the ledger and the lineage of a run, checked again from storage alone.

Files that manifests, records and markers name are checked. Other files are strangers, listed separately: nothing reads them.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pyarrow as pa
from rich.progress import track

from millrace.connectors.storage.checkpoint_files import checkpoint_files
from millrace.connectors.storage.files import FileEntry, in_threads, recorded
from millrace.connectors.storage.iteration_files import IterationFiles, check_newest
from millrace.connectors.storage.manifests.manifest import JOINED
from millrace.connectors.storage.parts import check_note, list_notes
from millrace.connectors.storage.run_folder import RunFolder, open_iterations
from millrace.connectors.storage.store import Store
from millrace.core.accounts.buffer import HeldGroups
from millrace.core.accounts.curriculum import SourcePlan, plan_of
from millrace.core.accounts.ledger import Ledger
from millrace.core.accounts.lineage import (
    Drawn,
    Generated,
    Judged,
    Origin,
    RewardRow,
    StoredIteration,
    StoredTurn,
    Trained,
    inconsistencies,
)
from millrace.core.accounts.token_counts import COLUMNS, account_of
from millrace.core.config import RunConfig
from millrace.core.config.data import Source
from millrace.core.contracts.ids import derived_seed, iteration_number
from millrace.core.contracts.rows.prompts import SourceFingerprint
from millrace.core.contracts.sample import columns
from millrace.core.errors import DataError, StorageError
from millrace.flows.commands.named_files import named_by_records, strangers
from millrace.flows.commands.terminal import RootOption, console, guarded
from millrace.flows.driver.stored_run import ahead_of, run_record, settings_of
from millrace.tasks.batching.credited import carried_to

SHOWN = 20  # number of shown files
Row = TypeVar("Row")


def verify(run: str, root: RootOption = "runs") -> None:
    """Check every hash, the ledger and the lineage of a run again; exits with 1 if anything is wrong."""
    verdict = guarded(lambda: verify_run(root, run))
    opened = [str(iteration_number(index)) for index in verdict.open_iterations]
    console.print(
        f"{run}: {verdict.iterations} iterations, {verdict.files} files, {verdict.trained_samples} trained samples, "
        f"{verdict.checkpoints} checkpoints looked at" + (f"; open: {', '.join(opened)}" if opened else "")
    )
    for problem in verdict.problems:
        console.print(f"  {problem}", soft_wrap=True)
    if verdict.strangers:
        console.print(f"files that no manifest names; nothing reads them ({len(verdict.strangers)}):")
        for path in verdict.strangers[:SHOWN]:
            console.print(f"  {path}", soft_wrap=True)
        if len(verdict.strangers) > SHOWN:
            console.print(f"  and {len(verdict.strangers) - SHOWN} more")
    console.print("nothing is wrong" if not verdict.problems else f"{len(verdict.problems)} problems")
    raise SystemExit(1 if verdict.problems else 0)


@dataclass
class Verdict:
    """Counts of checked items, problems, and files that nothing names."""

    problems: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)
    iterations: int = 0
    files: int = 0
    trained_samples: int = 0
    checkpoints: int = 0
    open_iterations: list[int] = field(default_factory=list)


def verify_run(root: str, run: str) -> Verdict:
    """Check a run. Raises StorageError if there is no such run."""
    record, folder, verdict = run_record(root, run), RunFolder(root, run), Verdict()
    config = RunConfig.model_validate(settings_of(record))
    try:
        # reads each manifest, not a summary of them
        committed = range(len(folder.manifests()))
        if committed:
            check_newest(folder, committed[-1])
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
            verdict.problems += _problems(lambda: folder.summaries.check(index))  # noqa: B023 - called at once
            verdict.problems += _lineage(folder, config, index, verdict)
        verdict.iterations += 1
    verdict.problems += _ledger(folder, record, config)
    verdict.problems += _buffer(folder, record, config)
    verdict.open_iterations = open_iterations(folder)
    for index in verdict.open_iterations:
        verdict.problems += _open_iteration(folder, index)
    named = list(_problems_of_records(folder, record, verdict))
    for done in folder.complete_checkpoints():
        verdict.problems += _checkpoint(folder, done)
        verdict.checkpoints += 1
    verdict.strangers = strangers(folder, named)
    return verdict


def _open_iteration(folder: RunFolder, index: int) -> list[str]:
    """Problems of the files that an open iteration's records name, and of its notes of takeovers."""
    files = IterationFiles(folder, index)
    takeovers = _problems(lambda: _check_takeovers(folder, files))
    try:
        named = list(files.entries.values())
    except StorageError as error:
        return [str(error), *takeovers]
    checked = in_threads(lambda entry: _problems(lambda: files.check([entry])), named)
    return [*(line for found in checked for line in found), *takeovers]


def _problems(check: Callable[[], object]) -> list[str]:
    """The problems that a check raises about files."""
    try:
        check()
    except StorageError as error:
        return [str(error)]
    return []


def _check_takeovers(folder: RunFolder, opened: IterationFiles) -> None:
    """Raise StorageError for a note of a takeover that is corrupt or belongs to another run."""
    for path in list_notes(opened.folder):
        folder.owner.check(check_note(opened.folder, path), opened.folder.url_of(path))


def _file_problems(store: Store, entries: Iterable[FileEntry]) -> list[str]:
    """Differences from these entries, a line a file."""
    lines = in_threads(lambda entry: _problems(lambda: store.verify(entry)), entries)
    return [line for found in lines for line in found]


def _problems_of_records(folder: RunFolder, record: dict[str, Any], verdict: Verdict) -> Iterator[FileEntry]:
    """The entries of files outside iterations that records name; their problems go into the verdict."""
    for index in [*range(verdict.iterations), *verdict.open_iterations]:
        entries: list[FileEntry] = []
        problems = _problems(lambda: entries.extend(named_by_records(folder, index)))  # noqa: B023
        verdict.problems += [line for line in problems if line not in verdict.problems]
        verdict.problems += _file_problems(folder.store, entries)
        yield from entries
    if record.get("quarantine"):
        where, named = folder.store.url_of("run.json"), list[FileEntry]()
        verdict.problems += _problems(lambda: named.extend(recorded([record["quarantine"]], where)))
        verdict.problems += _file_problems(folder.store, named)


def _lineage(folder: RunFolder, config: RunConfig, index: int, verdict: Verdict) -> list[str]:
    files, steps = IterationFiles(folder, index), config.steps_per_iteration
    supervised = config.algorithm.supervised
    manifest = folder.manifest(index)
    assert manifest is not None
    reused = manifest.history.reused if manifest.history else {}
    verdicts, batch = (
        _read(files.read_table, kind, row) for kind, row in (("verdicts", Judged), ("batch", Trained))
    )
    rollouts, turns = (
        None if supervised else _read(files.read_parts, kind, row)
        for kind, row in (("rollouts", Generated), ("turns", StoredTurn))
    )
    joined: list[Drawn] = []
    if JOINED in files.entries:
        joined = files.read_table("prompts", columns(Drawn), JOINED).to_pylist()
    stored = StoredIteration(
        index=index,
        prompts=[*_rows(_read(files.read_table, "prompts", Drawn), Drawn), *joined],
        rollouts=_rows(rollouts, Generated),
        rewards=[] if supervised else _rows(_read(files.read_parts, "rewards", RewardRow), RewardRow),
        verdicts=_rows(verdicts, Judged),
        batch=_rows(batch, Trained),
        steps=files.read_json("step.json")["steps"],
        turns=_rows(turns, StoredTurn),
        origins=[
            row
            for earlier in reused
            for row in _rows(_read(IterationFiles(folder, earlier).read_table, "batch", Origin), Origin)
        ],
    )
    verdict.trained_samples += len(stored.batch)
    problems = inconsistencies(
        stored, range(index * steps + 1, (index + 1) * steps + 1), config.trainer.passes
    )
    if rollouts is not None:
        cut, carried = files.read_deferred(COLUMNS["rollouts"]), carried_to(files)
        account = account_of(rollouts, turns, verdicts, batch, cut=cut, carried=carried)
        where = f"iteration {iteration_number(index)}"
        problems += [f"{where}: {problem}" for problem in account.problems()]
    return problems


def _read(read: Callable[[str, list[str]], pa.Table], kind: str, row: type[Any]) -> pa.Table:
    """The columns that lineage and account need of a kind of table, read once."""
    return read(kind, list(dict.fromkeys([*columns(row), *COLUMNS.get(kind, ())])))


def _rows(table: pa.Table | None, row: type[Row]) -> list[Row]:
    rows: list[Row] = table.select(columns(row)).to_pylist() if table is not None else []
    return rows


def _ledger(folder: RunFolder, record: dict[str, Any], config: RunConfig) -> Iterator[str]:
    """Draw every iteration again from the history before it: the ledger must draw the same groups.

    Iterations that another run drew by its own outcomes are left out.
    """
    if config.pipeline.rollouts_from:
        return
    history, ahead = list(folder.history()), ahead_of(record)
    spans = record.get("data") or []
    ends = [*(span["since"] for span in spans[1:]), len(history)]
    for span, end in zip(spans, ends, strict=True):
        since, seed = span["since"], config.run.seed
        sources = {source.name: _plan(source, span["sources"][source.name]) for source in config.data.sources}
        ledger = Ledger(
            derived_seed(seed, "data", since) if since else seed,
            sources,
            shuffle=config.data.shuffle,
            first=since,
            stages=config.data.stages,
            ahead=ahead,
        )
        for index in range(since, end):
            keys = history[index].keys()
            # drawn while as many earlier iterations were open as its lag allows, so that it depends on no younger outcome
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


def _buffer(folder: RunFolder, record: dict[str, Any], config: RunConfig) -> Iterator[str]:
    """Compute the buffer again: it must have held each reused group. For a branch: groups that its own settings chose."""
    settings = config.rollout.buffer
    own = (record.get("parent") or {}).get("at", 0)
    buffer = HeldGroups(settings.max_age, settings.max_uses, config.steps_per_iteration) if settings else None
    for history in folder.history():
        where = f"iteration {iteration_number(history.iteration)}"
        if history.iteration >= own and buffer is None and history.reused:
            yield f"{where} reuses groups, and the run has no buffer"
        if buffer is not None:
            if history.iteration >= own:
                yield from (f"{where}: {problem}" for problem in buffer.problems(history))
            buffer.apply(history)


def _plan(source: Source, stored: dict[str, Any]) -> SourcePlan:
    """How a source was drawn from, by run.json."""
    found = SourceFingerprint.model_validate(stored)
    levels: dict[int | None, int] = {level: rows for level, rows in found.levels.items()}  # noqa: C416 - keys of a wider type
    return plan_of(source, levels or {None: found.usable})


def _checkpoint(folder: RunFolder, done: int) -> list[str]:
    found: list[FileEntry] = []
    broken = _problems(lambda: found.extend(checkpoint_files(folder, done)))
    return broken or _file_problems(folder.store.child(folder.checkpoint_path(done)), found)
