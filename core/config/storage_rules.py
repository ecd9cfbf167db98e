"""Rules of `storage`."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.core.config.parts.problems import Problem
from millrace.core.config.run_config import RunConfig


def problems(config: RunConfig) -> Iterator[Problem]:
    """Storage that only one process can see."""
    yield from memory_only("storage.root", config.storage.root)


def memory_only(field: str, place: str | None) -> Iterator[Problem]:
    """A memory:// path, which other processes cannot see."""
    if place and place.startswith("memory://"):
        yield Problem(
            field,
            place,
            "trainer and engines do not see the memory of another process",
            "give a folder, s3:// or gs://",
        )
