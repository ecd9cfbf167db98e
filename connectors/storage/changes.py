"""What this process wrote and removed in an object store, which a listing may not show yet.

A store promises that a named object is read as it was last written. It promises less of listings: names just written may be
missing, names just removed may be there, and a cache between may answer as before. Owns which names of a listing are to be
asked for by name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

LAG_S = 600.0  # after which a listing shows what is there
PRUNED_AT = 10_000  # names noted, after which old ones are forgotten


class Changes:
    """Names written and removed, each with its time. May be used from many threads."""

    def __init__(self) -> None:
        self._written: dict[str, float] = {}
        self._removed: dict[str, float] = {}  # files, and folders with all in them
        self._lock = threading.Lock()

    def wrote(self, name: str) -> None:
        """Note that an object was written, or was there when it was to be created."""
        self._note(self._written, name)

    def removed(self, name: str) -> None:
        """Note that an object, or all below a folder, was removed."""
        self._note(self._removed, name)

    def doubtful(self, folder: str, listed: Iterable[str]) -> set[str]:
        """Names below a folder of which a listing does not say for certain whether they are there."""
        shown, below = set(listed), f"{folder}/"
        since = time.monotonic() - LAG_S
        with self._lock:
            written = {
                name for name, at in self._written.items() if at > since and name.startswith(below)
            } - shown
            removed = {name for name, at in self._removed.items() if at > since}
        if not removed:
            return written
        return written | {name for name in shown if not removed.isdisjoint(_and_above(name))}

    def forget(self) -> None:
        """Know no more than another process."""
        with self._lock:
            self._written.clear()
            self._removed.clear()

    def _note(self, names: dict[str, float], name: str) -> None:
        now = time.monotonic()
        with self._lock:
            names[name] = now
            if len(names) > PRUNED_AT:
                for old in [each for each, at in names.items() if at < now - LAG_S]:
                    del names[old]


def _and_above(name: str) -> list[str]:
    """A name and the folders above it."""
    parts = name.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]


CHANGES = Changes()  # of this process, in all stores
