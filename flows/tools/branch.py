"""`millrace branch`: a new run that begins where another run was after some iteration.

Copies the committed iterations and the checkpoint; the branch goes on under its own name and may train differently.
"""

from __future__ import annotations

from datetime import UTC, datetime

from millrace.connectors.storage.files import in_threads
from millrace.connectors.storage.run_folder import COMPLETE, RunFolder
from millrace.core.errors import StorageError
from millrace.flows.tools.browse import run_record


def branch_run(root: str, run: str, new: str, at: int) -> str:
    """Make `new` of the first `at` iterations of `run`. Returns a line that says what was made.

    Raises StorageError if there is no checkpoint after iteration `at`, or if `new` exists.
    """
    record, source, target = run_record(root, run), RunFolder(root, run), RunFolder(root, new)
    committed = len(source.manifests())
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
    paths = [f"{source.iteration_path(index)}/" for index in range(at)]
    checkpoint = f"{source.checkpoint_path(at)}/"
    names = [path for folder in paths for path in source.store.list(folder.rstrip("/"))]
    names += [
        path for path in source.store.list(checkpoint.rstrip("/")) if at and not path.endswith(COMPLETE)
    ]
    names += [path for path in source.store.list("eval") if int(path.rsplit("/", 1)[1].split(".")[0]) <= at]
    in_threads(lambda path: target.store.write(path, source.store.read(path)), names)
    if at:
        marker = f"{checkpoint}{COMPLETE}"
        target.store.write(marker, source.store.read(marker))
    parent = {"run": run, "at": at, "config": record["config"], "branched": datetime.now(UTC).isoformat()}
    branch_record = {
        "name": new,
        "parent": parent,
        "config": None,
        "config_version": record["config_version"],
        "seed_name": record["seed_name"],  # the parent's, so that equal weights draw equal samples in both
        "data": [span for span in record.get("data", []) if span["since"] <= at],
        "mlflow_run_id": None,
        "attempts": [],
    }
    target.store.write_json("run.json", branch_record)
    return f"{target.store.url}: {at} iterations of {run}; go on with `millrace train CONFIG run.name={new}`"
