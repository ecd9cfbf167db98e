"""Ctrl-C where a shell has it ignored."""

from __future__ import annotations

import signal


def heed_ctrl_c() -> None:
    """Have this process, and the commands that it starts, heed Ctrl-C. A shell has what it starts with `&` ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
