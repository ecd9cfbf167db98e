"""Records of the runs driven from this MILLRACE_HOME, by which actors left behind are found.

A driver writes its record before it creates actors, and removes it after they ended. A record names orphaned actors if its
driver is dead and no start will use them: the run folder was removed, moved or replaced, or the run is complete.
Owns the records. Knows nothing of Ray.
"""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from millrace.connectors.host.local_files import home, write_whole
from millrace.connectors.host.process_identity import ProcessIdentity, read_record
from millrace.connectors.storage.store import Store
from millrace.core.errors import LeaseHeldError, MissingFileError, StorageError, of_run

log = logging.getLogger(__name__)


class DrivenRun(BaseModel):
    """One run, as its driver recorded it."""

    identity: str  # the namespace of its actors
    name: str
    url: str  # of the run folder
    run_id: str | None  # in its run.json; None for a command whose actors no other process takes over
    ray_address: str | None  # the cluster that holds the actors; None: the local head
    driver: ProcessIdentity
    flow_run_id: str | None  # the driver's

    def is_orphaned(self) -> bool:
        """True if the driver is dead and no start will take over its actors. False if this process cannot know."""
        if self.driver.lives() is not False:
            return False
        if self.run_id is None:
            return True
        try:
            record: dict[str, Any] = Store(self.url).read_sealed("run.json")
        except MissingFileError:
            return True
        except StorageError:
            return False  # unreadable for now: a later start may read it
        return record.get("id") != self.run_id or bool(record.get("completed"))


def note_driven(run: DrivenRun) -> None:
    """Write a run's record. Call it before the first actor is created."""
    write_whole(_path(run.identity), [run.model_dump_json(indent=1).encode()])


def forget_driven(identity: str) -> None:
    """Remove a run's record, after its actors have ended."""
    _path(identity).unlink(missing_ok=True)


def driven_runs() -> list[DrivenRun]:
    """All records, by run name. A file that is not a record is removed, with a warning."""
    found = []
    for path in sorted(_folder().glob("*.json")):
        text = read_record(path)
        try:
            found.append(DrivenRun.model_validate(json.loads(text or b"")))
        except (ValidationError, json.JSONDecodeError):
            log.warning("%s is no record of a driven run: removed", path)
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda run: (run.name, run.url))


def check_none_driven() -> None:
    """Raise LeaseHeldError, naming drivers and runs, if a driver of this home lives or may live in another container."""
    driven = [run for run in driven_runs() if run.driver.lives() is not False]
    if driven:
        raise LeaseHeldError(
            "running drivers need the servers: "
            + ", ".join(f"{run.name} ({run.url}) by {run.driver}" for run in driven),
            where="millrace server stop",
            remedy="end them first: "
            + "; ".join(f"millrace stop {of_run(run.name, run.url)}" for run in driven)
            + ". Or add --force: a run whose servers end starts them again",
        )


def _folder() -> Path:
    return home() / "driven"


def _path(identity: str) -> Path:
    """The record's file, named by a hash: an identity may hold characters that a file name cannot."""
    return _folder() / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"
