"""YAML as configurations use it: a key twice is an error, 1e-4 is a number. Pure."""

from __future__ import annotations

import re
from typing import Any

import yaml

FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")

MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """Plain data only."""


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
    """The one document of a text. Raises yaml.YAMLError with the place of what is wrong."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
