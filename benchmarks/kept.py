"""Kept results: one file a benchmark and device, benchmarks/results/DEVICE/BENCHMARK.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


class KeptResults:
    """Reads kept results and remembers which files were read."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self.folder = folder
        self.read: set[str] = set()

    def get(self, device: str, name: str) -> Any:
        """The content of one file; None if the device has no such result."""
        path = self.folder / device / f"{name}.json"
        if not path.exists():
            return None
        self.read.add(f"{device}/{name}.json")
        return json.loads(path.read_text(encoding="utf-8"))
