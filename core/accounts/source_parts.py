"""The parts that a ledger draws from: a source, or each level of a source with levels. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from millrace.core.config.data import Levels, Pools, Source

# names of sources hold no such character
MARK = "@"


class SourcePlan(NamedTuple):
    """How a source is drawn from. `rows`: usable rows, of each level if it has levels."""

    weight: float
    rows: int | Mapping[int, int]
    levels: Levels | None = None
    pools: Pools | None = None

    def parts(self, name: str) -> dict[str, int]:
        """Rows of each part of the source, by the name of the part."""
        if isinstance(self.rows, int):
            return {name: self.rows}
        return {part_name(name, level): rows for level, rows in sorted(self.rows.items())}


def plan_of(source: Source, sizes: Mapping[int | None, int]) -> SourcePlan:
    """How a source is drawn from. `sizes`: usable rows by level; under None for a source without levels."""
    levels = {level: rows for level, rows in sizes.items() if level is not None}
    return SourcePlan(source.weight, levels or sizes[None], source.levels, source.pools)


def part_name(source: str, level: int | None) -> str:
    """The name under which the ledger draws from a source, or from one of its levels."""
    return source if level is None else f"{source}{MARK}{level}"


def source_and_level(part: str) -> tuple[str, int | None]:
    """The source that a part is of, and its level."""
    source, mark, level = part.partition(MARK)
    return source, int(level) if mark else None
