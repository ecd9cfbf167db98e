"""The folder of one run: the places of iterations, checkpoints and exports, and which of them are complete.

Owns the layout, the commit of manifests and the completeness of checkpoints. Knows nothing of what the files mean.
"""

import contextlib
import logging
from collections.abc import Iterator

from pydantic import ValidationError

from millrace.connectors.storage.files import FileEntry, in_threads
from millrace.connectors.storage.manifests.manifest import Manifest, outcomes
from millrace.connectors.storage.manifests.summaries import EVERY, Committed, Summaries
from millrace.connectors.storage.store import Store
from millrace.core.accounts.history import IterationHistory
from millrace.core.contracts import schema
from millrace.core.contracts.ids import iteration_number, run_identity
from millrace.core.errors import CorruptFileError, MissingFileError, StorageError, of_run
from millrace.core.plain_text import json_text

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
RECORD = "run.json"
COMPLETE = "complete.json"
ASIDE = "not-whole.json"  # the marker of a checkpoint that was found broken
PUBLISHED = "results/publish.json"  # written after the manifest
CUT = "cut.json"  # which groups are trained and which deferred, if the first groups to finish are trained
DEFERRED = "deferred.parquet"  # finished samples of the deferred groups
EAGER = "eager"  # chunks of an incomplete batch, with pipeline.eager; removed after its step
TRACES = "traces"  # folder of the run
LOGPROBS = "logprobs"  # the trainer's log-probabilities, one file per data parallel rank, with trainer.store_logprobs
DRAWN = "results/sample_prompts.json"  # written when an iteration's prompts are
ABANDONED_S = 3600.0
READ_AHEAD = 64  # manifests in memory at once while all are read
MAKE_AGAIN = "restore it from a copy, or remove it and start the run again: it is made again from the iteration's records"


class Owner:
    """Checks that a folder's files belong to its run, by the id in run.json."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._run_id: str | None = None
        self._ids: frozenset[str] = frozenset()

    @property
    def run_id(self) -> str | None:
        """The id that this process writes into committed files; None if it does not drive the run."""
        return self._run_id

    def drive_as(self, run_id: str) -> None:
        """Write this run's id into all that is committed from now on. run.json has the same id, or will have."""
        self._run_id = run_id
        self._ids = frozenset()

    def check(self, run_id: object, url: str) -> None:
        """Raise StorageError if a file names another run than run.json. run_id: None if no driver wrote the file.

        A branch starts with files of the runs that it comes from.
        """
        if run_id is None or run_id == self._run_id:
            return
        if not self._ids:
            try:
                record = self._store.read_sealed(RECORD)
            except MissingFileError:
                return  # a reader that needs run.json reports that it is missing
            self._ids = frozenset([*record.get("ancestors", ()), *([record["id"]] if "id" in record else [])])
        if run_id not in self._ids:
            raise StorageError(
                f"is of another run than {self._store.url_of(RECORD)}",
                where=url,
                remedy="one of the two was replaced: restore it from a copy",
            )


def numbers_of(run: Store, kind: str) -> list[int]:
    """The numbers of the "iterations" or "checkpoints" folders of a run, in order."""
    return sorted(int(name) for name in run.folders(kind) if name.isdecimal())


