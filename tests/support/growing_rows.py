"""A user's module with rows that grow with the level, some of which fail: sources with levels name its `sums`."""

from __future__ import annotations

MODULE = '''
class Sums:
    """Sums of numbers that grow with the level; one row in EVERY fails."""

    def __init__(self, level):
        self.level = level

    def __len__(self):
        return 50

    def __getitem__(self, number):
        if number % EVERY == 2:
            raise KeyError(f"row {number}")
        a = number % 10 + 10 * self.level
        return {"prompt": f"{a}+{number // 10}=", "label": str((a + number // 10) % 10)}


def sums(level):
    return Sums(level)
'''


def growing_rows(every: int) -> str:
    """The module's text. every: one row in so many fails."""
    return MODULE.replace("EVERY", str(every))
