"""Adapters over HTTP: SGLang's endpoints that load, unload and list them, and the field of a request that names one."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from millrace.connectors.engines.embedded.body import read_json
from millrace.connectors.engines.embedded.engine import Engine
from millrace.connectors.engines.embedded.sampling import RequestError

LONGEST_NAME = 512


def named_adapter(body: Mapping[str, Any]) -> str | None:
    """The adapter that a request names in lora_path; None for the weights alone."""
    name = body.get("lora_path")
    if name is not None and not isinstance(name, str):
        raise RequestError("lora_path: the name of a loaded adapter is wanted")
    return name


class AdapterRoutes:
    """HTTP handlers for the adapters of one engine."""

    def __init__(self, engine: Engine, model: str) -> None:
        self.engine = engine
        self._model = model

    def add_to(self, app: web.Application) -> None:
        """Add the routes."""
        app.router.add_post("/load_lora_adapter", self.load)
        app.router.add_post("/unload_lora_adapter", self.unload)
        app.router.add_get("/v1/models", self.models)

    async def load(self, http: web.Request) -> web.Response:
        """Load a PEFT folder under a name; running requests go on."""
        body = await read_json(http)
        name, path = _name(body), body.get("lora_path")
        if not isinstance(path, str) or not path:
            raise RequestError("lora_path: a folder is wanted")
        adapter = await asyncio.to_thread(self.engine.read_adapter, name, path)
        await self._call(lambda: self.engine.load_adapter(adapter))
        return self._loaded()

    async def unload(self, http: web.Request) -> web.Response:
        """Let no new request name an adapter."""
        name = _name(await read_json(http))
        await self._call(lambda: self.engine.unload_adapter(name))
        return self._loaded()

    async def models(self, _: web.Request) -> web.Response:
        """The model, and each adapter under it."""
        base = {
            "id": self._model,
            "object": "model",
            "owned_by": "millrace",
            "root": self._model,
            "parent": None,
        }
        adapters = [
            {**base, "id": name, "root": name, "parent": self._model} for name in self.engine.adapters
        ]
        return web.json_response({"object": "list", "data": [base, *adapters]})

    def _loaded(self) -> web.Response:
        return web.json_response(
            {"success": True, "loaded_adapters": {name: name for name in self.engine.adapters}}
        )

    async def _call(self, job: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(self.engine.call, job)


def _name(body: Mapping[str, Any]) -> str:
    name = body.get("lora_name")
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        raise RequestError(f"lora_name: a text of 1 to {LONGEST_NAME} characters is wanted")
    return name
