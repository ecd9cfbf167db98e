"""`millrace score`: score the rows of a file with a reward, without a run.

Owns reading the rows, the calls, and the file of scores; processes and deadlines are as in a run. A row whose scoring fails has
no reward but a reason.
"""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import typer
from pydantic import ValidationError

from millrace.connectors.storage.sources.formats import without_nulls_of_tables
from millrace.connectors.user_code.pool import Outcome, WorkerPool
from millrace.connectors.user_code.process import Limits
from millrace.core.config.reward import RewardFunction
from millrace.core.contracts.references import resolved, scrubbed
from millrace.core.contracts.rows.messages import message_of
from millrace.core.contracts.rows.prompts import value_at
from millrace.core.contracts.sample import split_parts
from millrace.core.errors import ConfigError, DataError
from millrace.core.hooks.loading import load, search_in
from millrace.core.plain_text import json_text, whole_values
from millrace.core.rewards.code.answer import long_integers
from millrace.core.rewards.scoring import Scored, score_group, score_sample
from millrace.flows.commands.named_files import check_file
from millrace.flows.commands.terminal import guarded, print_lines

REASONS = 10  # reasons that are printed
BINS = 10
QUANTILES = {"least": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "most": 1.0}
ENDINGS = (".jsonl", ".json", ".parquet")
OUT = pa.schema(
    [
        ("row", pa.int64()),
        ("reward", pa.float64()),
        ("answer", pa.string()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())),
        ("reward_texts", pa.map_(pa.string(), pa.string())),
        ("scoring", pa.string()),
        ("reason", pa.string()),
    ]
)
_ABSENT = object()


def score(
    file: Annotated[str, typer.Argument(help="JSONL or Parquet file with a response in each row.")],
    reward: Annotated[str, typer.Option(help="Import path: package.module:function.")],
    options: Annotated[str, typer.Option(help="Options of the reward, as YAML: {form: 0.2}.")] = "{}",
    out: Annotated[
        str | None,
        typer.Option(help="Where scores are written: JSONL or Parquet. FILE.scores.jsonl by default."),
    ] = None,
    prompt_key: Annotated[str, typer.Option(help="Column with the prompt.")] = "prompt",
    response_key: Annotated[str, typer.Option(help="Column with the response.")] = "response",
    label_key: Annotated[str, typer.Option(help="Column with the reference answer.")] = "label",
    metadata_key: Annotated[str, typer.Option(help="Column with a mapping for the reward.")] = "metadata",
    group_key: Annotated[
        str | None, typer.Option(help="Column that names the group of a row, for a reward of groups.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that score.")] = 1,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Longest time for one call. Seconds.")] = 30.0,
    memory_mb: Annotated[int | None, typer.Option(min=256, help="Memory of a process. MiB.")] = None,
    max_processes: Annotated[int | None, typer.Option(min=0, help="Processes that a call may run.")] = None,
) -> None:
    """Score the rows of a file with a reward; print mean, distribution and failures. Exit code 1: no row could be scored."""
    columns = Columns(prompt_key, response_key, label_key, metadata_key, group_key)
    scores, written = guarded(
        lambda: score_file(
            file,
            reward,
            _options(options),
            columns,
            out=out,
            workers=workers,
            timeout_s=timeout_s,
            limits=Limits(memory_mb, max_processes),
        )
    )
    lines = [f"{len(scores.rows)} rows, {len(scores.rewards)} scored; scores in {written}"]
    if scores.mean is not None:
        shares = " ".join(f"{name} {scores.quantile(share):g}" for name, share in QUANTILES.items())
        lines += [f"mean {scores.mean:g}, {shares}", *_histogram(scores.rewards)]
    lines += [f"{count:>7}  {reason}" for reason, count in scores.failures[:REASONS]]
    print_lines(lines)
    if not scores.rewards:
        raise typer.Exit(1)


def _options(text: str) -> dict[str, Any]:
    import yaml

    try:
        options = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError("is not YAML", where=f"--options {text}", remedy="write {name: value}") from error
    if not isinstance(options, dict):
        raise ConfigError("is no mapping", where=f"--options {text}", remedy="write {name: value}")
    return options


