"""The optimizers of which megatron's optimizer consists."""

from __future__ import annotations

from typing import Any


def parts_of(optimizer: Any) -> list[Any]:
    """The chained optimizers, one per kind of parameters, or the optimizer itself if megatron chains none."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))
