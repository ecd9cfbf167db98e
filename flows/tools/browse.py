"""Which runs exist and what is in them, read from storage alone.

Owns the tables that the command line prints; starts nothing and changes no file.
"""

from __future__ import annotations

from typing import Any

from rich.table import Table

from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.storage.store import Store
from millrace.core.config.reading.stored import lifted
from millrace.core.contracts.ids import iteration_number
from millrace.core.errors import MissingFileError, StorageError

COLUMNS = (
    ("reward", "reward/mean"),
    ("length", "rollout/response_length_mean"),
    ("loss", "train/loss"),
    ("grad norm", "train/grad_norm"),
    ("log-prob gap", "train/logprob_gap_mean"),
    ("tokens/s", "rollout/tokens_per_second"),
)


def runs_table(root: str) -> Table:
    """A table of the runs under a storage root: how far each is and when it was last started."""
    table = Table("run", "iterations", "checkpoints", "reward", "last started", "state", title=root)
    store = Store(root)
    for name in store.folders():
        try:
            record = store.child(name).read_sealed("run.json")
        except MissingFileError:
            continue
        folder = RunFolder(root, name)
        manifests = folder.manifests()
        reward = manifests[max(manifests)].tasks["metrics"].get("reward/mean") if manifests else None
        table.add_row(
            name,
            f"{len(manifests)} of {settings_of(record)['run']['iterations']}",
            " ".join(str(number) for number in folder.complete_checkpoints()) or "none",
            "" if reward is None else f"{reward:.3f}",
            record["attempts"][-1]["started"][:19].replace("T", " ") if record["attempts"] else "",
            "complete" if record.get("completed") else "open",
        )
    return table


def run_tables(root: str, run: str) -> list[Any]:
    """One run: its record, and a table with a line per iteration."""
    folder, record = RunFolder(root, run), run_record(root, run)
    facts = Table("what", "value", title=run, show_header=False)
    facts.add_row("folder", folder.store.url)
    if "parent" in record:
        facts.add_row("branch of", f"{record['parent']['run']} after {record['parent']['at']} iterations")
    facts.add_row("code", str(record.get("code_revision")))
    facts.add_row(
        "versions", " ".join(f"{name} {version}" for name, version in record.get("versions", {}).items())
    )
    unusable = {name: count for name, count in record.get("quarantined", {}).items() if count}
    if unusable:
        counts = ", ".join(f"{count} rows of {name}" for name, count in unusable.items())
        facts.add_row("unusable", f"{counts}; see quarantine.parquet")
    facts.add_row("attempts", str(len(record["attempts"])))
    facts.add_row("MLflow run", str(record["mlflow_run_id"]))
    for attempt in record["attempts"][-1:]:
        facts.add_row("Prefect", str(attempt["flow_run_url"]))
    table = Table("iteration", *(title for title, _ in COLUMNS), "held-out")
    for index, manifest in sorted(folder.manifests().items()):
        metrics = manifest.tasks["metrics"]
        cells = [f"{metrics[name]:.4g}" if name in metrics else "" for _, name in COLUMNS]
        held_out = [
            f"{value:.3f}"
            for name, value in metrics.items()
            if name.startswith("eval/") and name.endswith("/reward_mean")
        ]
        table.add_row(str(iteration_number(index)), *cells, " ".join(held_out))
    return [facts, table]


def settings_of(record: dict[str, Any]) -> Any:
    """The configuration of a run. A branch that was not started yet has its parent's."""
    return record["config"] or record["parent"]["config"]


def run_record(root: str, run: str) -> Any:
    """The run.json of a run, in today's shape. Raises StorageError if there is no such run, or the file is not what was written."""
    store = RunFolder(root, run).store
    try:
        return lifted(store.read_sealed("run.json"))
    except MissingFileError as error:
        check_no_run(store)
        raise StorageError(
            "no such run", where=store.url, remedy=f"`millrace runs --root {root}` lists them"
        ) from error


def check_no_run(store: Store) -> None:
    """Raise MissingFileError if a folder without a run.json holds iterations of a run all the same."""
    if store.list("iterations"):
        raise MissingFileError(
            "no such file, and the run's configuration is gone with it",
            where=store.url_of("run.json"),
            remedy="restore it from a copy, or start a new run under another run.name",
        )
