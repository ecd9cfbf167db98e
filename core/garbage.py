"""When a process collects Python's garbage, and gives free memory back to its host.

A full collection of all that a process has imported takes half a second.
"""

from __future__ import annotations

import ctypes
import gc

_NEVER = 2**30  # collections of the middle generation
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of glibc's malloc.h


def collect_garbage() -> None:
    """Collect now, and leave what lives out of later collections, which come at any moment."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def collect_whole_when_asked() -> None:
    """Leave collections of all that lives to `collect_garbage` and `give_back_memory`.

    Python's own come while an iteration's samples are in flight: with 16,384 of them each held the event loop up for 0.3 s.
    """
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)


def use_few_heaps() -> None:
    """Let this process's threads allocate from two heaps; does nothing where the C library is not glibc.

    glibc serves threads from up to eight heaps a core and keeps in each what is freed below what still lives: a process
    of many threads grows by that for hours. Large blocks get pages of their own, which go back as soon as they are freed;
    glibc raises that limit by itself up to 32 MiB unless it is set.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option:
        option(_M_ARENA_MAX, 2)
        option(_M_MMAP_THRESHOLD, 256 * 1024)


def give_back_memory() -> None:
    """Collect garbage, then give the host what the C library holds free. Takes a few milliseconds."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim:
        trim(0)
