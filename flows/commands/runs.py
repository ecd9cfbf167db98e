"""`millrace runs`: the runs under a storage root."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from millrace.connectors.storage.lease import holder_of
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.storage.store import Store
from millrace.core.errors import MissingFileError
from millrace.flows.commands.listing import CsvOption, JsonOption, Listing, print_listing
from millrace.flows.commands.terminal import RootOption, guarded
from millrace.flows.driver.stored_run import settings_of


def runs(root: RootOption = "runs", json: JsonOption = False, csv: CsvOption = False) -> None:
    """List the runs under a storage root."""
    print_listing(guarded(lambda: runs_listing(root)), json, csv)


def runs_listing(root: str) -> Listing:
    """The runs under a storage root: their progress and last start."""
    rows: list[Sequence[Any]] = []
    store = Store(root)
    for name in store.folders():
        try:
            record = store.child(name).read_sealed("run.json")
        except MissingFileError:
            continue
        folder = RunFolder(root, name)
        done, metrics = 0, {}
        for item in folder.committed():
            done, metrics = item.iteration + 1, item.metrics
        row = (
            name,
            done,
            settings_of(record)["run"]["iterations"],
            " ".join(str(number) for number in folder.complete_checkpoints()) or "none",
            metrics.get("reward/mean"),
            record["attempts"][-1]["started"][:19].replace("T", " ") if record["attempts"] else None,
            state_of(store.child(name), record),
        )
        rows.append(row)
    return Listing(("run", "iterations", "of", "checkpoints", "reward", "last_started", "state"), rows)


def state_of(store: Store, record: Mapping[str, Any]) -> str:
    """A run's current state, or how its newest start ended, as text. Does not wait.

    store: of the run folder.
    """
    holder = holder_of(store)
    attempt = record["attempts"][-1] if record["attempts"] else None
    if holder and holder[1] is not False:
        since = f", for {_ago(attempt['started'])}" if attempt else ""
        return f"running ({holder[0]}{since})" if holder[1] else f"driven by {holder[0]}, if that lives"
    if record.get("completed"):
        return "complete"
    if attempt is None:
        return "not started"
    if ended := attempt.get("ended"):
        if "error" in ended:
            return f"failed {_ago(ended['at'])} ago"
        return f"stopped by {ended['by']} {_ago(ended['at'])} ago"
    return f"killed after its start {_ago(attempt['started'])} ago"


def _ago(moment: str) -> str:
    """The time since a moment, in its largest unit. moment: in ISO form."""
    seconds = max(0, (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds())
    for unit, length in (("days", 86_400), ("hours", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} s"