def _histogram(rewards: list[float]) -> list[str]:
    """A line for each value, or for each of ten ranges of values; rewards: smallest first."""
    values = sorted(set(rewards))
    if len(values) <= BINS:
        counts = [(f"{value:g}", rewards.count(value)) for value in values]
    else:
        least, width = rewards[0], (rewards[-1] - rewards[0]) / BINS
        places = [min(BINS - 1, int((reward - least) / width)) for reward in rewards]
        counts = [(f"from {least + at * width:g}", places.count(at)) for at in range(BINS)]
    most = max(count for _, count in counts)
    return [f"{count:>7}  {name:<14} {'█' * round(30 * count / most)}" for name, count in counts]


@dataclass(frozen=True)
class Columns:
    """The keys of a row that the reward reads. Keys may be dotted."""

    prompt: str = "prompt"
    response: str = "response"
    label: str = "label"
    metadata: str = "metadata"
    group: str | None = None  # rows with the same value are one group


@dataclass
class Scores:
    """Results of the rows, in their order."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        """The rewards of scored rows, smallest first."""
        return sorted(row["reward"] for row in self.rows if row["reward"] is not None)

    @property
    def mean(self) -> float | None:
        """The mean reward; None if no row has one."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def failures(self) -> list[tuple[str, int]]:
        """Reasons of failures with their counts, the most frequent first."""
        return Counter(row["reason"] for row in self.rows if row["reason"]).most_common()

    def quantile(self, share: float) -> float:
        """The smallest reward that this share of the scored rows does not exceed."""
        return self.rewards[max(0, math.ceil(share * len(self.rewards)) - 1)]


def score_file(
    path: str,
    reward: str,
    options: dict[str, Any],
    columns: Columns,
    *,
    out: str | None,
    workers: int,
    timeout_s: float,
    limits: Limits,
) -> tuple[Scores, str]:
    """Score every row and write the scores; returns them and the written file.

    Errors: ConfigError for a reward that cannot be loaded, DataError for a file that cannot be read.
    """
    try:
        function = RewardFunction(function=reward, options=options, group=columns.group is not None)
    except ValidationError as error:
        raise ConfigError(
            "no import path of a reward",
            where=f"--reward {reward}",
            remedy="write it as package.module:function",
        ) from error
    target = Path(out or f"{path.rpartition('.')[0]}.scores.jsonl")
    for name, place in (("FILE", path), ("--out", str(target))):
        if not place.endswith(ENDINGS):
            raise ConfigError(
                "the format is not known by its ending",
                where=f"{name} = {place}",
                remedy=f"use {', '.join(ENDINGS)}",
            )
    if target.resolve() == Path(path).resolve():
        raise ConfigError(
            "would replace the file that is read", where=f"--out {out}", remedy="give another name"
        )
    search_in()
    # a wrong path is an error before processes start
    load(function.function, "reward.function")
    resolved(function.options, "--options")
    with long_integers():
        rows = [_sample(values, number, path, columns) for number, values in enumerate(_read(path))]
    if not rows:
        raise DataError("holds no rows", where=path, remedy="give a file with prompts and responses")
    scores = Scores(asyncio.run(_score_all(function, rows, workers, timeout_s, limits)))
    _write(scores, target)
    return scores, str(target)


def _read(path: str) -> list[dict[str, Any]]:
    """The rows of a JSONL or Parquet file. Raises DataError or CorruptFileError naming it."""
    try:
        if path.endswith(".parquet"):
            rows: list[dict[str, Any]] = _table(Path(path)).to_pylist()
            return [{name: without_nulls_of_tables(value) for name, value in row.items()} for row in rows]
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise DataError(f"cannot be read: {error}", where=path, remedy="correct the path") from error
    values = []
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            values.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"is not JSON: {error}", where=f"{path}, line {number + 1}", remedy="write an object a line"
            ) from error
        if not isinstance(values[-1], dict):
            raise DataError(
                "is not an object", where=f"{path}, line {number + 1}", remedy="write an object a line"
            )
    return values


