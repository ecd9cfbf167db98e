"""Where the rows of a group lie: the row groups of Parquet files that hold them, kept in memory for committed iterations.

Few row groups are all looked at. Of many, those are looked at first that should hold the group by its place in the order of drawing.
"""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from millrace.connectors.storage.files import FileEntry
from millrace.core.errors import StorageError
from millrace.flows.viewer.index import SampleTables
from millrace.flows.viewer.stored import Iteration, Problems

PLACES_KEPT = 8  # of (iteration, kind)
GROUPS_KEPT = 1000
FEW = 16  # row groups or parts; of more, those are read first that should hold a group
AT_ONCE = {"batch": 1, "rollouts": 8, "rewards": 8}  # parts land in about the order of drawing
TASKS = {"rollouts": "rollout", "rewards": "reward"}  # that wrote parts
DRAWN = {  # the samples of a table by kind, in the order of drawing
    "batch": "verdict = 'kept'",
    **dict.fromkeys(("rollouts", "rewards"), "reused_from IS NULL AND verdict IS DISTINCT FROM 'returned'"),
}
Places = list[tuple[str, int]]  # path of a file, and number of its row group


class GroupPlaces:
    """The places of groups in the tables of a run."""

    def __init__(self, tables: SampleTables) -> None:
        self._tables = tables
        self._all_of: OrderedDict[tuple[int, str], dict[str, Places]] = OrderedDict()
        self._near: OrderedDict[tuple[int, str, str], Places] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, iteration: Iteration, kind: str, group: str, problems: Problems) -> Places:
        """The row groups that hold a group in the tables of a kind; empty if there are none."""
        places = self._nearest(iteration, kind, group, problems)
        return self._all(iteration, kind, problems).get(group, []) if places is None else places

    def _all(self, iteration: Iteration, kind: str, problems: Problems) -> dict[str, Places]:
        """The row groups of every group in the tables of a kind."""
        key = iteration.index, kind
        with self._lock:
            if key in self._all_of:
                return self._all_of[key]
            places: dict[str, Places] = {}
            entries = iteration.of_kind(kind)
            for entry, number, table in iteration.tables.groups(
                entries, kind, ["group_id"], failed=problems.note
            ):
                for name in table.column("group_id").unique().to_pylist():
                    places.setdefault(name, []).append((entry.path, number))
            if iteration.committed and not problems.listed():
                self._all_of[key] = places
                while len(self._all_of) > PLACES_KEPT:
                    self._all_of.popitem(last=False)
            return places

    def _nearest(self, iteration: Iteration, kind: str, group: str, problems: Problems) -> Places | None:
        """The row groups of a batch or of parts that hold a group, looked for from where the order of drawing puts it.

        None if the table of samples does not know the group there, or if there are few row groups or parts.
        """
        if not iteration.committed or kind not in DRAWN:
            return None
        key = iteration.index, kind, group
        with self._lock:
            if key in self._near:
                return self._near[key]
        pieces = _pieces(iteration, kind, problems)
        if len(pieces) <= FEW:
            return None
        (known,) = self._tables.of(iteration.index).ask(
            "SELECT count(*) FILTER (group_id = ?) AS wanted, count(*) FILTER (ordinal < (SELECT min(ordinal) FROM samples "
            f"WHERE group_id = ?)) AS before FROM samples WHERE {DRAWN[kind]}",
            [group, group],
        )
        wanted, before = int(str(known["wanted"])), int(str(known["before"]))
        if not wanted:
            return None
        ends = list(accumulate(piece.rows for piece in pieces))
        guess = min(bisect.bisect_right(ends, before), len(pieces) - 1)
        nearest = sorted(pieces, key=lambda piece: abs(piece.at - guess))
        found: Places = []
        for start in range(0, len(nearest), AT_ONCE[kind]):
            some = nearest[start : start + AT_ONCE[kind]]
            for path, number, count in _counted(iteration, kind, some, group, problems):
                wanted -= count
                found.append((path, number))
            if wanted <= 0:
                with self._lock:
                    self._near[key] = found
                    while len(self._near) > GROUPS_KEPT:
                        self._near.popitem(last=False)
                break
        return found


@dataclass(frozen=True)
class _Piece:
    """A row group of a batch, or a whole part. at: its place in the order of drawing."""

    at: int
    entry: FileEntry
    number: int | None  # of the row group
    rows: int


def _pieces(iteration: Iteration, kind: str, problems: Problems) -> list[_Piece]:
    if kind != "batch":
        landed = [iteration.entries[path] for path in _landed(iteration, kind, problems)]
        return [_Piece(at, entry, None, entry.rows or 0) for at, entry in enumerate(landed)]
    entries = iteration.of_kind(kind)
    groups = [
        (entry, number, footer.row_group(number).num_rows)
        for entry, footer in iteration.tables.footers(entries, kind, problems.note)
        for number in range(footer.num_row_groups)
    ]
    return [_Piece(at, *group) for at, group in enumerate(groups)]


def _landed(iteration: Iteration, kind: str, problems: Problems) -> list[str]:
    """The paths of an iteration's parts as they landed, which the record of their task says; else in order."""
    paths = [entry.path for entry in iteration.of_kind(kind)]
    try:
        record = iteration.files.record(TASKS[kind]) or {}
    except StorageError as error:
        problems.note(error)
        return paths
    order = {file["path"]: at for at, file in enumerate(record.get("files", ()))}
    return sorted(paths, key=lambda path: order.get(path, len(order)))


def _counted(
    iteration: Iteration, kind: str, pieces: Sequence[_Piece], group: str, problems: Problems
) -> Iterator[tuple[str, int, int]]:
    """The row groups of some pieces that hold a group: path, number, rows of the group."""
    chosen = {(piece.entry.path, piece.number) for piece in pieces}
    for entry, number, table in iteration.tables.groups(
        [piece.entry for piece in pieces],
        kind,
        ["group_id"],
        lambda entry, number, _: not chosen.isdisjoint({(entry.path, number), (entry.path, None)}),
        problems.note,
    ):
        if count := table.column("group_id").to_pylist().count(group):
            yield entry.path, number, count
