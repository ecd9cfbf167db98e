"""Some rollouts of an iteration as traces: which ones, and what stands in the spans of each.

Owns the choice, and that few bytes are read: figures of all samples first, then texts of the row groups with chosen ones alone.
Knows nothing of trackers. Texts are cut, and leave without the secrets in them.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millrace.connectors.storage.files import FileEntry
from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.connectors.storage.ranged import RangedTables
from millrace.core.config.parts.redaction import shown_text
from millrace.core.contracts.ids import rollout_of
from millrace.core.contracts.turns import place_of_columns, rows_that_count
from millrace.core.plain_text import printable, whole
from millrace.core.tracker import RolloutTrace, TraceSpan

FIGURES = ("sample_id", "response_length", "status")
SCORES = ("sample_id", "reward", "scoring")
GENERATED = (
    *(
        "sample_id",
        "group_id",
        "source",
        "prompt",
        "response",
        "response_length",
        "label",
        "status",
        "reason",
    ),
    *("engine_id", "timings"),
)
JUDGED = ("sample_id", "reward", "reward_parts", "reward_texts", "answer", "scoring", "reason", "scoring_s")
VERDICTS = ("sample_id", "verdict", "reason")
TURNS = (
    *("rollout_id", "order", "branch", "event", "kind", "segment", "ended", "text", "tool", "arguments"),
    *("failed", "timings", "engine_id"),
)
LONGEST = 4_000  # characters of a text
NAME = 100  # characters of a span's name, which may be a model's text
SPANS = 40  # turns and calls of a rollout: the first and the last half
FAILED = ("failed", "timed_out")
RowGroup = tuple[str, int]
"""A part's path, and the number of a row group there."""


@dataclass(frozen=True)
class SampleFigures:
    """What the choice needs of a sample."""

    sample: str
    reward: float | None
    length: int
    failed: bool


def chosen(samples: Sequence[SampleFigures], most: int) -> dict[str, str]:
    """At most `most` samples, with why: in turn the worst, the best, the median, the longest and the newest failure.

    samples: in the order in which they were stored.
    """
    scored = [(each.reward, each) for each in samples if each.reward is not None]
    middle = statistics.median([reward for reward, _ in scored]) if scored else 0.0
    orders = {
        "worst": [each for _, each in sorted(scored, key=lambda pair: pair[0])],
        "best": [each for _, each in sorted(scored, key=lambda pair: -pair[0])],
        "median": [each for _, each in sorted(scored, key=lambda pair: abs(pair[0] - middle))],
        "longest": sorted(samples, key=lambda each: -each.length),
        "failed": [each for each in reversed(samples) if each.failed],
    }
    found: dict[str, str] = {}
    waiting = {why: iter(order) for why, order in orders.items()}
    while waiting and len(found) < most:
        for why in list(waiting):
            new = next((each for each in waiting[why] if each.sample not in found), None)
            if new is None:
                del waiting[why]
            elif len(found) < most:
                found[new.sample] = why
    return found


def rollout_traces(files: IterationFiles, most: int) -> list[RolloutTrace]:
    """The chosen rollouts of an iteration. Raises StorageError for a file that is missing or broken."""
    return _Parts(files).traces(most)


class _Parts:
    """An iteration's parts, of which figures and chosen rows are read."""

    def __init__(self, files: IterationFiles) -> None:
        self._tables = RangedTables(files.folder)
        self._entries = files.entries

    def traces(self, most: int) -> list[RolloutTrace]:
        """The chosen rollouts."""
        samples, places = self._figures("rollouts", FIGURES)
        scores, scored_at = self._figures("rewards", SCORES)
        rewards = {row["sample_id"]: row for row in scores}
        why = chosen([_figures_of(row, rewards.get(row["sample_id"], {})) for row in samples], most)
        generated = self._rows("rollouts", GENERATED, why, places)
        judged = self._rows("rewards", JUDGED, why, scored_at)
        verdicts = {row["sample_id"]: row for row in self._all("verdicts", VERDICTS, why)}
        turns = self._turns({rollout_of(name) for name in why})
        return [
            _trace(
                generated[name],
                judged.get(name),
                verdicts.get(name),
                turns.get(rollout_of(name), []),
                reason,
            )
            for name, reason in why.items()
        ]

    def _of_kind(self, kind: str) -> list[FileEntry]:
        return [
            self._entries[path]
            for path in sorted(self._entries)
            if path.startswith(f"{kind}/") or path == f"{kind}.parquet"
        ]

    def _figures(self, kind: str, columns: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, RowGroup]]:
        rows: list[dict[str, Any]] = []
        places: dict[str, RowGroup] = {}
        for entry, number, table in self._tables.groups(self._of_kind(kind), kind, columns):
            found = table.to_pylist()
            rows += found
            places |= {row["sample_id"]: (entry.path, number) for row in found}
        return rows, places

    def _rows(
        self, kind: str, columns: Sequence[str], wanted: Collection[str], places: Mapping[str, RowGroup]
    ) -> dict[str, dict[str, Any]]:
        here = {places[name] for name in wanted if name in places}
        return {row["sample_id"]: row for row in self._all(kind, columns, wanted, here)}

    def _turns(self, rollouts: Collection[str]) -> dict[str, list[dict[str, Any]]]:
        """The turns and calls of each rollout that count, in order."""
        names = pa.array(list(rollouts), pa.string())
        here = {
            (entry.path, number)
            for entry, number, table in self._tables.groups(self._of_kind("turns"), "turns", ("rollout_id",))
            if pc.any(pc.is_in(table.column("rollout_id"), names)).as_py()
        }
        found: dict[str, list[dict[str, Any]]] = {}
        for row in self._all("turns", TURNS, rollouts, here):
            found.setdefault(row["rollout_id"], []).append(row)
        return {name: rows_that_count(rows, place_of_columns) for name, rows in found.items()}

    def _all(
        self,
        kind: str,
        columns: Sequence[str],
        wanted: Collection[str],
        here: Collection[RowGroup] | None = None,
    ) -> list[dict[str, Any]]:
        """Rows whose first column is wanted. here: the row groups that are read; all by default."""
        names = pa.array(list(wanted), pa.string())
        tables = self._tables.groups(
            self._of_kind(kind),
            kind,
            columns,
            None if here is None else lambda entry, number, _: (entry.path, number) in here,
        )
        return [
            row
            for _, _, table in tables
            for row in table.filter(pc.is_in(table.column(columns[0]), names)).to_pylist()
        ]


