"""The optimizers of which megatron's optimizer consists."""

from __future__ import annotations

from typing import Any


def parts_of(optimizer: Any) -> list[Any]:
    """One optimizer a kind of parameters where megatron chains several, else the optimizer itself."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))
