"""Summaries of manifests, so that a start reads one file for many iterations instead of each manifest.

Owns which iteration's folder has a summary and what the summary holds. That iteration's manifest names it with its hash.
A summary is a cache: if it is gone or changed, the manifests that it sums up are read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from millrace.connectors.storage.files import FileEntry, in_threads
from millrace.connectors.storage.manifests.manifest import Manifest
from millrace.connectors.storage.store import LARGEST_JSON, Store
from millrace.core.accounts.history import IterationHistory
from millrace.core.errors import CorruptFileError, MissingFileError

log = logging.getLogger(__name__)
SUMMARY = "summary.json"
EVERY = 64  # iterations per summary


class Committed(BaseModel):
    """The part of a committed iteration that every start reads."""

    model_config = ConfigDict(extra="forbid")

    iteration: int
    sha256: str  # the manifest's
    run: str | None
    metrics: dict[str, Any]
    evaluated: dict[str, Any] | None = None  # the evaluation of the weights that it started with
    history: IterationHistory | None

    @classmethod
    def of(cls, manifest: Manifest) -> Committed:
        """The part of this manifest."""
        return cls(
            iteration=manifest.iteration,
            sha256=manifest.sha256,
            run=manifest.run,
            metrics=manifest.tasks.get("metrics", {}),
            evaluated=manifest.tasks.get("evaluated"),
            history=manifest.history,
        )


class Summary(BaseModel):
    """The content of a summary: its iterations in order, and the hashes of earlier summaries by the iteration that holds each."""

    model_config = ConfigDict(extra="forbid")

    before: dict[int, str]
    iterations: list[Committed]


class Summaries:
    """The summaries of one run."""

    def __init__(
        self, folder_of: Callable[[int], Store], manifest_of: Callable[[int], Manifest | None]
    ) -> None:
        """folder_of, manifest_of: return an iteration's folder and manifest."""
        self._folder_of, self._manifest_of = folder_of, manifest_of
        self._hashes: dict[int, str] = {}  # of summaries, by the iteration that holds each
        self.until = 0  # number of iterations covered by summaries

    def find(self, numbers: list[int]) -> None:
        """Look for the newest summary. numbers: the iterations that have a folder."""
        for index in reversed([number for number in numbers if has_summary(number)]):
            manifest = self._manifest_of(index)
            if manifest is None:
                continue  # the iteration is open
            entry = manifest.file(SUMMARY)
            try:
                before = _read(self._folder_of(index), index, entry.sha256).before
            except (CorruptFileError, MissingFileError) as error:
                _warn(error)
                return
            self._hashes, self.until = {**before, index: entry.sha256}, index
            return

    def read(self, since: int) -> Iterator[Committed]:
        """The iterations from `since` to `until`. If a summary is broken, reads the manifests instead."""
        for index in range(since // EVERY * EVERY + EVERY, self.until + 1, EVERY):
            yield from (item for item in self._block(index) if item.iteration >= since)

    def _block(self, index: int) -> list[Committed]:
        if index in self._hashes:
            try:
                return _read(self._folder_of(index), index, self._hashes[index]).iterations
            except (CorruptFileError, MissingFileError) as error:
                _warn(error)
        return self._of_manifests(index)

    def _of_manifests(self, index: int) -> list[Committed]:
        found = in_threads(self._manifest_of, range(index - EVERY, index))
        return [Committed.of(manifest) for manifest in found if manifest]

    def write(self, index: int) -> FileEntry:
        """Write the summary of iteration `index`, after all earlier ones are committed. Equal manifests give equal bytes."""
        return self._folder_of(index).write(SUMMARY, self._content(index))

    def check(self, index: int) -> None:
        """Raise CorruptFileError if an iteration's summary differs from the manifests."""
        folder = self._folder_of(index)
        if self._entry(index) and folder.read(SUMMARY, LARGEST_JSON) != self._content(index):
            raise CorruptFileError("does not say what the manifests say", where=folder.url_of(SUMMARY))

    def _content(self, index: int) -> bytes:
        named = {number: self._entry(number) for number in range(EVERY, index, EVERY)}
        before = {number: entry.sha256 for number, entry in named.items() if entry}
        summary = Summary(before=before, iterations=self._of_manifests(index))
        return json.dumps(summary.model_dump(mode="json"), sort_keys=True).encode()

    def _entry(self, index: int) -> FileEntry | None:
        manifest = self._manifest_of(index)
        return manifest.find(SUMMARY) if manifest else None


def has_summary(index: int) -> bool:
    """Whether an iteration's folder holds a summary of the EVERY iterations before it."""
    return index > 0 and index % EVERY == 0


def _read(store: Store, index: int, sha256: str) -> Summary:
    data = store.read(SUMMARY, LARGEST_JSON)
    store.check(SUMMARY, data, FileEntry(path=SUMMARY, sha256=sha256, size=len(data)))
    try:
        summary = Summary.model_validate_json(data)
    except ValidationError as error:
        raise CorruptFileError(f"not a summary: {error}", where=store.url_of(SUMMARY)) from error
    if [item.iteration for item in summary.iterations] != list(range(index - EVERY, index)):
        raise CorruptFileError("does not sum up the iterations before it", where=store.url_of(SUMMARY))
    return summary


def _warn(error: Exception) -> None:
    log.warning("%s. The manifests that it sums up are read instead", error)
