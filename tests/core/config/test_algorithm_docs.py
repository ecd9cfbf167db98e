"""docs/algorithms.md shows the presets as they are."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from millrace.core.config.presets import PRESETS

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"


def test_the_table_lists_every_preset_with_its_fields() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|",
        PAGE.read_text().split("## What the presets learn")[0],
        re.MULTILINE,
    )
    shown = {
        name: {key: yaml.safe_load(value) for key, value in re.findall(r"`(\w+)=([^`]+)`", fields)}
        for name, fields in rows
    }
    assert shown == PRESETS
