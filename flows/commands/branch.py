"""`millrace branch`: a new run that starts from another run's state after some iteration.

Copies the files that the manifests of the committed iterations and the checkpoint's marker name, and checks each. The branch
continues under its own name and may train differently.
"""

import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated

import typer

from millrace.connectors.storage.checkpoint_files import checkpoint_files
from millrace.connectors.storage.files import FileEntry, in_threads
from millrace.connectors.storage.run_folder import COMPLETE, MANIFEST, RunFolder
from millrace.core.errors import DEFAULT_ROOT, StorageError
from millrace.flows.commands.named_files import named_by_records
from millrace.flows.commands.terminal import RootOption, console, guarded
from millrace.flows.driver.stored_run import run_record


def branch(
    run: str,
    new: str,
    at: Annotated[int, typer.Option(help="Iterations of the run that the branch starts with.")],
    root: RootOption = "runs",
) -> None:
    """Start a new run from any checkpointed iteration of another."""
    console.print(guarded(lambda: branch_run(root, run, new, at)), soft_wrap=True)


def branch_run(root: str, run: str, new: str, at: int) -> str:
    """Make `new` from the first `at` iterations of `run`. Returns a line about the new run.

    Raises StorageError, without making a branch, if there is no checkpoint after iteration `at`, if `new` exists, or if a file
    differs from its manifest, record or marker.
    """
    record, source, target = run_record(root, run), RunFolder(root, run), RunFolder(root, new)
    committed = source.first_open_iteration(strict=False)
    if at > committed:
        raise StorageError(
            f"has {committed} committed iterations",
            where=source.store.url,
            remedy=f"branch at {committed} or before",
        )
    complete = source.complete_checkpoints()
    if at and at not in complete:
        existing = ", ".join(str(done) for done in complete) or "none"
        raise StorageError(
            f"no checkpoint after iteration {at} (there are: {existing})",
            where=source.store.url,
            remedy="branch at one of these, or keep more of them by checkpoint.keep_every",
        )
    if target.store.exists("run.json"):
        raise StorageError("exists already", where=target.store.url, remedy="give the branch another name")
    in_threads(lambda file: _copy(source, target, *file), list(_files(source, at)))
    if at:
        marker = f"{source.checkpoint_path(at)}/{COMPLETE}"
        target.store.write(marker, source.store.read(marker))
    parent = {"run": run, "at": at, "config": record["config"], "branched": datetime.now(UTC).isoformat()}
    branch_record = {
        "name": new,
        "parent": parent,
        "config": None,
        "config_version": record["config_version"],
        "ancestors": [*record.get("ancestors", []), *([record["id"]] if "id" in record else [])],
        "data": [span for span in record.get("data", []) if span["since"] <= at],
        "ahead": [span for span in record.get("ahead", []) if span["since"] < at],
        "mlflow_run_id": None,
        "attempts": [],
        # changes before the branch hold in it too
        **{name: record[name] for name in ("fingerprints", "versions", "model_commit") if name in record},
        "changes": [{**item, "since": min(item["since"], at)} for item in record.get("changes", [])],
    }
    target.store.write_sealed("run.json", branch_record)
    where = [] if root == DEFAULT_ROOT else [f"storage.root={root}"]
    command = shlex.join(["millrace", "train", "CONFIG", f"run.name={new}", *where])
    return f"{target.store.url}: {at} iterations of {run}; train it with `{command}`"


def _files(source: RunFolder, at: int) -> Iterator[tuple[str, FileEntry | None]]:
    """The files that a branch starts with, by their path in the run, with their entries."""
    for index in range(at):
        manifest = source.manifest(index)
        assert manifest is not None, "it is committed"
        folder = source.iteration_path(index)
        yield f"{folder}/{MANIFEST}", None  # the manifest holds its own hash
        for entry in manifest.files:
            yield f"{folder}/{entry.path}", entry
        for entry in named_by_records(source, index):
            if entry.path.startswith(("eval/", "images/")):
                yield entry.path, entry
    if at:
        for entry in checkpoint_files(source, at):
            yield f"{source.checkpoint_path(at)}/{entry.path}", entry


def _copy(source: RunFolder, target: RunFolder, path: str, entry: FileEntry | None) -> None:
    data = source.store.read_named(path, entry) if entry else source.store.read(path)
    target.store.write(path, data)
