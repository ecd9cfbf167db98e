"""Rows of several stored tables in one order, with a bounded part of them in memory.

Owns which table is read when, and how many stay decoded. Does not know the use of the rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

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
