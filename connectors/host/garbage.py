"""When a process collects Python's garbage, and gives free memory back to its host.

A full collection of all that a process has imported takes half a second.
"""

import ctypes
import gc

GIVE_BACK_EVERY = 20  # iterations
_NEVER = 2**30  # parameters of glibc's mallopt
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of glibc's malloc.h


def collect_garbage() -> None:
    """Collect now, and exclude the surviving objects from later collections, which come at any moment."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def collect_whole_when_asked() -> None:
    """Leave full collections to `collect_garbage` and `give_back_memory`.

    Python's own full collections come while an iteration's samples are in flight: with 16,384 samples each one blocked the
    event loop for 0.3 s.
    """
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)


def use_few_heaps() -> None:
    """Let this process's threads allocate from two heaps; does nothing if the C library is not glibc.

    glibc serves threads from up to eight heaps a core and cannot return freed memory below live blocks in each: a process of
    many threads grows by that for hours. Large blocks get separate pages, which are returned once they are freed; glibc
    raises that limit by itself up to 32 MiB unless it is set.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option:
        option(_M_ARENA_MAX, 2)
        option(_M_MMAP_THRESHOLD, 256 * 1024)


def give_back_memory() -> None:
    """Collect garbage, then return free memory of the C library to the host. Takes a few milliseconds."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim:
        trim(0)


def collect_between_iterations(number: int) -> None:
    """Collect before an iteration works. number: of it, from 1 for the first that finds every module imported."""
    if number == 1:
        collect_garbage()
    elif number > 1 and number % GIVE_BACK_EVERY == 0:
        give_back_memory()
    elif number > 1:
        gc.collect()
