"""Permissions that hold for root too: without two capabilities a folder or file of mode 0 is closed to its owner."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

VERSION = 0x20080522  # of capget(2) and capset(2)
OVERRIDES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Data(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable"))


@contextlib.contextmanager
def modes_hold() -> Iterator[None]:
    """Within, this thread and those that it starts may open only what the modes of files allow."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = _Header(VERSION, 0), (_Data * 2)()
    assert libc.capget(ctypes.byref(header), data) == 0, os.strerror(ctypes.get_errno())
    before = data[0].effective
    data[0].effective = before & ~OVERRIDES
    assert libc.capset(ctypes.byref(header), data) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        data[0].effective = before
        assert libc.capset(ctypes.byref(header), data) == 0, os.strerror(ctypes.get_errno())
