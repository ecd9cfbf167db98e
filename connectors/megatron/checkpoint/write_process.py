"""A process that writes one rank's part of a checkpoint: `python -m` this module.

Reads its task from the process that started it, and hands back what was written.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys

from millrace.connectors.megatron.checkpoint.file_writer import WriteTask, write

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Write, and hand the outcome to standard output."""
    task: WriteTask = pickle.load(sys.stdin.buffer)  # noqa: S301 - of the process that started this one
    _die_with(task.parent)
    sys.stdout.buffer.write(pickle.dumps(write(task)))


def _die_with(parent: int) -> None:
    """Die when the thread that started this process ends. Elsewhere than on Linux a writer ends its work for nobody."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)


if __name__ == "__main__":
    main()
