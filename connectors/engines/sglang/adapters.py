"""Adapters that an engine serves by name: each published version has a new name, so that no name is ever loaded again.

A request names the newest version that it may take, and keeps it: its tokens are of one version, and no engine pauses for a new
one. Owns names, when one is loaded and when it may go. SGLang answers a request without a name from the weights alone, so no
request of a run with adapters goes without.
"""

import contextlib
import secrets
from collections import Counter
from collections.abc import Iterator

from millrace.connectors.engines.sglang.connection import Connection
from millrace.core.errors import EngineError

LIST_TIMEOUT_S = 30.0


class NamedAdapters:
    """The adapters of the engine behind a connection, as this process loaded them."""

    def __init__(self, connection: Connection, owner: str, alone: bool) -> None:
        """owner: starts the names of one run's adapters. alone: no other run uses the engine."""
        self._connection = connection
        self._owner, self._alone = f"{owner}.", alone
        self._versions: dict[str, int] = {}  # by name, in the order of loading
        self._in_flight: Counter[str] = Counter()
        self._oldest = 0  # that a request may still take

    @property
    def _names(self) -> dict[int, str]:
        """The name that new requests for a version get."""
        return {version: name for name, version in self._versions.items()}

    async def load(self, folder: str, version: int, oldest: int) -> None:
        """Load a PEFT folder as a version, then unload those before `oldest` that no request names.

        Before the first load it unloads the run's adapters of an earlier process. Raises EngineError if the engine refuses the folder.
        """
        if not self._versions:
            await self._clear()
        await self._retire()  # what requests had at the last load
        name = f"{self._owner}v{version}-{secrets.token_hex(4)}"
        await self._post(
            "/load_lora_adapter", {"lora_name": name, "lora_path": folder}, f"did not load version {version}"
        )
        self._versions[name] = version
        self._oldest = oldest
        await self._retire()

    async def _clear(self) -> None:
        """Unload what an earlier process of the run left. Its requests ended with its connections, or do here."""
        left = await self._listed()
        if left and self._alone:
            await self._connection.post("/abort_request", {"abort_all": True})
        for name in left:
            await self._unload(name)

    def forget(self) -> None:
        """Name nothing that the engine has: no request goes to it before the next load."""
        self._versions.clear()

    async def _retire(self) -> None:
        """Unload versions that no request may take, and that none has.

        Otherwise SGLang lets the call wait for the request, and the next load for the call.
        """
        current = self._names
        for name, version in list(self._versions.items()):
            taken = version >= self._oldest and current[version] == name
            if not taken and not self._in_flight[name]:
                del self._versions[name]
                await self._unload(name)

    async def newest(self) -> int | None:
        """The newest version, if the engine still has it."""
        names = self._names
        if not names:
            return None
        version = max(names)
        if names[version] in await self._listed():
            return version
        self.forget()
        return None

    @contextlib.contextmanager
    def naming(self, versions: range | None) -> Iterator[tuple[int, str]]:
        """Within the block a request names an adapter: the newest version of these, and its name.

        Raises EngineError if none of them is loaded.
        """
        names = self._names
        allowed = [version for version in names if versions is None or version in versions]
        if not allowed:
            raise EngineError(
                f"{self._connection.engine_id}: has no adapter of the versions that a request may take, and the weights alone are not the policy"
            )
        version = max(allowed)
        name = names[version]
        self._in_flight[name] += 1
        try:
            yield version, name
        finally:
            self._in_flight[name] -= 1

    async def _listed(self) -> list[str]:
        """Names of the run's adapters that the engine has."""
        answer = await self._connection.get("/v1/models", LIST_TIMEOUT_S)
        return [
            model["id"]
            for model in answer["data"]
            if model.get("parent") and model["id"].startswith(self._owner)
        ]

    async def _unload(self, name: str) -> None:
        await self._post("/unload_lora_adapter", {"lora_name": name}, f"did not unload {name}")

    async def _post(self, path: str, body: dict[str, str], refusal: str) -> None:
        answer = await self._connection.post(path, body)
        if not answer.get("success"):
            raise EngineError(f"{self._connection.engine_id}: {refusal}: {answer.get('error_message')}")
