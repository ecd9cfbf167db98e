"""One driver per run: a lease in the run folder with a fencing token that only grows.

Owns `lease/NNNNNN.json`, one file per driver: the process that created file n holds token n, and the highest token drives the
run. Creating is exclusive, so that only one process gets a token. The holder renews by writing to its file.
Knows nothing of what the driver does.

Whether a holder lives is decided without comparing clocks: by the process table if both processes share a kernel and a PID
namespace, otherwise by watching for a renewal. docs/architecture.md#one-driver says what holds on which store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, ValidationError

from millrace.connectors.host import local_files as local
from millrace.connectors.host.process_identity import ProcessIdentity
from millrace.connectors.storage.faults import retried
from millrace.connectors.storage.files import in_threads
from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.connectors.storage.parts import PART_FOLDERS, take_over_parts
from millrace.connectors.storage.run_folder import EAGER, RunFolder
from millrace.connectors.storage.store import Store
from millrace.core.errors import CorruptFileError, LeaseHeldError, MissingFileError, StorageError

log = logging.getLogger(__name__)

FOLDER = "lease"
LOCK = f"{FOLDER}/lock"
NAME = re.compile(rf"^{FOLDER}/(\d+)\.json$")
SETTLE_S = 2.0  # wait for another process's file to show, on a store that can create a file twice
FRESH_S = 1.0  # on object stores one check of the lease holds for this long
LOCK_PATIENCE_S = 5.0
REMOVE = "make sure that no process drives the run, then remove this file"


def duration_s() -> float:
    """How long a holder keeps the lease without a renewal. Tests shorten it by MILLRACE_LEASE_S."""
    return float(os.environ.get("MILLRACE_LEASE_S", "60"))


class _Claim(BaseModel):
    """The content of a driver's file."""

    token: int
    owner: str  # a random id of this claim
    folder: str  # the run folder's URL for the holder: a copy of the folder has another
    process: ProcessIdentity
    renewals: int = 0
    released: bool = False

    def lives(self, folder: str) -> bool | None:
        return self.process.lives() if self.folder == folder else None

    def __str__(self) -> str:
        return str(self.process)


class PassedLease:
    """A driver's lease, passed to another process that works for the driver: a Fence that holds as long as the lease."""

    def __init__(self, store: Store, token: int) -> None:
        self._store = store
        self._token = token
        self._checked = _now()

    @property
    def token(self) -> int:
        """The driver's number, counted over all drivers of the run from 1."""
        return self._token

    def check(self) -> None:
        """Raise LeaseHeldError if another process has taken the run, or the lease was removed."""
        # looked up by name, since a listing may be late: the next driver has the next number
        newest = _newest_after(self._store, self.token)
        if newest != self.token or not self._store.exists(_path(newest)):
            self._lost(_read(self._store, newest))
        self._checked = _now()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """A context in which the run's files may be changed. On a local disk no other process can take the lease meanwhile.

        Raises LeaseHeldError if another process has taken it. On object stores one check holds for FRESH_S.
        """
        if not self._store.local:
            if _now() - self._checked > FRESH_S:
                self.check()
            yield
            return
        with self._locked(alone=False) as locked:
            if not locked:
                raise LeaseHeldError(
                    "another process is taking it over; this one stops", where=self._store.url
                )
            self.check()
            yield

    @contextlib.contextmanager
    def _locked(self, alone: bool) -> Iterator[bool]:
        if not self._store.local:
            yield True
            return
        path = Path(self._store.root) / LOCK
        with contextlib.ExitStack() as held:

            def hold() -> bool:
                held.close()  # of a try that failed after it had the lock
                return held.enter_context(
                    local.shared_or_alone(path, alone=alone, patience_s=LOCK_PATIENCE_S)
                )

            yield retried("write", self._store.url_of(LOCK), hold)

    def _lost(self, holder: _Claim | None) -> NoReturn:
        raise LeaseHeldError(
            f"the lease of this driver was {f'taken over by {holder}' if holder else 'removed'}; this process stops",
            where=self._store.url,
            remedy="the other driver goes on" if holder else "start the same command again",
        )


