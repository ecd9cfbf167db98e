"""The samples of an iteration as a table of figures, without texts and tokens: what lists, scatters and counts are made of.

Owns which narrow columns are read: of kept samples from the batch, of all others from verdicts and from the parts of rollouts and
rewards. Knows nothing of pages.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import duckdb
import pyarrow as pa

from millrace.connectors.storage.files import FileEntry
from millrace.core.contracts import schema
from millrace.flows.viewer.stored import Iteration, NotShown, Problems, ViewedRun

MANY_FILES = 64  # parts; above, they are read when asked for
LARGE = 128 << 20  # bytes of a batch; above, it is read when asked for
KEPT = 4  # iterations in memory

# a sample's figures: verdicts say what became of it, the batch has kept ones, parts have the others
JOINED = """
SELECT coalesce(v.sample_id, b.sample_id, r.sample_id) AS sample_id,
  coalesce(v.group_id, b.group_id, r.group_id) AS group_id,
  coalesce(b.source, r.source, p.source) AS source, p.ordinal AS ordinal,
  coalesce(b.reward, s.reward) AS reward,
  coalesce(b.response_length, r.response_length) AS length,
  coalesce(b.status, r.status) AS status, b.advantage AS advantage,
  coalesce(v.verdict, CASE WHEN b.sample_id IS NOT NULL THEN 'kept' END) AS verdict,
  coalesce(v.reason, r.reason) AS reason, v.dropped_by AS dropped_by, v.group_reward AS group_reward,
  coalesce(b.train_step, v.train_step) AS train_step, v.reused_from + 1 AS reused_from,
  s.scoring AS scoring, coalesce(b.engine_id, r.engine_id) AS engine, coalesce(b.answer, s.answer) AS answer,
  coalesce(b.label, r.label) AS label,
  CASE WHEN len(coalesce(b.policy_versions, r.policy_versions)) > 0
    THEN coalesce(b.policy_versions, r.policy_versions)[1].version END AS version
FROM verdicts v FULL JOIN batch b USING (sample_id) FULL JOIN rollouts r ON r.sample_id = coalesce(v.sample_id, b.sample_id)
LEFT JOIN rewards s ON s.sample_id = coalesce(v.sample_id, b.sample_id, r.sample_id)
LEFT JOIN prompts p ON p.group_id = coalesce(v.group_id, b.group_id, r.group_id)
ORDER BY ordinal, group_id, sample_id
"""
GENERATED = "SELECT * FROM joined WHERE verdict IS DISTINCT FROM 'returned' OR length IS NOT NULL"
# a connection of these settings reads no file and no address
CLOSED = "SET enable_external_access = false; SET memory_limit = '200MB'; SET threads = 2"
UNUSED = "SELECT count(DISTINCT group_id) FROM joined WHERE verdict = 'returned' AND length IS NULL"
COLUMNS = {
    "verdicts": (
        *("sample_id", "group_id", "verdict", "reason", "dropped_by", "train_step", "reused_from"),
        "group_reward",
    ),
    "batch": (
        *(
            "sample_id",
            "group_id",
            "source",
            "reward",
            "response_length",
            "status",
            "advantage",
            "train_step",
        ),
        *("engine_id", "policy_versions", "answer", "label"),
    ),
    "rollouts": (
        *(
            "sample_id",
            "group_id",
            "source",
            "response_length",
            "status",
            "reason",
            "engine_id",
            "policy_versions",
        ),
        "label",
    ),
    "rewards": ("sample_id", "reward", "scoring", "answer"),
    "prompts": ("group_id", "source", "ordinal"),
}


class SampleTable:
    """The samples of an iteration. Groups that were drawn and given back without an answer are counted in `unused` alone.

    partial: figures of samples that are not in the batch are not read yet; of a large batch none are but the verdicts.
    """

    def __init__(self, found: Mapping[str, pa.Table], partial: bool, problems: list[NotShown]) -> None:
        """found: the narrow columns of each kind of table."""
        self.partial, self.problems = partial, problems
        self._lock = threading.Lock()  # a connection answers one query at a time
        self._connection = duckdb.connect()
        self._connection.execute(CLOSED)
        for kind, table in found.items():
            self._connection.register(kind, table)
        joined = self._connection.sql(JOINED).to_arrow_table()
        self._connection.register("joined", joined)
        self.unused = int(self._connection.execute(UNUSED).fetchall()[0][0])
        self._connection.register("samples", self._connection.sql(GENERATED).to_arrow_table())
        self.count = int(self._connection.execute("SELECT count(*) FROM samples").fetchall()[0][0])
        for name in (*found, "joined"):
            self._connection.unregister(name)

    def ask(self, query: str, values: Sequence[object] = ()) -> list[dict[str, object]]:
        """The rows of a query over the table `samples`, as mappings."""
        with self._lock:
            found = self._connection.execute(query, list(values))
            names = [column[0] for column in found.description]
            return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


class SampleTables:
    """The tables of a run's iterations; the newest asked for are kept in memory."""

    def __init__(self, run: ViewedRun) -> None:
        self._run = run
        self._kept: OrderedDict[tuple[int, bool], SampleTable] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, index: int, whole: bool = False) -> SampleTable:
        """The samples of an iteration. whole: also where that takes thousands of parts.

        Raises MissingFileError if the iteration has not started.
        """
        with self._lock:
            iteration = self._run.iteration(index)
            for key in ((index, True), (index, whole)):
                if iteration.committed and key in self._kept:
                    self._kept.move_to_end(key)
                    return self._kept[key]
            table = self._read(iteration, whole)
            if iteration.committed:
                self._kept[index, not table.partial] = table
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            return table

    def _read(self, iteration: Iteration, whole: bool) -> SampleTable:
        problems = Problems()
        size = sum(entry.size for entry in iteration.of_kind("batch"))
        large = iteration.committed and size > LARGE and not whole
        found = {kind: self._table(iteration, kind, problems) for kind in ("verdicts", "prompts")}
        found["batch"] = _empty("batch") if large else self._table(iteration, "batch", problems)
        parts = [*iteration.of_kind("rollouts"), *iteration.of_kind("rewards")]
        unread = (
            large or not iteration.committed or self._others(iteration, found["verdicts"], found["batch"])
        )
        partial = large or bool(unread and len(parts) > MANY_FILES and not whole)
        for kind in ("rollouts", "rewards"):
            # what the batch holds need not be read again
            there = unread and not partial
            found[kind] = self._table(iteration, kind, problems) if there else _empty(kind)
        return SampleTable(found, partial, problems.listed())

    def _others(self, iteration: Iteration, verdicts: pa.Table, batch: pa.Table) -> bool:
        """Whether the iteration generated samples that are not in its batch."""
        generated = sum(entry.rows or 0 for entry in iteration.of_kind("rollouts"))
        reused = verdicts.num_rows - verdicts.column("reused_from").null_count
        return bool(generated > batch.num_rows - reused)

    def _table(self, iteration: Iteration, kind: str, problems: Problems) -> pa.Table:
        entries: list[FileEntry] = iteration.of_kind(kind)
        return iteration.tables.read(entries, kind, COLUMNS[kind], failed=problems.note)


def _empty(kind: str) -> pa.Table:
    return pa.Table.from_batches([], schema.schema(kind)).select([*COLUMNS[kind]])
