"""Compiled kernels in storage (placement.kernel_cache), from which hosts take what they lack and to which they give what they made.

A pack is an archive of entries (host/kernel_folders), named by its SHA-256. An index, a sealed document of the same name, lists a
pack's entries and is written after it. Neither is ever changed, so hosts may give at the same time; at worst an entry is in two
packs. Owns packs and indexes; knows nothing of compilers. The storage helps a start and never ends it: a failure is said in
the log of kernels, which lies beside the logs of the run's engines on each node.
"""

import gzip
import hashlib
import io
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from datetime import UTC, datetime
from pathlib import Path

from millrace.connectors.host.kernel_folders import (
    KernelKey,
    entry_files,
    kernel_environment,
    kernel_folder,
    kernel_key,
    put_entry,
    whole_entries,
)
from millrace.connectors.host.local_files import PRIVATE_FOLDER, locked, log_folder
from millrace.connectors.storage.files import in_threads
from millrace.connectors.storage.store import Store
from millrace.core.config import RunConfig
from millrace.core.contracts.source_path import inside
from millrace.core.errors import CorruptFileError, MissingFileError, StalledError, StorageError
from millrace.core.waits import beat

INDEX, PACK = ".json", ".tar.gz"
LOG = "kernels.log"
PATIENCE_S = 120.0  # a start without kernels takes as long
# waits before gifts: later kernels are compiled at the first use of a shape
GIVEN_AFTER_S = (0.0, 60.0, 240.0)
COMPILED_HERE = "it is not used, and what it held is compiled here"
FAILS = (StorageError, StalledError, OSError)  # of the storage or of this host's folder


class KernelCache:
    """The kernels of one key, in storage and in this host's folder."""

    def __init__(self, url: str, key: KernelKey, folder: Path, say: Callable[[str], None]) -> None:
        """say: takes the lines of the log."""
        self.store = Store(url).child(key.name)
        self.key, self.folder, self._say = key, folder, say
        self._indexes: dict[str, list[str]] = {}  # entries of each pack, by its name
        # the same of packs that are not used; none if the index is damaged
        self._damaged: dict[str, list[str]] = {}
        self._alone = threading.Lock()  # a gift may start while what was to be taken still arrives
        self._giving: threading.Thread | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which a process compiles into this host's folder."""
        return kernel_environment(self.folder)

    def take(self, patience_s: float = PATIENCE_S) -> int:
        """Take the entries that this host lacks; returns their number. Says a storage that fails, and damaged files.

        patience_s: after which it returns 0, and what arrives later is still put into the folder.
        """
        taken: list[int] = []
        self._say(f"looking in {self.store.url} for what {self.folder} lacks")
        thread = threading.Thread(target=lambda: taken.append(self._taken()), name="kernels", daemon=True)
        thread.start()
        deadline = time.monotonic() + patience_s
        while thread.is_alive() and time.monotonic() < deadline:
            beat()  # this wait has another deadline
            thread.join(min(1.0, patience_s))
        if not taken:
            self._say(f"nothing taken in {patience_s:g} s, so kernels are compiled")
        return sum(taken)

    def _taken(self) -> int:
        started = time.monotonic()
        try:
            with self._alone, locked(self.folder / "take.lock"):
                taken = self._take()
        except FAILS as error:
            self._say(f"nothing taken, so kernels are compiled: {error}")
            return 0
        self._say(f"took {taken} in {time.monotonic() - started:.1f} s")
        return taken

    def give(self) -> int:
        """Store the whole entries of this host that no index lists; returns their number. Says a storage that fails."""
        started = time.monotonic()
        try:
            with self._alone, locked(self.folder / "give.lock"):
                given = self._give()
        except FAILS as error:
            self._say(f"not stored: {error}")
            return 0
        if given:
            self._say(f"stored {given} in {time.monotonic() - started:.1f} s")
        return given

    def give_later(self, after_s: Sequence[float] = GIVEN_AFTER_S) -> None:
        """Give in the background, after each of these waits. Does nothing from the second call on."""

        def gifts() -> None:
            for wait_s in after_s:
                time.sleep(wait_s)
                self.give()

        if self._giving is None:
            self._giving = threading.Thread(target=gifts, name="kernel-cache", daemon=True)
            self._giving.start()

    def _take(self) -> int:
        self._read_indexes()
        taken = 0
        for name, entries in list(self._indexes.items()):
            lacking = [entry for entry in entries if not (self.folder / entry).exists()]
            if lacking:
                taken += self._unpack(name, lacking)
        return taken

    def _read_indexes(self) -> None:
        """Read the indexes that are new in storage."""
        names = [path.removesuffix(INDEX) for path in self.store.list() if path.endswith(INDEX)]
        new = [name for name in names if name not in self._indexes and name not in self._damaged]
        for name, entries in zip(new, in_threads(self._read_index, new), strict=True):
            if entries is None:
                self._damaged[name] = []
            else:
                self._indexes[name] = entries

    def _read_index(self, name: str) -> list[str] | None:
        """The entries of a pack; None if its index is damaged."""
        try:
            index = self.store.read_sealed(name + INDEX)
            return [inside(entry) for entry in index["entries"]]
        except (CorruptFileError, MissingFileError, ValueError) as error:
            self._say(f"{error}; {COMPILED_HERE}")
            return None

    def _unpack(self, name: str, lacking: Sequence[str]) -> int:
        """Put these entries of a pack into the folder; returns their number, 0 for a damaged pack."""
        path = name + PACK
        try:
            data = self.store.read(path)
            actual = hashlib.sha256(data).hexdigest()
            if actual != name:
                reason = f"its {len(data)} bytes have the sha256 {actual}, not that of its name"
                raise CorruptFileError(reason, where=self.store.url_of(path))
        except (CorruptFileError, MissingFileError) as error:
            self._say(f"{error}; {COMPILED_HERE}")
            self._damaged[name] = self._indexes.pop(name)
            return 0
        contents = _contents(data, lacking)
        with tempfile.TemporaryDirectory(prefix=".taking-", dir=self.folder) as aside:
            for number, (entry, files) in enumerate(contents.items()):
                place = Path(aside) / str(number)
                place.mkdir()
                put_entry(self.folder, entry, files, place)
        return len(contents)

    def _give(self) -> int:
        self._read_indexes()
        stored = {entry for entries in self._indexes.values() for entry in entries}
        entries = [entry for entry in whole_entries(self.folder) if entry not in stored]
        if not entries:
            return 0
        data = _packed(self.folder, entries)
        name = hashlib.sha256(data).hexdigest()
        self.store.write(name + PACK, data)
        index = {"entries": entries, "bytes": len(data), "key": dict(self.key.parts)}
        self.store.write_sealed(name + INDEX, index)
        self._indexes[name] = entries
        self._remove_replaced(stored.union(entries))
        return len(entries)

    def _remove_replaced(self, stored: Set[str]) -> None:
        """Remove damaged indexes of which every entry is stored again, so that no further host reads them."""
        for name, entries in list(self._damaged.items()):
            if stored >= set(entries):
                del self._damaged[name]
                if name not in self._indexes:
                    self.store.remove(name + INDEX)
                    self.store.remove(name + PACK)


