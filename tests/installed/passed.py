"""The versions with which `python -m tests.installed --keep` passed, by interpreter, torch and megatron-core. Owns the file.

tests/flows/test_versions.py holds them against what `millrace check` calls tested.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from packaging.version import Version

FILE = Path(__file__).with_name("passed.json")


def passed() -> dict[str, dict[str, str]]:
    """Versions by package, of each environment."""
    found: dict[str, dict[str, str]] = json.loads(FILE.read_text())
    return found


def keep(python: str, resolution: str, versions: Mapping[str, str]) -> None:
    """Write down an environment, in the place of an earlier one of its kind. Builds, such as +cpu, are left out."""
    environment = {package: Version(version).public for package, version in versions.items()}
    name = f"Python {python}, {resolution}, torch {environment['torch']}, megatron-core {environment['megatron-core']}"
    FILE.write_text(json.dumps({**passed(), name: environment}, indent=1, sort_keys=True) + "\n")
