"""Check that each reference to a secret has a value, and read the blocks among them.

Owns which fields may refer; imports Prefect only if a configuration names one of its blocks.
"""

import os
from collections.abc import Iterator
from typing import Any

from millrace.core.config import RunConfig
from millrace.core.config.parts.problems import Problem
from millrace.core.config.parts.restart import decided
from millrace.core.config.secret_rules import is_replaced
from millrace.core.contracts.references import blocks, pass_on, references, remedy
from millrace.core.errors import ConfigError


def check_references(config: RunConfig) -> Iterator[Problem]:
    """References to unset variables and missing blocks. Passes the blocks' secrets on to this process and its children."""
    for field, value in _replaced(config):
        for reference in sorted(set(references(value))):
            kind, _, name = reference.partition(":")
            if kind == "env" and name not in os.environ:
                yield Problem(field, f"${{{reference}}}", f"{name} is not set", remedy(reference))
    for field, block in _blocks(config):
        try:
            pass_on(block, _read(block, field))
        except ConfigError as error:
            yield Problem(field, f"${{prefect:{block}}}", error.reason, error.remedy or "")


def pass_blocks_on(config: RunConfig) -> None:
    """Read every block that the configuration refers to, for this process and its children. Raises ConfigError."""
    for field, block in _blocks(config):
        pass_on(block, _read(block, field))


def _blocks(config: RunConfig) -> Iterator[tuple[str, str]]:
    return ((field, block) for field, value in _replaced(config) for block in sorted(blocks(value)))


def _replaced(config: RunConfig) -> Iterator[tuple[str, Any]]:
    return ((field, value) for field, value, _ in decided(config) if is_replaced(field))


def _read(block: str, field: str) -> str:
    from millrace.connectors.prefect.secret_blocks import read_secret

    return read_secret(block, field)
