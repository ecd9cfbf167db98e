"""Weights that a trainer broadcasts by gloo: the groups that this engine has joined, and the buckets received in them.

Keys in a group's store have SGLang's prefixes, so that a trainer need not know which engine it meets.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from millrace.connectors.engines.embedded.sampling import RequestError

TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Listed:
    """The tensors of a bucket, concatenated and of one dtype."""

    names: Sequence[str]
    shapes: Sequence[Sequence[int]]
    dtype: torch.dtype

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Listed:
        """Parse a request. Raises RequestError if it does not describe a bucket."""
        names, shapes, dtypes = (body.get(field) for field in ("names", "shapes", "dtypes"))
        if body.get("load_format") != "flattened_bucket":
            raise RequestError("load_format: only flattened_bucket is taken")
        lists = names, shapes, dtypes
        if not all(isinstance(one, list) and one for one in lists) or len(set(map(len, lists))) > 1:  # type: ignore[arg-type]
            raise RequestError("names, shapes, dtypes: lists of equal length are wanted, an entry a tensor")
        assert isinstance(names, list)
        if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
            raise RequestError("names: texts are wanted, each tensor's once")
        assert isinstance(shapes, list)
        assert isinstance(dtypes, list)
        if not all(isinstance(shape, list) and all(type(n) is int for n in shape) for shape in shapes):
            raise RequestError("shapes: lists of integers are wanted")
        dtype = getattr(torch, str(dtypes[0]), None)
        if set(map(str, dtypes)) != {str(dtypes[0])} or not isinstance(dtype, torch.dtype):
            raise RequestError(f"dtypes: one of torch's for all tensors is wanted, {dtypes[0]!r} is given")
        return cls(names, shapes, dtype)


class WeightGroups:
    """Groups by name; rank 0 of each is a trainer."""

    def __init__(self) -> None:
        self._groups: dict[str, ProcessGroupGloo] = {}

    def join(self, name: str, host: str, port: int, rank: int, size: int) -> None:
        """Meet the other members at an address; returns once all are there. Raises RequestError after a timeout."""
        try:
            store = TCPStore(host, port, is_master=False, timeout=TIMEOUT)
            prefix = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
            options._timeout = TIMEOUT
            if ipaddress.ip_address(host).is_loopback:
                options._devices = [ProcessGroupGloo.create_device(hostname=host)]
            self._groups[name] = ProcessGroupGloo(prefix, rank, size, options)
        except (RuntimeError, ValueError) as error:
            raise RequestError(
                f"master_address: group {name} cannot be joined: {str(error)[:300]}"
            ) from error

    def leave(self, name: str) -> None:
        """Leave a group. Raises RequestError if it was not joined."""
        if self._groups.pop(name, None) is None:
            raise RequestError(f"group_name: {name!r} was not joined")

    def receive(self, name: str, listed: Listed) -> dict[str, Tensor]:
        """Receive one bucket from rank 0. Raises RequestError if the group is unknown or was lost."""
        if name not in self._groups:
            raise RequestError(f"group_name: {name!r} was not joined")
        sizes = [math.prod(shape) * listed.dtype.itemsize for shape in listed.shapes]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        try:
            self._groups[name].broadcast(flat, 0).wait()  # type: ignore[attr-defined]  # not in torch's stubs
        except RuntimeError as error:
            self._groups.pop(name)
            raise RequestError(f"group_name: {name} was lost: {str(error)[:300]}") from error
        return {
            tensor: part.view(listed.dtype).view(tuple(shape))
            for tensor, part, shape in zip(listed.names, flat.split(sizes), listed.shapes, strict=True)
        }
