"""run.json of another version of the fields is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.core.config.reading.load import VERSION, readable
from millrace.core.errors import ConfigError


def test_a_record_of_this_version_is_read_unchanged() -> None:
    record = {"name": "a", "config": {"run": {}}, "config_version": VERSION}
    assert readable(record) == record


@pytest.mark.parametrize(
    "version", [{}, *({"config_version": other} for other in (VERSION - 1, VERSION + 1, None, "2"))], ids=str
)
def test_a_record_of_another_version_is_refused_by_name(version: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"run\.json of a.*config_version.*reads {VERSION}.*install"):
        readable({"name": "a", "config": None, **version})
