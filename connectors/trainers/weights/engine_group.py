"""The process group through which rank 0 broadcasts weights to engines: NCCL on GPUs, gloo on CPUs.

Built from torch's store and backend classes, with the key prefixes of a group that SGLang joins by name. So it is separate from
the trainer's groups and can be closed alone. Rank 0 listens on a single address.
"""

import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import BroadcastOptions

from millrace.connectors.trainers.memory_errors import ran_out
from millrace.core.contracts.handles import BroadcastGroup
from millrace.core.errors import TrainerError

JOIN_TIMEOUT = timedelta(seconds=120)
# NCCL's watchdog ends the process after this time; `send` gives up long before.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
POLL_S = 0.0005


class EngineGroup:
    """Rank 0 of a group. The other ranks are the GPUs of the engines at the URLs `members`."""

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
            self._store = dist.TCPStore(
                self.host,
                self.port,
                is_master=True,
                timeout=JOIN_TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )

    @property
    def description(self) -> BroadcastGroup:
        """The data that engines need to join."""
        return BroadcastGroup(self.name, self.members, self.host, self.port, "nccl" if self._gpu else "gloo")

    def enter(self, size: int) -> None:
        """Join the group. On CPUs this returns when all members have joined."""
        prefix = dist.PrefixStore(f"{self.name}/", dist.PrefixStore(self.name, self._store))
        options: Any
        if self._gpu:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = COLLECTIVE_TIMEOUT
            self._group = dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", prefix), 0, size, options)
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = JOIN_TIMEOUT
            options._devices = [gloo.create_device(hostname=self.host)]
            self._group = gloo(dist.PrefixStore("cpu/", prefix), 0, size, options)

    def send(self, flat: Tensor, timeout_s: float) -> None:
        """Broadcast bytes. Raises TrainerError if an engine is lost or the timeout passes; then the group is unusable."""
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
                raise  # this rank's memory ran out; no engine is lost
            raise TrainerError(
                f"broadcast of {flat.numel()} bytes to engines failed: {str(error)[:300]}"
            ) from error

    def close(self) -> None:
        """Close the group, also during a broadcast."""
        if self._group is not None and self._gpu:
            self._group.abort()
        self._group = None
