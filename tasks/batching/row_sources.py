"""Rows of several stored tables in one order, with a bounded part of them in memory; parts of samples are read as they land.

So few parts are left to read when the batch is known and GPUs wait. Owns which table is read when, and how many stay decoded.
Does not know the use of the rows.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from millrace.connectors.storage.store import Store
from millrace.core.errors import CorruptFileError, MissingFileError
from millrace.tasks.stream import Stream

RowKey = tuple[int, int]  # number of a source, row in it
PIECE_TOKENS = 1 << 20  # tokens of a piece, unless one row has more
PIECE_ROWS = 4096
AT_ONCE = 8  # tables that are read at once
KEPT_BYTES = 128 << 20  # bytes of decoded tables that stay in memory


class RowSources:
    """Tables of one schema, each with a number."""

    def __init__(self) -> None:
        self._reads: list[Callable[[], pa.Table]] = []
        self._kept: OrderedDict[int, pa.Table] = OrderedDict()  # the last used table is last

    def add(self, read: Callable[[], pa.Table]) -> int:
        """Add a table; returns its number. read: is called when its rows are needed and not in memory."""
        self._reads.append(read)
        return len(self._reads) - 1

    def pieces(self, places: Sequence[RowKey], tokens: Sequence[int]) -> Iterator[tuple[slice, pa.Table]]:
        """The rows at these places, in this order, in pieces of some million tokens: a slice of the places, and its rows.

        tokens: of each row.
        """
        start = 0
        while start < len(places):
            end, size = start + 1, tokens[start]
            while end < len(places) and size + tokens[end] <= PIECE_TOKENS and end - start < PIECE_ROWS:
                size += tokens[end]
                end += 1
            yield slice(start, end), self._rows(places[start:end])
            start = end

    def _rows(self, places: Sequence[RowKey]) -> pa.Table:
        by_source: dict[int, list[int]] = {}
        for at, (source, _) in enumerate(places):
            by_source.setdefault(source, []).append(at)
        taken: list[pa.Table] = []
        wanted = list(by_source)
        for first in range(0, len(wanted), AT_ONCE):
            for source, table in self._tables(wanted[first : first + AT_ONCE]):
                taken.append(table.take([places[at][1] for at in by_source[source]]))
        if len(taken) == 1:
            return taken[0]
        order = [0] * len(places)
        for now, at in enumerate(at for here in by_source.values() for at in here):
            order[at] = now
        rows = pa.concat_tables(taken)
        return rows if order == sorted(order) else rows.combine_chunks().take(order)

    def _tables(self, sources: list[int]) -> list[tuple[int, pa.Table]]:
        """The tables of a few sources; tables that are not in memory are read concurrently."""
        missing = [source for source in sources if source not in self._kept]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            read = dict(zip(missing, threads.map(lambda source: self._reads[source](), missing), strict=True))
        found = [(source, read[source] if source in read else self._kept.pop(source)) for source in sources]
        self._kept |= found
        while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return found


PART_BYTES = 128 << 20  # bytes of decoded parts; further parts are read when they are needed


class LandedParts:
    """The parts of an iteration's samples."""

    def __init__(self, folder: Store) -> None:
        self._folder = folder
        self._kept: dict[str, pa.Table] = {}

    @property
    def url(self) -> str:
        """The folder of the parts."""
        return self._folder.url_of("rollouts")

    def read(self, path: str, columns: list[str] | None = None) -> pa.Table:
        """A part, or some columns of it. Raises MissingFileError or CorruptFileError, naming file and remedy."""
        kept = self._kept.get(path)
        if kept is None:
            return self._folder.read_table(path, "rollouts", columns=columns)
        return kept.select(columns) if columns else kept

    async def follow(self, stream: Stream) -> None:
        """Read parts as they land, as long as memory allows, until the filter has settled.

        A part that cannot be read raises later, when it is needed.
        """
        seen: set[str] = set()
        room = PART_BYTES
        while not stream.settled:
            revision = stream.revision
            for path in [path for path in stream.parts("rollouts") if path not in seen]:
                seen.add(path)
                if room > 0 and not stream.settled:
                    with contextlib.suppress(CorruptFileError, MissingFileError):
                        self._kept[path] = await asyncio.to_thread(self.read, path)
                        room -= self._kept[path].nbytes
            await stream.wait(revision)

    def forget(self) -> None:
        """Free the decoded parts: the batch is written."""
        self._kept.clear()
