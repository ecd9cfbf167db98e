"""When a process collects Python's garbage, and gives free memory back to its host.

A full collection of all that a process has imported takes half a second.
"""

from __future__ import annotations

import ctypes
import gc


def collect_garbage() -> None:
    """Collect now, and leave what lives out of later collections, which come at any moment."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def give_back_memory() -> None:
    """Give the host what the C library holds free; does nothing where that is not glibc. Takes a few milliseconds.

    glibc serves a process's threads from many heaps. What is freed below what still lives it keeps, until asked:
    a process of many threads grows by that for hours, though it holds no more than before.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
