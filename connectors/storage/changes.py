"""Remembers what this process wrote and removed in an object store, since a listing may not show it yet.

A store promises that reading a name gives the last write. It promises less of listings: they may lack names just written and
show names just removed, and a cache on the way may answer with an old listing. Owns which listed names must be looked up one
by one.
"""

import threading
import time
from collections.abc import Iterable

LAG_S = 600.0  # after this long a listing is taken to be right
PRUNED_AT = 10_000  # at more names than this, old ones are forgotten


class Changes:
    """Names written and removed, each with its time. May be used from many threads."""

    def __init__(self) -> None:
        self._written: dict[str, float] = {}
        self._removed: dict[str, float] = {}  # files, and whole folders
        self._lock = threading.Lock()

    def wrote(self, name: str) -> None:
        """Record that an object was written, or existed when it was to be created."""
        self._note(self._written, name)

    def removed(self, name: str) -> None:
        """Record that an object, or a folder with its contents, was removed."""
        self._note(self._removed, name)

    def doubtful(self, folder: str, listed: Iterable[str]) -> set[str]:
        """Names below a folder that a listing may wrongly lack or wrongly show."""
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
        """Forget everything, as in a new process."""
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
    """A name and all folders above it."""
    parts = name.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]


CHANGES = Changes()  # one for this process and all stores
