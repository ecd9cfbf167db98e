"""Arrow schemas of the tables that tasks hand to each other, and their version.

Owns how a row class becomes a schema, and rows a table; knows nothing of where files lie. `sample` defines the columns, one
class per table.
"""

from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import pyarrow as pa

from millrace.core.contracts.rows.prompts import Quarantined
from millrace.core.contracts.sample import (
    BatchSample,
    DrawnGroup,
    EvaluatedSample,
    GeneratedSample,
    JudgedSample,
    SampleLogprobs,
    ScoredSample,
    columns,
)
from millrace.core.contracts.turns import TurnRow
from millrace.core.plain_text import whole_values

VERSION = 1
# by the names that annotations of row classes have
ARROW_TYPES: dict[str, pa.DataType] = {
    "int32": pa.int32(),
    "float32": pa.float32(),
    "large_binary": pa.large_binary(),  # the bytes of a table may be more than 32-bit offsets reach
    "list<int8>": pa.list_(pa.int8()),
    "list<int32>": pa.list_(pa.int32()),
    "list<float32>": pa.list_(pa.float32()),
    "map<string, float64>": pa.map_(pa.string(), pa.float64()),
    "map<string, string>": pa.map_(pa.string(), pa.string()),
}

ROWS: dict[str, type[Any]] = {
    "prompts": DrawnGroup,
    "rollouts": GeneratedSample,
    "turns": TurnRow,
    "rewards": ScoredSample,
    "verdicts": JudgedSample,
    "batch": BatchSample,
    "logprobs": SampleLogprobs,
    "quarantine": Quarantined,  # one row per unusable row of a source
    "evaluations": EvaluatedSample,
}


def row_schema(row: type[Any]) -> pa.Schema:
    """The Arrow schema of a table whose rows are of this class."""
    hints = get_type_hints(row, include_extras=True)
    return pa.schema([_field(name, hints[name]) for name in columns(row)])


def _field(name: str, hint: Any) -> pa.Field:
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (each for each in get_args(hint) if each is not NoneType)
        return pa.field(name, _type(hint))
    return pa.field(name, _type(hint), nullable=False)


def _type(hint: Any) -> pa.DataType:
    if get_origin(hint) is Annotated:
        return ARROW_TYPES[hint.__metadata__[0]]
    if get_origin(hint) is list:
        return pa.list_(_type(get_args(hint)[0]))
    if is_typeddict(hint):
        inner = get_type_hints(hint, include_extras=True)
        return pa.struct([pa.field(name, _type(each)) for name, each in inner.items()])
    plain = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    return pa.string() if get_origin(hint) is Literal else plain[hint]


SCHEMAS: dict[str, pa.Schema] = {kind: row_schema(row) for kind, row in ROWS.items()}


def schema(kind: str) -> pa.Schema:
    """The Arrow schema of a kind of table, carrying its name and version in the metadata."""
    return SCHEMAS[kind].with_metadata({"millrace.table": kind, "millrace.version": str(VERSION)})


def to_table(rows: Sequence[Any], kind: str) -> pa.Table:
    """Rows of the class that a kind of table has, as that table."""
    arrays = [_array([getattr(row, field.name) for row in rows], field.type) for field in SCHEMAS[kind]]
    return pa.Table.from_arrays(arrays, schema=schema(kind))


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    """A column. A lone surrogate in a text, which Arrow refuses, is escaped."""
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array(whole_values(values), kind)
