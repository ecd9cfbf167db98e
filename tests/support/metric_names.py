"""Which metrics docs/metrics.md explains."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def unexplained(names: Iterable[str]) -> list[str]:
    """Metrics without a row in docs/metrics.md, where a part in capitals stands for any name."""
    rows = [
        line.split("|")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")
    ]
    listed = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    patterns = [re.sub("[A-Z]+", r"[^/]+", re.escape(name)) for name in listed]
    return sorted(name for name in names if not any(re.fullmatch(pattern, name) for pattern in patterns))