class RunFolder:
    """`<storage.root>/<run>/`.

    Keeps in memory the manifest's hash of each committed iteration that was read, and only the newest manifest itself, since a
    driver lives for thousands of iterations.
    """

    def __init__(self, root: str, run: str) -> None:
        self.name = run
        self.store = Store(root).child(run)
        self.store.walls = self.store.root
        self.owner = Owner(self.store)
        self._hashes: dict[int, bytes] = {}  # of the committed manifests read so far, by iteration
        self._newest: Manifest | None = None  # the newest manifest read
        self.summaries = Summaries(self.iteration, self.manifest)

    def identity(self, run_id: str) -> str:
        """The name for the run's actors and temporary files. run_id: the id in its run.json."""
        return run_identity(self.name, self.store.real_url, run_id)

    # iterations

    def iteration_path(self, index: int) -> str:
        """Folder of an iteration, relative to the run's."""
        return f"iterations/{index:06d}"

    def iteration(self, index: int) -> Store:
        """Store of an iteration's folder."""
        return self.store.child(self.iteration_path(index))

    def commit_manifest(self, index: int, manifest: Manifest, expected: str | None = None) -> Manifest:
        """Make an iteration final and return its manifest. Adds the outcome of its groups from its verdicts, if it has any.

        A committed manifest is never overwritten: committing the same files again does nothing, committing others raises
        StorageError. expected: the hash of an earlier commit; raises CorruptFileError if the manifest has another.
        """
        assert manifest.iteration == index
        committed = self.manifest(index)
        if committed:
            if committed.files != manifest.files:
                raise StorageError(
                    f"iteration {iteration_number(index)} is committed with other files, and a committed iteration is final",
                    where=self._manifest_url(index),
                    remedy="end every other process that drives the run, and start this one again: it goes on after the "
                    "committed iteration",
                )
            log.info("iteration %d was committed before", iteration_number(index))
            return committed
        if manifest.history is None and any(entry.path == "verdicts.parquet" for entry in manifest.files):
            manifest = manifest.model_copy(
                update={"history": outcomes(self.iteration(index), index, manifest)}
            )
        before = self.manifest(index - 1) if index else None
        manifest = manifest.after(before).sealed()
        if expected and manifest.sha256 != expected:
            raise CorruptFileError(
                "rebuilt from the records, it differs from the manifest that was committed",
                where=self._manifest_url(index),
                remedy=f"restore it from a copy, or {self._branch()}",
            )
        content = json_text(manifest.model_dump(mode="json"), indent=1)
        if not self.store.create(f"{self.iteration_path(index)}/{MANIFEST}", content.encode()):
            # another driver committed first, and its files decide
            return self.commit_manifest(index, manifest)
        return manifest

    def manifest(self, index: int) -> Manifest | None:
        """The manifest of an iteration, None if it is not committed. Raises CorruptFileError naming the file.

        A manifest that was read before must be unchanged; MissingFileError if it is gone.
        """
        newest, known = self._newest, index < len(self._hashes)
        if newest and newest.iteration == index:
            return newest
        try:
            content = self.store.read_json(f"{self.iteration_path(index)}/{MANIFEST}")
        except MissingFileError as error:
            if known:
                error.remedy = self._gone(index).remedy
                raise
            return None
        except CorruptFileError as error:
            error.remedy = MAKE_AGAIN
            raise
        url = self._manifest_url(index)
        manifest = manifest_of(content, index, url)
        self.owner.check(manifest.run, url)
        if known and manifest.sha256 != self._hashes[index].hex():
            raise CorruptFileError("is not the manifest that was read before", where=url, remedy=MAKE_AGAIN)
        return manifest

    def manifests(self) -> dict[int, Manifest]:
        """All committed manifests by iteration. For short-lived tools: each takes some 30 KiB of memory.

        Raises CorruptFileError if a manifest is broken or does not follow the one before, MissingFileError if one is gone although
        later ones exist or the iteration was published.
        """
        return {manifest.iteration: manifest for manifest in self._from(0)}

    def last_begun(self, first: int) -> int:
        """The last iteration that has started, at least `first`. A listing may lack the newest, so they are looked up by name."""
        last = max([first, *numbers_of(self.store, "iterations")])
        while self.iteration(last + 1).exists(DRAWN):
            last += 1
        return last

    def first_open_iteration(self, strict: bool = True) -> int:
        """The first iteration without a manifest. If a committed manifest is gone, raises, or unless `strict` returns that iteration."""
        with contextlib.nullcontext() if strict else contextlib.suppress(MissingFileError):
            for _ in self.committed(len(self._hashes)):
                continue
        return len(self._hashes)

    def history(self, since: int = 0) -> Iterator[IterationHistory]:
        """The groups and their outcomes of each committed iteration from `since` on. The ledger is computed from them.

        Raises the errors of `manifests` when the reader reaches them.
        """
        return (item.history for item in self.committed(since) if item.history)

    def committed(self, since: int = 0) -> Iterator[Committed]:
        """The summary of each committed iteration from `since` on.

        Does not read, or look for, the manifests that a summary covers: `verify` does. Raises the errors of `manifests`.
        """
        if not self._hashes:
            numbers = numbers_of(self.store, "iterations")
            if numbers and numbers[-1] >= EVERY:
                self.summaries.find(numbers)
        for item in self.summaries.read(min(since, len(self._hashes))):
            self.owner.check(item.run, self._manifest_url(item.iteration))
            self._hashes.setdefault(item.iteration, bytes.fromhex(item.sha256))
            if item.iteration >= since:
                yield item
        yield from map(Committed.of, self._from(max(since, self.summaries.until)))

    def verify(self, index: int) -> list[str]:
        """Problems of a committed iteration: the files that are missing or differ from its manifest."""
        try:
            manifest = self.manifest(index)
        except StorageError as error:
            return [str(error)]
        if manifest is None:
            return [
                f"{self._manifest_url(index)}: no such file; iteration {iteration_number(index)} is not committed"
            ]
        folder = self.iteration(index)

        def problem(entry: FileEntry) -> str | None:
            try:
                folder.verify(entry)
            except StorageError as error:
                return str(error)
            return None

        return [text for text in in_threads(problem, manifest.files) if text]

    # checkpoints

    def checkpoint_path(self, done: int) -> str:
        """Folder of the checkpoint after `done` iterations, relative to the run's."""
        return f"checkpoints/{done:06d}"

    def complete_checkpoints(self) -> list[int]:
        """Checkpoints with a completeness marker, by the number of iterations done, oldest first."""
        return [done for done in numbers_of(self.store, "checkpoints") if self._is_complete(done)]

    def remove_checkpoint(self, done: int) -> None:
        """Remove a checkpoint, its marker first: if interrupted, the checkpoint is incomplete."""
        self.store.remove(f"{self.checkpoint_path(done)}/{COMPLETE}")
        self.store.remove(self.checkpoint_path(done), recursive=True)

    def clean(self) -> list[str]:
        """Remove temporary files of interrupted writes, with a log line each; returns the paths.

        Skips older committed iterations: they were cleaned when they were among the newest.
        """
        numbers = numbers_of(self.store, "iterations") if self.store.local else []
        removed = self.store.sweep(ABANDONED_S, [self.iteration_path(number) for number in numbers[:-EVERY]])
        for path in removed:
            log.warning("removed %s: an interrupted write left it", self.store.url_of(path))
        return removed

    def _from(self, since: int) -> Iterator[Manifest]:
        """The committed manifests from iteration `since` on, a few in memory at once. Raises the errors of `manifests`."""
        if 0 < len(self._hashes) <= since:
            yield from self._since_then(since)
            return
        # each manifest is checked against the one before, so start at the first that was not read
        first = min(since, len(self._hashes))
        # a listing may lack some, so every number up to its last is looked up by name, and then those after it
        numbers = range(first, max(numbers_of(self.store, "iterations"), default=-1) + 1)
        for start in range(0, len(numbers), READ_AHEAD):
            some = numbers[start : start + READ_AHEAD]
            for number, manifest in zip(some, in_threads(self.manifest, some), strict=True):
                if manifest and number == first:
                    self._keep(manifest)
                    first += 1
                    if number >= since:
                        yield manifest
                elif manifest or (number == first and self.iteration(first).exists(PUBLISHED)):
                    raise self._gone(first)
        if first == numbers.stop:
            yield from self._since_then(since)

    def _since_then(self, since: int) -> Iterator[Manifest]:
        """The same for manifests committed since the last read, without listing thousands of folders."""
        while manifest := self.manifest(first := len(self._hashes)):
            self._keep(manifest)
            if first >= since:
                yield manifest
        follower = f"{self.iteration_path(first + 1)}/{MANIFEST}"
        if self.iteration(first).exists(PUBLISHED) or self.store.exists(follower):
            raise self._gone(first)

    def _gone(self, index: int) -> MissingFileError:
        return MissingFileError(
            "no such file, though the iteration was committed",
            where=self._manifest_url(index),
            remedy="start the run again: it is made again from the iteration's records. Where they are gone too, restore "
            f"it from a copy, or {self._branch()}",
        )

    def _branch(self) -> str:
        return (
            "go on from a checkpoint before it: "
            f"`millrace branch {of_run(self.name, self.store.url, 'NEW', '--at ITERATION')}`"
        )

    def _is_complete(self, done: int) -> bool:
        return self.store.exists(f"{self.checkpoint_path(done)}/{COMPLETE}")

    def _keep(self, manifest: Manifest) -> None:
        """Keep the hash of a manifest. Raises CorruptFileError if it follows another manifest than the stored one."""
        known = self._hashes.get(manifest.iteration - 1)
        if manifest.before and known and manifest.before != known.hex():
            raise CorruptFileError(
                f"is not the manifest that iteration {iteration_number(manifest.iteration)} follows",
                where=self._manifest_url(manifest.iteration - 1),
                remedy=MAKE_AGAIN,
            )
        self._hashes[manifest.iteration] = bytes.fromhex(manifest.sha256)
        if manifest.iteration == len(self._hashes) - 1:
            self._newest = manifest

    def _manifest_url(self, index: int) -> str:
        return self.store.url_of(f"{self.iteration_path(index)}/{MANIFEST}")


