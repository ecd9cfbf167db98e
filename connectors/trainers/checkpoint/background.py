"""Writes this rank's checkpoint in another process while training continues.

Owns that process and its state. Writes at most one checkpoint at a time. Knows nothing of other ranks.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.distributed.checkpoint import Metadata

from millrace.connectors.trainers.checkpoint.file_writer import WriteTask, Written
from millrace.connectors.trainers.checkpoint.folders import on_every_rank
from millrace.connectors.trainers.checkpoint.host_copy import HostCopy, HostMemory
from millrace.connectors.trainers.learner import Learner
from millrace.connectors.trainers.memory_errors import check_host_memory
from millrace.connectors.trainers.rank import SaveState
from millrace.core.contracts.task_records import StepMetrics
from millrace.core.errors import StalledError, StorageError
from millrace.core.waits import Limit, Watch, bytes_moved

END_S = 10.0  # seconds for a killed process to disappear
FILES = 4  # written at once per rank: while one is hashed, the disk writes another
ROOM = 64 * 2**20  # bytes beside the tensors, since each starts at a multiple of 256 bytes
MODULE = "millrace.connectors.trainers.checkpoint.write_process"


@dataclass
class Begun:
    """A checkpoint that is being written: the content of its marker, and this rank's folder for files."""

    url: str
    version: int
    metrics: StepMetrics | None
    folder: Path  # with the files that are written before training continues
    metadata: Metadata | None  # only on rank 0
    seconds: float  # for which training waited
    keeps: contextlib.ExitStack = field(
        default_factory=contextlib.ExitStack
    )  # removes the folder if it is temporary


class BackgroundWriter:
    """The background writer of one rank."""

    def __init__(self, limit: Limit) -> None:
        """limit: how long its process may neither read nor write a byte."""
        self._limit = limit
        self.memory = HostMemory()
        self.begun: Begun | None = None
        self._starts_ahead = False
        self._ahead: subprocess.Popen[bytes] | None = None  # a process that waits for its task
        self._room = 0  # bytes of the memory that this process has mapped
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._outcome: Written | str | None = None  # a text is the reason of a failure
        self._started = 0.0
        self._wrote_s = 0.0

    def prepare(self, size: int, *, pinned: bool) -> None:
        """Start to allocate memory for copies of `size` bytes. From now on start each writer before its copy exists.

        A writer needs seconds to load its libraries.
        """
        self.memory.prepare(size, pinned=pinned)
        self._starts_ahead = True
        self._start_ahead()

    def _start_ahead(self) -> None:
        if self._starts_ahead and self._ahead is None:
            self._room = self.memory.size
            self._ahead = _start_writer(self.memory.descriptor)

    def _writer_of(self, copy: HostCopy) -> subprocess.Popen[bytes]:
        """The process that was started ahead; a new one if it died or has too little memory mapped.

        Compares sizes, since a larger memory may have the same descriptor number as the old one.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.poll() is None and copy.size <= self._room:
            return ahead
        _end(ahead)
        return _start_writer(copy.descriptor)

    def start(self, begun: Begun, copy: HostCopy) -> None:
        """Start to write the copy. Its memory is reused only after `drop`."""
        assert self.begun is None, "one checkpoint at a time"
        self.begun, self._outcome, self._started = begun, None, time.perf_counter()
        self._process = process = self._writer_of(copy)
        task = pickle.dumps(WriteTask(begun.url, copy, FILES, os.getpid()))
        self._thread = threading.Thread(target=self._follow, args=(process, task), daemon=True)
        self._thread.start()

    def _follow(self, process: subprocess.Popen[bytes], task: bytes) -> None:
        outcome: Written | str = "its process gave no answer"
        try:
            out, err = self._communicate(process, task)
            if process.returncode == 0:
                outcome = pickle.loads(out)  # noqa: S301 - from our child process
            else:
                said = err.decode(errors="replace").strip().splitlines()
                outcome = said[-1] if said else f"its process ended with {process.returncode}"
        except StalledError as error:
            outcome = str(error)
        finally:  # even after an unexpected error the rank must not wait for ever
            self._wrote_s = time.perf_counter() - self._started
            self._outcome = outcome

    def _communicate(self, process: subprocess.Popen[bytes], task: bytes) -> tuple[bytes, bytes]:
        """Send the task and await the process's output. If it neither reads nor writes for the limit, kill it and raise StalledError."""
        watch, given = Watch(), task
        while True:
            try:
                return process.communicate(given or None, timeout=self._limit.pause_s)
            except subprocess.TimeoutExpired:
                given = b""  # communicate() keeps the input of its first call
            moved = bytes_moved(process.pid)
            watch.moved(moved)
            if watch.stalled and moved is not None:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # it may hang in a call to storage
                    process.communicate(timeout=END_S)
                raise self._limit.verdict("the process that writes the checkpoint")

    def state(self) -> SaveState | None:
        """The state of the checkpoint; None if none was started."""
        begun, outcome = self.begun, self._outcome
        if begun is None:
            return None
        state: SaveState = {"url": begun.url, "version": begun.version, "state": "writing", "reason": None}
        if isinstance(outcome, str):
            return {**state, "state": "failed", "reason": outcome}
        return state if outcome is None else {**state, "state": "written"}

    def written(self) -> Written:
        """Wait for the writer and return the written files. Raises StorageError if it failed."""
        assert self._thread is not None
        self._thread.join()
        assert self.begun is not None
        outcome = self._outcome
        if isinstance(outcome, Written):
            return outcome
        raise StorageError(
            f"the checkpoint was not written: {outcome}",
            where=self.begun.url,
            remedy="free space or repair the disk and start again; nothing committed is lost",
        )

    @property
    def seconds(self) -> float:
        """Duration of the writing."""
        return self._wrote_s

    def drop(self) -> None:
        """Forget the checkpoint, and kill its process if it still writes. Afterwards the memory is free."""
        if self._process is not None and self._thread is not None:
            self._process.kill()
            self._thread.join()
        if self.begun is not None:
            self.begun.keeps.close()
        self.begun = self._process = self._thread = self._outcome = None
        self._start_ahead()

    def close(self) -> None:
        """Drop the checkpoint, and release all processes and memory."""
        self._starts_ahead = False
        self.drop()
        _end(self._ahead)
        self._ahead = None
        self.memory.close()


def prepared_writer(learner: Learner, device: torch.device) -> BackgroundWriter | None:
    """The background writer of a rank on a GPU, which starts to allocate memory; None if checkpoints are not written in background.

    Every rank must call it. Raises TrainerMemoryError if the host has too little memory.
    """
    config = learner.config
    expected = config.saves_in_background and config.checkpoint.every < config.run.iterations
    if not expected or device.type != "cuda":
        return None
    size = learner.checkpoint_bytes + ROOM
    on_every_rank(lambda: check_host_memory(size, config))  # before any rank allocates
    writer = BackgroundWriter(config.part_limit)
    writer.prepare(size, pinned=True)
    return writer


def _end(waiting: subprocess.Popen[bytes] | None) -> None:
    if waiting is not None:
        waiting.kill()
        waiting.communicate()


def _start_writer(descriptor: int) -> subprocess.Popen[bytes]:
    """Start a process that waits for its task and inherits the memory's descriptor."""
    return subprocess.Popen(
        [sys.executable, "-m", MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[descriptor],
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            # with which the writer finds the same millrace
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        },
    )