def _table(path: Path) -> pa.Table:
    """Read a table with its page checksums; a run's table is checked against its entry."""
    check_file(path)
    return pq.read_table(path, page_checksum_verification=True)


def _sample(values: dict[str, Any], number: int, path: str, columns: Columns) -> dict[str, Any]:
    """A row as a stored sample."""

    def of(key: str, option: str, default: Any = _ABSENT) -> Any:
        found = value_at(values, key, _ABSENT)
        if found is not _ABSENT:
            return found
        if default is not _ABSENT:
            return default
        raise DataError(
            f"has no {key}, only {', '.join(map(str, values))}",
            where=f"{path}, row {number}",
            remedy=f"name the column with {option}",
        )

    response, metadata = of(columns.response, "--response-key"), of(columns.metadata, "", None)
    if not isinstance(response, str):
        raise DataError(
            f"its {columns.response} is no text",
            where=f"{path}, row {number}",
            remedy="name the column with --response-key",
        )
    prompt, label = of(columns.prompt, "--prompt-key", ""), of(columns.label, "", None)
    try:
        prompt = [message_of(each) for each in prompt] if _is_chat(prompt) else prompt
    except ValueError as error:
        raise DataError(
            f"a message of its {columns.prompt} cannot be shown: {error}",
            where=f"{path}, row {number}",
            remedy="leave the row out, or write as text what it shows",
        ) from error
    return {
        "row": number,
        "group": None if columns.group is None else json.dumps(of(columns.group, "--group-key"), default=str),
        "prompt": json.dumps(prompt),
        "response": response,
        "label": None if label is None else json.dumps(label, default=str),
        "metadata": json.dumps(metadata, default=str) if isinstance(metadata, dict) else None,
        "response_length": int(values.get("response_length") or 0),
        "status": "truncated" if values.get("status") == "truncated" else "completed",
    }


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(each, dict) and "role" in each for each in prompt)


async def _score_all(
    function: RewardFunction, rows: Sequence[dict[str, Any]], workers: int, timeout_s: float, limits: Limits
) -> list[dict[str, Any]]:
    pool = WorkerPool(workers, limits)
    units: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        units.setdefault(row["group"] if function.group else row["row"], []).append(row)

    async def scored(unit: list[dict[str, Any]]) -> list[dict[str, Any]]:
        score: Any = score_group if function.group else score_sample
        given: Any = unit if function.group else unit[0]
        outcome = await pool.call(
            score, function.function, function.options, given, timeout_s=timeout_s, again=1
        )
        return _rows(unit, outcome, function)

    try:
        made = await asyncio.gather(*map(scored, units.values()))
    finally:
        pool.close()
    return sorted((row for unit in made for row in unit), key=lambda row: row["row"])


def _rows(unit: Sequence[dict[str, Any]], outcome: Outcome, function: RewardFunction) -> list[dict[str, Any]]:
    if outcome.kind == "done":
        values = outcome.value if function.group else [outcome.value]
        return [_scored(row["row"], value) for row, value in zip(unit, values, strict=True)]
    scoring = "timed_out" if outcome.kind == "timed_out" else "failed"
    reason = scrubbed(outcome.reason or scoring, function.options)
    none: dict[str, Any] = {"reward": None, "answer": None, "reward_parts": {}, "reward_texts": {}}
    return [{"row": row["row"], **none, "scoring": scoring, "reason": reason} for row in unit]


def _scored(row: int, value: Scored) -> dict[str, Any]:
    numbers, texts = split_parts(value["parts"])
    return {
        "row": row,
        "reward": value["reward"],
        "answer": value["answer"],
        "reward_parts": dict(numbers),
        "reward_texts": dict(texts),
        "scoring": "scored",
        "reason": None,
    }


def _write(scores: Scores, target: Path) -> None:
    if target.suffix == ".parquet":
        maps = ("reward_parts", "reward_texts")
        rows = [{**row, **{name: list(row[name].items()) for name in maps}} for row in scores.rows]
        pq.write_table(pa.Table.from_pylist(whole_values(rows), schema=OUT), target)
        return
    target.write_text("".join(json_text(row) + "\n" for row in scores.rows), encoding="utf-8")