def open_iterations(folder: RunFolder) -> list[int]:
    """The started iterations that are not committed, in order. There are several if generation is ahead of the trainer."""
    first = folder.first_open_iteration()
    begun = range(first, folder.last_begun(first) + 1)
    return [
        index for index in begun if folder.iteration(index).list() or folder.iteration(index).exists(DRAWN)
    ]


def first_undrawn_iteration(folder: RunFolder) -> int:
    """The first iteration whose prompts are not committed. Earlier open iterations may have drawn theirs."""
    index = folder.first_open_iteration()
    while folder.iteration(index).exists(DRAWN):
        index += 1
    return index


def manifest_of(content: object, index: int, url: str) -> Manifest:
    """The manifest of an iteration from its file's content. Raises CorruptFileError unless it is whole by its own hash."""
    if isinstance(content, dict) and content.get("schema_version") != schema.VERSION:
        raise CorruptFileError(
            f"of schema version {content.get('schema_version')}, wanted {schema.VERSION}",
            where=url,
            remedy="continue the run with the millrace that wrote it",
        )
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        raise CorruptFileError(f"not a manifest: {error}", where=url, remedy=MAKE_AGAIN) from error
    if manifest.sha256 != manifest.content_hash() or manifest.iteration != index:
        raise CorruptFileError("its content does not have the hash it names", where=url, remedy=MAKE_AGAIN)
    return manifest
