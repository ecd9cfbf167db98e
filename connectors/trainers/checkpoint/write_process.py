"""The process that writes one rank's part of a checkpoint: `python -m` this module.

Reads its task from standard input, and returns the written files on standard output.
"""

import ctypes
import os
import pickle
import signal
import sys

from millrace.connectors.trainers.checkpoint.file_writer import WriteTask, write

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Write the files, and send the outcome to standard output."""
    task: WriteTask = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the parent process
    _die_with(task.parent)
    sys.stdout.buffer.write(pickle.dumps(write(task)))


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends. Outside Linux the writer finishes without use."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)


if __name__ == "__main__":
    main()
