"""docs/algorithms.md shows the presets as they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from millrace.core.config.algorithm.presets import PRESETS

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"


def test_the_table_lists_every_preset_with_its_fields() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|",
        PAGE.read_text().split("## What the presets learn")[0],
        re.MULTILINE,
    )
    shown = {
        name: {key: yaml.safe_load(value) for key, value in re.findall(r"`([\w.]+)=([^`]+)`", fields)}
        for name, fields in rows
    }
    assert shown == {name: dotted(fields) for name, fields in PRESETS.items()}


def dotted(fields: dict[str, Any], above: str = "") -> dict[str, Any]:
    """The fields by their paths, and the kind of a choice by the choice's."""
    shown: dict[str, Any] = {}
    for name, value in fields.items():
        path = above if name == "kind" else f"{above}.{name}".lstrip(".")
        shown |= dotted(value, path) if isinstance(value, dict) and value else {path: value}
    return shown
