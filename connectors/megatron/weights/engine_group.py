"""The process group through which rank 0 broadcasts weights to engines: NCCL on GPUs, gloo on CPUs.

Made of torch's store and backend classes, with the key prefixes of a group that SGLang joins by name, so that it is none of
the trainer's own groups and can be given up alone. Rank 0 listens on the address it is told, and nowhere else.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from torch.distributed.distributed_c10d import BroadcastOptions

from millrace.connectors.megatron.process.memory_errors import ran_out
from millrace.core.errors import TrainerError

MEET_TIMEOUT = timedelta(seconds=120)
# NCCL's watchdog ends the process after it; `send` gives up long before.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
POLL_S = 0.0005


class EngineGroup:
    """Rank 0 of a group with `members`, whatever those are to whoever asks for them."""

    def __init__(self, name: str, members: list[str], *, loopback: bool, gpu: bool) -> None:
        self.name = name
        self.members = members
        self.host = "127.0.0.1" if loopback else os.environ["RAY_NODE_IP_ADDRESS"]
        self._gpu = gpu
        self._group: Any = None
        with socket.socket() as listener:
            listener.bind((self.host, 0))
            listener.listen(128)
            self.port = int(listener.getsockname()[1])
            self._store = TCPStore(
                self.host,
                self.port,
                is_master=True,
                timeout=MEET_TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )

    def enter(self, size: int) -> None:
        """Join; on CPUs this returns once all others have."""
        prefix = PrefixStore(f"{self.name}/", PrefixStore(self.name, self._store))
        if self._gpu:
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = COLLECTIVE_TIMEOUT
            self._group = ProcessGroupNCCL(PrefixStore("cuda/", prefix), 0, size, options)
        else:
            options = ProcessGroupGloo._Options()
            options._timeout = MEET_TIMEOUT
            options._devices = [ProcessGroupGloo.create_device(hostname=self.host)]
            self._group = ProcessGroupGloo(PrefixStore("cpu/", prefix), 0, size, options)

    def send(self, flat: Tensor, timeout_s: float) -> None:
        """Broadcast bytes. Raises TrainerError if an engine is lost or they take longer; the group is then of no use."""
        options = BroadcastOptions()
        options.rootRank = 0
        if not self._gpu:
            options.timeout = timedelta(seconds=timeout_s)
        try:
            work = self._group.broadcast([flat], options)
            deadline = time.monotonic() + timeout_s
            while self._gpu and not work.is_completed():
                if time.monotonic() > deadline:
                    raise TrainerError(
                        f"broadcast of {flat.numel()} bytes to engines took over {timeout_s:g} s"
                    )
                time.sleep(POLL_S)
            work.wait()
        except RuntimeError as error:
            if ran_out(error):
                raise  # not an engine's fault
            raise TrainerError(
                f"broadcast of {flat.numel()} bytes to engines failed: {str(error)[:300]}"
            ) from error

    def close(self) -> None:
        """Give the group up, also amid a broadcast."""
        if self._group is not None and self._gpu:
            self._group.abort()
        self._group = None
