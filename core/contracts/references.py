"""References to secrets: environment variables (`${env:NAME}`) and Secret blocks of Prefect (`${prefect:BLOCK}`).

A configuration keeps the reference, and so do files, messages and pages made from it. Only the code that uses the value
replaces the reference. The process that starts a run reads its blocks and passes them on (`pass_on`), so this module does not
know Prefect.
"""

import base64
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

from millrace.core.errors import ConfigError

ENV, BLOCK = r"env:[A-Za-z_][A-Za-z0-9_]*", r"prefect:[a-z0-9-]+"
REFERENCE = re.compile(rf"\$\{{({ENV}|{BLOCK})\}}")
WHOLE = rf"^\$\{{(?:{ENV}|{BLOCK})\}}$"  # a value that is one reference and nothing else
SHORTEST = 8  # shortest text in base64 that is searched for
PASSED_ON = "MILLRACE_BLOCK_"  # prefix of the variables in which a run's processes find its blocks


def references(value: Any) -> Iterator[str]:
    """What a value refers to, as `env:NAME` or `prefect:BLOCK`, within lists and mappings too."""
    if isinstance(value, str):
        yield from REFERENCE.findall(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from references(item)


def variables(value: Any) -> Iterator[str]:
    """The environment variables in which this process finds what a value refers to."""
    yield from map(_variable_of, references(value))


def blocks(value: Any) -> set[str]:
    """The names of the blocks that a value refers to."""
    return {found.removeprefix("prefect:") for found in references(value) if found.startswith("prefect:")}


def pass_on(block: str, secret: str) -> None:
    """From now on, this process and its child processes have the block's secret."""
    os.environ[_variable_of(f"prefect:{block}")] = secret


def resolved(value: Any, where: str) -> Any:
    """The value with each reference replaced, within lists and mappings too. `where` is its field or file.

    Raises ConfigError naming a variable that is not set, or a block that was not read.
    """
    if isinstance(value, str):
        return REFERENCE.sub(lambda found: _secret(found[1], where), value) if "${" in value else value
    if isinstance(value, Mapping):
        return {name: resolved(item, where) for name, item in value.items()}
    if isinstance(value, list):
        return [resolved(item, where) for item in value]
    return value


def remedy(reference: str) -> str:
    """What to do about a reference without a value."""
    kind, _, name = reference.partition(":")
    if kind == "env":
        return f"export {name}, or correct the name"
    return f"save a Secret block with the name {name} on the Prefect server, or correct the name"


def scrubbed(text: str, value: Any) -> str:
    """Replace each secret that a value refers to by its reference: output of a user's code may hold secrets.

    Secrets are also found as written in a URL, in JSON, in Python's notation, and in base64, alone or after other text.
    """
    for reference in references(value):
        secret = os.environ.get(_variable_of(reference))
        for form in _forms(secret) if secret else ():
            text = text.replace(form, f"${{{reference}}}")
    return text


def _secret(reference: str, where: str) -> str:
    try:
        return os.environ[_variable_of(reference)]
    except KeyError:
        raise ConfigError(
            f"refers to {reference.partition(':')[2]}, which is not set",
            where=where,
            remedy=remedy(reference),
        ) from None


def _variable_of(reference: str) -> str:
    kind, _, name = reference.partition(":")
    return name if kind == "env" else PASSED_ON + name.replace("-", "_").upper()


def _forms(secret: str) -> list[str]:
    """The forms in which texts show a secret, longest first."""
    shown = {secret, quote(secret), quote(secret, safe=""), quote_plus(secret)}
    shown |= {json.dumps(secret)[1:-1], repr(secret)[1:-1]}
    shown |= {form for before in range(3) for form in _in_base64(secret.encode(), before)}
    return sorted(shown, key=len, reverse=True)


def _in_base64(secret: bytes, before: int) -> Iterator[str]:
    """The base64 letters that encode only a secret that starts `before` bytes (mod 3) into a text.

    In the alphabet of base64 and in its alphabet for URLs. None for a short secret, whose letters any text may hold.
    """
    first, last = -(-before * 8 // 6), (before + len(secret)) * 8 // 6
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        letters = encode(bytes(before) + secret).decode()[first:last]
        if len(letters) >= SHORTEST:
            yield letters
