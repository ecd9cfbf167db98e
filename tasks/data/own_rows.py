"""Rows of a user's function. It is called in a separate process, which holds the rows.

A row that raises, or cannot be stored as JSON, is an unusable row with the reason.
"""

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence, Sized
from functools import cached_property, lru_cache
from typing import Any

from millrace.connectors.storage.sources.formats import without_nulls_of_tables
from millrace.connectors.user_code.pool import WorkerPool
from millrace.core.config import UserFunction
from millrace.core.config.data import Levels, Source
from millrace.core.contracts.rows.prompts import PromptRow, Quarantined, parse_row, refuse
from millrace.core.errors import ConfigError, DataError
from millrace.core.hooks.loading import cleaned, failure_of, load_function

TIMEOUT_S = 600.0  # for the function itself, and for the rows of a draw
SAMPLED = 64  # rows of each level in a fingerprint, spread evenly
TABLES = "datasets"  # the package whose rows come from a table
UNSTORABLE = (TypeError, ValueError, RecursionError)


class OwnRows:
    """The rows of a source with a function. Its process ends with the driver.

    size, sha256, files: for the fingerprint; the hash covers some rows, spread over all.
    """

    size = 0
    files: dict[str, str] = {}

    def __init__(self, source: Source) -> None:
        """Calls the function, once for each level. Raises DataError if it fails, or returns no rows."""
        assert source.rows is not None
        self._source, self._function = source, source.rows
        self._pool = WorkerPool(1)
        self._sizes: dict[int | None, int] = {
            level: self._call(rows_count, self._function, self._where, level)
            for level in levels_of(source.levels)
        }
        for level, count in self._sizes.items():
            if not count:
                what = "no rows" if level is None else f"no rows of level {level}"
                raise DataError(
                    f"{self.name} returned {what}", where=self._where, remedy="return at least one"
                )

    @property
    def name(self) -> str:
        """The function's import path."""
        return self._function.function

    @property
    def _where(self) -> str:
        return f"data.sources.{self._source.name}.rows"

    def sizes(self) -> dict[int | None, int]:
        """Rows by level."""
        return dict(self._sizes)

    @cached_property
    def sha256(self) -> str:
        """Hash of some rows of each level."""
        hashed = hashlib.sha256()
        for level, count in self._sizes.items():
            numbers = sorted({at * (count - 1) // (SAMPLED - 1) for at in range(SAMPLED)})
            hashed.update(json.dumps([level, count, self._values(level, numbers)], sort_keys=True).encode())
        return hashed.hexdigest()

    def read(self, level: int | None, numbers: Sequence[int]) -> list[PromptRow | Quarantined]:
        """Rows by number, each usable or with the reason why it is not."""
        return [
            refuse(self._source, number, values, "")
            if isinstance(values, str)
            else parse_row(values, number, self._source)
            for number, values in zip(numbers, self._values(level, numbers), strict=True)
        ]

    def _values(self, level: int | None, numbers: Sequence[int]) -> list[Mapping[str, Any] | str]:
        """The function's rows; a text instead of a row is the reason for its lack."""
        found: list[str | dict[str, str]] = self._call(
            rows_at, self._function, self._where, level, list(numbers)
        )
        return [json.loads(row) if isinstance(row, str) else row["problem"] for row in found]

    def close(self) -> None:
        """End the process."""
        self._pool.close()

    def _call(self, function: Any, *args: Any) -> Any:
        """The call's value. Runs in a thread without an event loop."""
        outcome = asyncio.run(self._pool.call(function, *args, timeout_s=TIMEOUT_S, again=1))
        if outcome.kind != "done":
            reason = cleaned(outcome.reason or outcome.kind, self._function)
            raise DataError(f"{self.name} failed: {reason}", where=self._where, remedy="correct the function")
        return outcome.value


def levels_of(levels: Levels | None) -> list[int | None]:
    """The levels of a source; None for one without."""
    return list(range(levels.first, levels.last + 1)) if levels else [None]


def rows_count(function: UserFunction, where: str, level: int | None) -> int:
    """The number of rows that the function returns. Runs in the worker process."""
    return len(_rows(function.model_dump_json(), where, level))


def rows_at(
    function: UserFunction, where: str, level: int | None, numbers: Sequence[int]
) -> list[str | dict[str, str]]:
    """Rows as JSON, or their errors as text. Runs in the worker process."""
    rows = _rows(function.model_dump_json(), where, level)
    return [_row(rows, number, function) for number in numbers]


def _row(rows: Any, number: int, function: UserFunction) -> str | dict[str, str]:
    try:
        row = rows[number]
    except Exception as error:  # noqa: BLE001 - a user's code raises anything
        return {"problem": f"raised: {failure_of(error, function)}"}
    if not isinstance(row, Mapping):
        return {"problem": f"not an object: {type(row).__name__}"}
    if type(rows).__module__.partition(".")[0] == TABLES:
        row = without_nulls_of_tables(dict(row))
    try:
        return json.dumps(dict(row), allow_nan=False)
    except UNSTORABLE as error:
        return {"problem": f"wrong type: {cleaned(str(error), function)}"}


@lru_cache(maxsize=64)
def _rows(function: str, where: str, level: int | None) -> Any:
    """The function's result, kept for later rows."""
    called = load_function(UserFunction.model_validate_json(function), where)
    rows = called() if level is None else called(level=level)
    if (
        not isinstance(rows, Sized)
        or not hasattr(rows, "__getitem__")
        or isinstance(rows, str | bytes | Mapping)
    ):
        raise ConfigError(
            f"it returned a {type(rows).__name__}",
            where=where,
            remedy="return a list of rows, or an object with __len__ and __getitem__(number)",
        )
    return rows
