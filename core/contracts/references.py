"""References to secrets: `${env:NAME}` stands for an environment variable of the process that uses the value.

A configuration keeps the reference, and so does whatever is made from it: files, messages, pages. It is replaced by the value
where it is used, and nowhere else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from millrace.core.errors import ConfigError

REFERENCE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
WHOLE = r"^\$\{env:[A-Za-z_][A-Za-z0-9_]*\}$"  # a value that is one reference


def variables(value: Any) -> Iterator[str]:
    """The variables that a value refers to, within lists and mappings too."""
    if isinstance(value, str):
        yield from REFERENCE.findall(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from variables(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from variables(item)


def resolved(value: Any, where: str) -> Any:
    """The value with each reference replaced, within lists and mappings too. `where` is its field or file.

    Raises ConfigError naming a variable that is not set.
    """
    if isinstance(value, str):
        return REFERENCE.sub(lambda found: _variable(found[1], where), value) if "${" in value else value
    if isinstance(value, Mapping):
        return {name: resolved(item, where) for name, item in value.items()}
    if isinstance(value, list):
        return [resolved(item, where) for item in value]
    return value


def _variable(name: str, where: str) -> str:
    try:
        return os.environ[name]
    except KeyError:
        raise ConfigError(
            f"refers to {name}, which is not set", where=where, remedy=f"export {name}, or correct the name"
        ) from None


def scrubbed(text: str, value: Any) -> str:
    """A text in which each secret that a value refers to is its reference again: what a user's code printed may hold it."""
    for name in variables(value):
        secret = os.environ.get(name)
        if secret:
            text = text.replace(secret, f"${{env:{name}}}")
    return text
