"""The fields of megatron-core's configuration classes, kept by version: `python -m tests.connectors.megatron.fields` adds the installed one's."""

from __future__ import annotations

import json
from dataclasses import fields
from importlib import metadata
from pathlib import Path

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

CLASSES = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
KEPT = Path(__file__).with_name("fields.json")

Fields = dict[str, list[str]]  # by class


def installed() -> tuple[str, Fields]:
    """The installed version and its fields."""
    return metadata.version("megatron-core"), {
        upstream.__name__: sorted(item.name for item in fields(upstream)) for upstream in CLASSES
    }


def kept() -> dict[str, Fields]:
    """Fields by version."""
    found: dict[str, Fields] = json.loads(KEPT.read_text())
    return found


def main() -> None:
    """Add the installed version's fields to the file."""
    version, found = installed()
    by_version = {**(kept() if KEPT.exists() else {}), version: found}
    lines = (
        f' "{version}": {{\n'
        + ",\n".join(f'  "{name}": {json.dumps(names)}' for name, names in by_version[version].items())
        + "\n }"
        for version in sorted(by_version)
    )
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
