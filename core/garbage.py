"""When a process collects Python's garbage: a full collection of all that it has imported takes half a second."""

from __future__ import annotations

import gc


def collect_garbage() -> None:
    """Collect now, and leave what lives out of later collections, which come at any moment."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