def _figures_of(row: Mapping[str, Any], score: Mapping[str, Any]) -> SampleFigures:
    failed = row["status"] == "failed" or score.get("scoring") in FAILED
    return SampleFigures(row["sample_id"], score.get("reward"), row["response_length"], failed)


def _trace(
    row: Mapping[str, Any],
    score: Mapping[str, Any] | None,
    verdict: Mapping[str, Any] | None,
    turns: Sequence[Mapping[str, Any]],
    why: str,
) -> RolloutTrace:
    times = dict(row["timings"])
    start = float(times.get("started", 0.0))
    end = start + float(times.get("generate_s", 0.0))
    left_out = max(0, len(turns) - SPANS)
    shown = [*turns[: SPANS // 2], *turns[len(turns) - SPANS // 2 :]] if left_out else turns
    about = {"engine": row["engine_id"], "tokens": row["response_length"], "ended": row["status"]}
    spans = [_turn(turn, start) for turn in shown] or [TraceSpan("turn", "turn", {}, about, start, end)]
    if score is not None:
        spans.append(_reward(row, score, max([end, *(span.end for span in spans)])))
    reason = row["reason"] or (verdict or {}).get("reason") or (score or {}).get("reason")
    return RolloutTrace(
        sample=row["sample_id"],
        group=row["group_id"],
        why=why,
        inputs={"source": row["source"], "prompt": shown_part(_said(row["prompt"]))},
        outputs={
            "response": shown_part(row["response"]),
            "verdict": (verdict or {}).get("verdict"),
            "reason": shown_part(reason),
            **({"turns left out": left_out} if left_out else {}),
        },
        failed=row["status"] == "failed",
        spans=spans,
    )


def _reward(row: Mapping[str, Any], score: Mapping[str, Any], start: float) -> TraceSpan:
    outputs = {
        "reward": _figure(score["reward"]),
        "parts": {whole(name): _figure(value) for name, value in score["reward_parts"] or ()},
        "words": {whole(name): shown_part(text) for name, text in score["reward_texts"] or ()},
        "answer": shown_part(score["answer"]),
        "reason": shown_part(score["reason"]),
    }
    label = {"label": shown_part(_said(row["label"])) if row["label"] is not None else None}
    end = start + float(score["scoring_s"] or 0.0)
    return TraceSpan("reward", "reward", label, outputs, start, end, score["scoring"] in FAILED)


def _turn(row: Mapping[str, Any], start: float) -> TraceSpan:
    """A segment of a turn, or a call."""
    times = dict(row["timings"])
    started = float(times.get("started", start))
    end = started + float(times.get("call_s") or times.get("generate_s") or 0.0)
    at = {"branch": row["branch"], "event": row["event"]}
    if row["kind"] == "call":
        name = printable(row["tool"] or "?")[:NAME]
        asked = {**at, "arguments": shown_part(row["arguments"])}
        answer = {"text": shown_part(row["text"])}
        return TraceSpan(name, "tool", asked, answer, started, end, bool(row["failed"]))
    about = {**at, "segment": row["segment"], "engine": row["engine_id"]}
    outputs = {"text": shown_part(row["text"]), "ended": row["ended"]}
    return TraceSpan("turn", "turn", about, outputs, started, end)


def _said(stored: str) -> str:
    """A stored prompt or label: a plain text unchanged, other JSON as it is stored."""
    content = json.loads(stored)
    return content if isinstance(content, str) else stored


def shown_part(text: str | None) -> str | None:
    """At most LONGEST characters of a text, as UTF-8 can hold them, without secrets."""
    if text is None:
        return None
    # a secret at the end may be cut in two: it is looked for in more than what is shown
    start = shown_text(whole(text[: 2 * LONGEST]))
    return start if len(text) <= LONGEST else f"{start[:LONGEST]} … ({len(text):,} characters)"


def _figure(value: float | None) -> float | str | None:
    """A number, as text if JSON cannot hold it."""
    return value if value is None or math.isfinite(value) else str(value)
