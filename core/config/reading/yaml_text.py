"""YAML as configurations use it: a key twice is an error, 1e-4 is a number.

Nesting and the number of values are bounded: a small text can mean more than memory holds. Pure.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from millrace.core.config.parts.problems import Problem

FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")

MERGE = "tag:yaml.org,2002:merge"


MAX_DEPTH = 50
# an alias counts all the values that it stands for
MAX_VALUES = 100_000


class _Loader(yaml.SafeLoader):
    """Plain data only."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """As in yaml, but a value that Python refuses, such as the 32nd of a month, is an error with its place."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:
            problem = f"no such number or date ({str(error).split(':')[0].lower()})"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == MERGE or not isinstance(key_node, yaml.ScalarNode):
            continue
        key = loader.construct_object(key_node)
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"{key!r} is given a second time", key_node.start_mark
            )
        seen.add(key)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789."))


def parse(text: str) -> Any:
    """The one document of a text. Raises yaml.YAMLError with the place of the error."""
    _check_size(text)
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader


def _check_size(text: str) -> None:
    """Refuse a text that is nested too deep or holds too many values, by its events, before anything is built."""
    open_at: list[int] = []  # values before each open collection
    names: list[str | None] = []  # anchors of the open collections
    sizes: dict[str, int] = {}  # values that an alias stands for
    count = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionEndEvent):
            began, name = open_at.pop(), names.pop()
            if name:
                sizes[name] = count - began
        elif isinstance(event, yaml.AliasEvent):
            count += sizes.get(event.anchor or "", 1)
        elif isinstance(event, yaml.CollectionStartEvent):
            open_at.append(count)
            names.append(event.anchor)
            count += 1
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
        too_much = ""
        if len(open_at) > MAX_DEPTH:
            too_much = f"nested more than {MAX_DEPTH} deep"
        elif count > MAX_VALUES:
            too_much = f"more than {MAX_VALUES} values, aliases included"
        if too_much:
            raise yaml.MarkedYAMLError(problem=too_much, problem_mark=event.start_mark)  # type: ignore[arg-type]


LARGEST = 2**63 - 1  # what files, databases and torch hold
TEXT_SHOWN = 60


def odd_values(
    values: Any, place: tuple[int | str, ...] = ()
) -> Iterator[tuple[tuple[int | str, ...], Problem]]:
    """Each value below `values` that no field can mean, by its place; options of user functions are included."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from odd_values(value, (*place, key))
    elif isinstance(values, list):
        for index, value in enumerate(values):
            yield from odd_values(value, (*place, index))
    else:
        field = ".".join(map(str, place))
        if isinstance(values, float) and not math.isfinite(values):
            yield place, Problem(field, values, "not a finite number", "give a number")
        elif isinstance(values, int) and abs(values) > LARGEST:
            shown = f"an integer of {values.bit_length()} bits"
            yield place, Problem(field, shown, "too large", f"give a whole number up to {LARGEST}")
        elif isinstance(values, str) and not _is_text(values):
            shown = values[:TEXT_SHOWN].encode("unicode_escape").decode()
            yield (
                place,
                Problem(field, shown, "holds half a character, which UTF-8 cannot store", "remove it"),
            )


def _is_text(value: str) -> bool:
    try:
        return b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False
