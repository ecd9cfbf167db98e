"""A fence that stops nobody: what a driver's write meets that was under way when another took its lease."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass


@dataclass(frozen=True)
class Passing:
    """The fence of a driver whose write was under way when the lease was taken: nothing refuses it."""

    token: int

    def check(self) -> None:
        """Find nothing."""

    def writing(self) -> AbstractContextManager[None]:
        """Refuse nothing."""
        return nullcontext()
