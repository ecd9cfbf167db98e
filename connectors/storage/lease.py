"""One driver per run: a lease in the run folder with a fencing token that only grows.

Owns the lease file. Knows nothing of what the driver does. A driver that died on this host is replaced at once, one that
died on another host when its lease has expired.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from typing import Any

import psutil
from pydantic import BaseModel

from millrace.connectors.storage.store import Store
from millrace.core.errors import MillraceError, MissingFileError

PATH = "lease.json"
DURATION_S = 60.0


class LeaseHeldError(MillraceError):
    """Another process drives this run."""


class _Record(BaseModel):
    token: int
    owner: str
    host: str
    pid: int
    created: float
    renewed: float
    released: bool = False


class Lease:
    """The right to drive a run. `token` counts the run's drivers so far; the newest wins."""

    def __init__(self, store: Store, record: _Record) -> None:
        self._store = store
        self._record = record

    @property
    def token(self) -> int:
        """Number of this driver among all of the run; the first is 1."""
        return self._record.token

    @classmethod
    def take(cls, store: Store) -> Lease:
        """Take the lease of a run folder.

        Raises LeaseHeldError, naming host and process, while another driver is alive.
        """
        before = _read(store)
        if before and _is_alive(before):
            raise LeaseHeldError(
                f"{store.url}: driven by process {before.pid} on {before.host} (renewed {time.time() - before.renewed:.0f} s ago). "
                "Stop that process, or start under another run.name. A driver lost on another host frees the run after "
                f"{DURATION_S:.0f} s."
            )
        now = time.time()
        record = _Record(
            token=(before.token if before else 0) + 1,
            owner=uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=os.getpid(),
            created=psutil.Process().create_time(),
            renewed=now,
        )
        store.write_json(PATH, record.model_dump())
        lease = cls(store, record)
        lease.check()  # if two took it at once, the later write wins; the other driver sees it here or at its next renewal
        return lease

    def check(self) -> None:
        """Raise LeaseHeldError if a newer driver has taken the run."""
        now = _read(self._store)
        if now is None or now.owner != self._record.owner:
            holder = "nobody" if now is None else f"process {now.pid} on {now.host}"
            raise LeaseHeldError(
                f"{self._store.url}: the lease of this driver was taken over by {holder}; this process stops"
            )

    def renew(self) -> None:
        """Extend the lease; raises LeaseHeldError if it was lost."""
        self.check()
        self._record = self._record.model_copy(update={"renewed": time.time()})
        self._store.write_json(PATH, self._record.model_dump())

    def release(self) -> None:
        """Release the run; does nothing if the lease was lost already."""
        now = _read(self._store)
        if now and now.owner == self._record.owner:
            self._store.write_json(PATH, self._record.model_copy(update={"released": True}).model_dump())


def _read(store: Store) -> _Record | None:
    try:
        content: Any = store.read_json(PATH)
    except MissingFileError:
        return None
    return _Record.model_validate(content)


def _is_alive(record: _Record) -> bool:
    if record.released:
        return False
    if record.host == socket.gethostname():
        try:
            process = psutil.Process(record.pid)
            return (
                process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - record.created) < 1
            )
        except psutil.NoSuchProcess:
            return False
    return time.time() - record.renewed < DURATION_S
