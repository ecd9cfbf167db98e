"""Sums whose numbers grow with the level."""

from __future__ import annotations


class Sums:
    """All sums of two numbers below `largest`, as rows by number."""

    def __init__(self, largest: int) -> None:
        self.largest = largest

    def __len__(self) -> int:
        return self.largest**2

    def __getitem__(self, number: int) -> dict[str, str]:
        a, b = divmod(number, self.largest)
        return {"prompt": f"{a}+{b}=", "label": str(a + b)}


def sums(level: int = 0) -> Sums:
    """The rows of a level: up to 9 of them make numbers below 50."""
    return Sums(5 * (level + 1))
