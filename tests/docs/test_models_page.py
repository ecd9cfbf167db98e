"""docs/models.md names every family and preset as the code has them."""

from __future__ import annotations

import re

from millrace.core.families.presets import PRESETS
from millrace.core.families.registry import every_family
from tests.support.models_page import COMMAND, PAGE, page


def test_the_tables_of_families_and_presets_are_current() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), f"run {COMMAND}"


def test_every_family_and_preset_has_a_row() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", text, re.MULTILINE)
    assert {family.name for family in every_family()} <= {
        name for _, second in rows for name in re.findall("`(.+?)`", second)
    }
    assert PRESETS.keys() <= {first.strip("`") for first, _ in rows}