class Lease(PassedLease):
    """The right to drive a run. `token` counts the run's drivers so far; the newest wins."""

    def __init__(self, store: Store, claim: _Claim) -> None:
        super().__init__(store, claim.token)
        self._claim = claim
        self._renewed = _now()

    @classmethod
    def take(cls, store: Store) -> Lease:
        """Take the lease of a run folder. If only a renewal can show that the holder lives, waits `duration_s()` for one.

        Raises LeaseHeldError, naming host and process, while another driver lives; CorruptFileError for a broken lease.
        """
        files, owner = Store(store.url), uuid.uuid4().hex
        while True:
            before = _newest(files)
            if before is not None and not _is_free(files, before):
                raise LeaseHeldError(
                    f"driven by {before}",
                    where=files.url,
                    remedy="stop that process, or start under another run.name",
                )
            token = before.token + 1 if before else 1
            claim = _Claim(token=token, owner=owner, folder=files.real_url, process=ProcessIdentity.own())
            lease = cls(files, claim)
            if lease._create(before.token if before else 0):
                return lease

    def renew(self) -> None:
        """Write a renewal, which shows that this driver lives. Raises LeaseHeldError if the lease was lost."""
        self.check()
        self._keep(renewals=self._claim.renewals + 1)
        self._renewed = _now()

    def release(self) -> None:
        """Release the run; does nothing if the lease was lost already."""
        with contextlib.suppress(LeaseHeldError):
            self.check()
            self._keep(released=True)

    def may_be_lost(self) -> bool:
        """True if another process has taken the lease, or if storage fails and the last renewal is too old to rely on."""
        try:
            self.check()
        except LeaseHeldError:
            return True
        except StorageError:
            return _now() - self._renewed > duration_s()
        return False

    def _keep(self, **changes: Any) -> None:
        """Write this driver's file. Raises LeaseHeldError if the file is gone or belongs to another process."""
        path = _path(self.token)
        try:
            stored = _read(self._store, self.token)
            if stored is None or stored.owner != self._claim.owner:
                self._lost(stored)
        except CorruptFileError as error:
            log.warning("%s: writing it again", error)
        self._claim = self._claim.model_copy(update=changes)
        self._store.write_json(path, self._claim.model_dump())

    def _create(self, before: int) -> bool:
        """Create this token's file; False if another process created it first."""
        data = self._claim.model_dump_json(indent=1).encode()
        with self._locked(alone=True) as locked:
            if not locked:
                raise LeaseHeldError(
                    "a process that drove it is amid a write, and does not end it",
                    where=self._store.url,
                    remedy="a stopped process is continued by `kill -CONT` or ended by `kill -9`; then start again",
                )
            if _newest_token(self._store) not in (before, 0):
                return False
            if not self._store.create(_path(self.token), data):
                return False
        if self._store.creates_once:
            return True
        log.warning(
            "%s: this store cannot create a file only once: two drivers that start at the same moment may both go on for %.0f s",
            self._store.url,
            duration_s() / 6,
        )
        time.sleep(SETTLE_S)
        stored = _read(self._store, self.token)
        return stored is not None and stored.owner == self._claim.owner


def holder_of(store: Store) -> tuple[ProcessIdentity, bool | None] | None:
    """The process that holds the lease and whether it lives, None if this process cannot know; None if nobody holds it.

    Waits for nothing.
    """
    files = Store(store.url)
    holder = _newest(files)
    if holder is None or holder.released:
        return None
    return holder.process, holder.lives(files.real_url)


def find_driver(store: Store) -> ProcessIdentity | None:
    """The process that drives a run from this folder; None if none does. Waits for a renewal if `Lease.take` would."""
    files = Store(store.url)
    holder = _newest(files)
    return None if holder is None or _is_free(files, holder) else holder.process


def _is_free(store: Store, holder: _Claim) -> bool:
    """Whether the holder has released the run, is dead, or shows no renewal for `duration_s()`."""
    if holder.released:
        return True
    lives = holder.lives(store.real_url)
    return not (_is_renewed(store, holder) if lives is None else lives)


def _is_renewed(store: Store, holder: _Claim) -> bool:
    """Watch the lease for `duration_s()`; True if the holder renews it."""
    log.warning(
        "%s: its last driver, %s, did not release the run and is on another host or in another container: waiting %.0f s for a "
        "sign of its life",
        store.url,
        holder,
        duration_s(),
    )
    until = time.monotonic() + duration_s()
    while time.monotonic() < until:
        time.sleep(duration_s() / 60)
        now = _newest(store)
        if now is None or now.owner != holder.owner or now.released:
            return False
        if now != holder:
            return True
    log.warning("%s: no sign of life of %s: taking over", store.url, holder)
    return False


def _tokens(store: Store) -> list[int]:
    return [int(match[1]) for match in map(NAME.match, store.list(FOLDER)) if match]


def _newest_token(store: Store) -> int:
    """The highest token, 0 if no driver has run. A listing may lack the newest ones, so they are looked up by name."""
    return _newest_after(store, max(_tokens(store), default=0))


def _newest_after(store: Store, token: int) -> int:
    """The highest token from this one on. Tokens have no gaps, so the search ends at the first missing file."""
    while store.exists(_path(token + 1)):
        token += 1
    return token


def _newest(store: Store) -> _Claim | None:
    """The claim of the highest token, None if nobody has driven the run."""
    while token := _newest_token(store):
        claim = _read(store, token)
        if claim is not None:  # otherwise it was just removed
            return claim
    return None


def _read(store: Store, token: int) -> _Claim | None:
    path = _path(token)
    try:
        return _Claim.model_validate(store.read_json(path))
    except MissingFileError:
        return None
    except (ValidationError, CorruptFileError) as error:
        raise CorruptFileError("is not a lease", where=store.url_of(path), remedy=REMOVE) from error


def _path(token: int) -> str:
    return f"{FOLDER}/{token:06d}.json"


def _now() -> float:
    """Seconds of a clock that also runs while the machine sleeps, if the machine has one."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


WRITERS = ("rollout", "reward", "evaluate_before", "evaluate")  # tasks whose records name parts


def take_over(folder: RunFolder) -> int:
    """Record the parts that earlier drivers left in open iterations, so that their later writes do not count; remove their chunks.

    Returns the index of the first open iteration.
    """
    assert folder.store.fence is not None, "the lease comes first"
    first, token = folder.first_open_iteration(), folder.store.fence.token
    if token > 1:
        for index in range(first, folder.last_begun(first) + 1):
            opened = folder.iteration(index)
            take_over_parts(opened, PART_FOLDERS, token, folder.owner.run_id, _recorded(folder, index))
            opened.remove(EAGER, recursive=True)
    return first


def _recorded(folder: RunFolder, index: int) -> dict[str, set[str]]:
    """The parts named in records of finished tasks, by folder. Empty on a local disk, whose listings are complete."""
    if folder.store.local:
        return {}
    records = in_threads(IterationFiles(folder, index).record, WRITERS)
    named = {file["path"] for record in records if record for file in record["files"]}
    return {kind: {path for path in named if path.startswith(f"{kind}/")} for kind in PART_FOLDERS}
