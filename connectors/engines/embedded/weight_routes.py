"""Weights over HTTP: SGLang's endpoints that replace, rename and compare them; and weights that a trainer broadcasts by gloo.

Owns parsing requests with weights, the groups that this engine has joined, and the buckets received in them; nothing is ever
unpickled. Keys in a group's store have SGLang's prefixes, so that a trainer need not know which engine it meets. The engine
decides when it applies weights.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import ipaddress
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from aiohttp import web
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from millrace.connectors.engines.embedded.body import read_json
from millrace.connectors.engines.embedded.engine import Engine
from millrace.connectors.engines.embedded.sampling import RequestError, whole

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


MOST_RANKS = 4096  # in one group of a trainer's rank and engines


class WeightRoutes:
    """HTTP handlers for one engine's weights."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.snapshot: dict[str, Tensor] = {}
        self._groups = WeightGroups()

    def add_to(self, app: web.Application) -> None:
        """Add the routes."""
        post = app.router.add_post
        post("/update_weights_from_disk", self.update_weights_from_disk)
        post("/begin_weight_update", self.begin_weight_update)
        post("/end_weight_update", self.end_weight_update)
        post("/update_weights_from_tensor", self.update_weights_from_tensor)
        post("/init_weights_update_group", self.init_weights_update_group)
        post("/destroy_weights_update_group", self.destroy_weights_update_group)
        post("/update_weights_from_distributed", self.update_weights_from_distributed)
        post("/update_weight_version", self.update_weight_version)
        post("/weights_checker", self.weights_checker)

    async def update_weights_from_disk(self, http: web.Request) -> web.Response:
        """Load a checkpoint folder; waits for running requests unless paused."""
        body = await read_json(http)
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str):
            raise RequestError("model_path: a folder is wanted")
        await self._call(
            lambda: self.engine.update_from_disk(path, None if version is None else str(version)),
            when_idle=True,
        )
        return self._updated()

    async def begin_weight_update(self, http: web.Request) -> web.Response:
        """Does nothing, since updates here are atomic; SGLang's protocol has it."""
        return web.json_response({"success": True})

    async def end_weight_update(self, http: web.Request) -> web.Response:
        """Does nothing, since updates here are atomic; SGLang's protocol has it."""
        return web.json_response({"success": True})

    async def update_weights_from_tensor(self, http: web.Request) -> web.Response:
        """Replace named tensors, sent as base64 of safetensors bytes. Pickled tensors are refused."""
        body = await read_json(http)
        tensors: dict[str, Tensor] = {}
        for text in _parts(body.get("serialized_named_tensors")):
            tensors |= _decode_tensors(text)
        if not tensors:
            raise RequestError("serialized_named_tensors: no tensors in it")
        await self._replace(tensors, body.get("weight_version"))
        return self._updated()

    async def init_weights_update_group(self, http: web.Request) -> web.Response:
        """Join a group of a trainer and engines; answers once all members are in it."""
        body = await read_json(http)
        name, host = body.get("group_name"), body.get("master_address")
        if body.get("backend") != "gloo":
            raise RequestError("backend: only gloo is taken")
        if not name or not isinstance(name, str) or not isinstance(host, str):
            raise RequestError("group_name, master_address: texts are wanted")
        size = whole("world_size", body.get("world_size"), 2, MOST_RANKS)
        rank = whole("rank_offset", body.get("rank_offset"), 1, size - 1)
        port = whole("master_port", body.get("master_port"), 1, 65535)
        await asyncio.to_thread(self._groups.join, name, host, port, rank, size)
        return web.json_response({"success": True, "message": "joined"})

    async def destroy_weights_update_group(self, http: web.Request) -> web.Response:
        """Leave a group."""
        self._groups.leave(str((await read_json(http)).get("group_name")))
        return web.json_response({"success": True, "message": "left"})

    async def update_weights_from_distributed(self, http: web.Request) -> web.Response:
        """Replace tensors by the bucket that rank 0 of a group broadcasts."""
        body = await read_json(http)
        listed = Listed.parse(body)
        self.engine.check_tensors(dict(zip(listed.names, listed.shapes, strict=True)))
        tensors = await asyncio.to_thread(self._groups.receive, str(body.get("group_name")), listed)
        await self._replace(tensors, body.get("weight_version"))
        return self._updated()

    async def update_weight_version(self, http: web.Request) -> web.Response:
        """Set the version of the served weights."""
        version = (await read_json(http)).get("new_version")
        if version is None:
            raise RequestError("new_version: missing")

        def rename() -> None:
            self.engine.weight_version = str(version)

        await self._call(rename)
        return web.json_response({"success": True, "new_version": str(version)})

    async def weights_checker(self, http: web.Request) -> web.Response:
        """checksum: sha256 by tensor; snapshot, then compare: whether weights changed in between; reset_tensors: zero them."""
        action = (await read_json(http)).get("action")
        if action not in ("checksum", "snapshot", "compare", "reset_tensors"):
            raise RequestError(f"action: {action!r} is not checksum, snapshot, compare or reset_tensors")
        return web.json_response(await self._call(lambda: self._check_weights(action)))

    def _check_weights(self, action: str) -> dict[str, Any]:
        held = self.engine.tensors
        if action == "checksum":
            return {"success": True, "checksums": {name: _checksum(tensor) for name, tensor in held.items()}}
        if action == "snapshot":
            self.snapshot = {name: tensor.clone() for name, tensor in held.items()}
        elif action == "reset_tensors":
            self.engine.replace_tensors({name: torch.zeros_like(each) for name, each in held.items()}, None)
        else:
            differing = [
                name for name, tensor in held.items() if not tensor.equal(self.snapshot.get(name, tensor[:0]))
            ]
            return {
                "success": not differing,
                "message": "equal" if not differing else f"{differing[0]} differs",
            }
        return {"success": True, "message": action}

    async def _replace(self, tensors: dict[str, Tensor], version: Any) -> None:
        """Replace the served tensors of these names, and set the version if one is given."""
        named = None if version is None else str(version)
        await self._call(lambda: self.engine.replace_tensors(tensors, named), when_idle=True)

    def _updated(self) -> web.Response:
        return web.json_response(
            {"success": True, "message": "updated", "weight_version": self.engine.weight_version}
        )

    async def _call(self, job: Callable[[], Any], *, when_idle: bool = False) -> Any:
        return await asyncio.to_thread(self.engine.call, job, when_idle=when_idle)


def _parts(given: Any) -> list[str]:
    parts = [given] if isinstance(given, str) else given
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise RequestError("serialized_named_tensors: a list of base64 texts is wanted")
    return parts


def _decode_tensors(text: str) -> dict[str, Tensor]:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"serialized_named_tensors: not base64: {error}") from error
    if data[:1] == b"\x80":
        raise RequestError(
            "serialized_named_tensors: pickled tensors are never loaded; send safetensors bytes in base64"
        )
    try:
        tensors: dict[str, Tensor] = load_safetensors(data)
    except SafetensorError as error:
        raise RequestError(f"serialized_named_tensors: not safetensors: {error}") from error
    return tensors


def _checksum(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
