"""One bucket of weights as a rank tells of it. Imports no torch: who drives the ranks need not load it."""

from __future__ import annotations

from dataclasses import dataclass

Entry = tuple[str, tuple[int, ...], str, int, int]


@dataclass(frozen=True)
class Bucket:
    """Whole tensors laid end to end. `entries`: name, shape, dtype, first and past-the-end byte."""

    entries: list[Entry]
    bytes: int
    last: bool
    handle: bytes  # how another process on this GPU opens the buffer; empty where none was asked for