def _packed(folder: Path, entries: Sequence[str]) -> bytes:
    """An archive of entries, with the same bytes for the same content."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            for name, data in entry_files(folder, entry):
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(data), 0o600
                archive.addfile(member, io.BytesIO(data))
    return gzip.compress(out.getvalue(), 1, mtime=0)


def _contents(data: bytes, entries: Sequence[str]) -> dict[str, dict[str, bytes]]:
    """The files of these entries of an archive. Other members, and what is no plain file, are passed by."""
    found: dict[str, dict[str, bytes]] = {entry: {} for entry in entries}
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(data))) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isreg() else None
            entry = next((each for each in _above(member.name) if each in found), None)
            if file is not None and entry is not None:
                found[entry][inside(member.name)] = file.read()
    return {entry: files for entry, files in found.items() if files}


def _above(name: str) -> Iterator[str]:
    """A path and the paths of the folders around it."""
    while name:
        yield name
        name = name.rpartition("/")[0]


def kernel_cache(config: RunConfig, part: str, python_path: Sequence[str] = ()) -> KernelCache | None:
    """The cache of a run's kernels, after this host took what it lacked; None if the run has none.

    part: of the run, as the log names it. python_path: folders in which the process that compiles finds packages before this one does.
    """
    url = config.placement.kernel_cache
    if url is None:
        return None
    file = log_folder(config.storage.root, config.run.name) / LOG

    def say(line: str) -> None:
        file.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        with file.open("a") as out:
            out.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {part}: {line}\n")

    key = kernel_key(python_path)
    cache = KernelCache(url, key, kernel_folder(key), say)
    cache.take()
    return cache
