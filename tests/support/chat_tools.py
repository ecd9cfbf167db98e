"""Tools that a model calls in `millrace chat`: one that answers, one that raises, and one that takes too long."""

from __future__ import annotations

import asyncio


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def fail() -> str:
    """Fail."""
    raise ValueError("no")


async def wait() -> str:
    """Wait."""
    await asyncio.sleep(60)
    return "late"
