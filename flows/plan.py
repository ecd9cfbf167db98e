"""The plan as tables for the terminal."""

from __future__ import annotations

import json
from pathlib import Path

from rich.table import Table

from core.config import RunConfig
from core.config.plan import plan


def plan_tables(config: RunConfig) -> list[Table]:
    """What `millrace check` prints when nothing is wrong."""
    described = Path(config.model.path) / "config.json"
    hf = json.loads(described.read_text()) if described.exists() else None
    tables = []
    for heading, lines in plan(config, hf).items():
        table = Table(
            "what", "", title=f"{config.run.name}: {heading}", show_header=False, title_justify="left"
        )
        for what, value in lines:
            table.add_row(what, value)
        tables.append(table)
    return tables
