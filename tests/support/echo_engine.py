"""A third kind of engine, in this process: it repeats the prompt, and log-probabilities tell which weights it has.

It has no grammar and takes new weights from a folder alone.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from millrace.connectors.engines.client import NO_TOKENS, EngineClient, GenerateRequest, Generation
from millrace.connectors.engines.watched import WatchedEngine
from millrace.core.admission import EngineLoad
from millrace.core.config.engine_kinds import EngineKind
from millrace.core.errors import EngineError, EngineLostError

ECHO = EngineKind("echo", "cpu", transports=frozenset({"disk"}), has_grammar=False, prefills_apart=False)
TAKEN = {"max_new_tokens", "temperature", "ignore_eos", "stop_token_ids", "sampling_seed"}
TOKEN_S = 0.0005
PLACES = 8  # requests that its cache would hold


def echo_logprobs(folder: Path, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """What an echo of these weights gives each token of the output."""
    return [_logprob(_sum(folder), token) for token in output]


def _sum(folder: Path) -> int:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).digest()[0]


def _logprob(weights: int, token: int) -> float:
    return -((31 * weights + token) % 97) / 97


class EchoServer:
    """The engine itself, which outlives its clients."""

    def __init__(self, model: Path, version: str) -> None:
        self.weights, self.version = _sum(model), version
        self.released: set[str] = set()
        self.paused, self.tokens = False, 0
        self.aborted: dict[str, bool] = {}  # running requests, by id

    @property
    def generates(self) -> bool:
        return not (self.paused or self.released)

    def end(self, rid: str) -> None:
        self.aborted |= {name: True for name in self.aborted if name.startswith(rid)}

    def check_idle(self, what: str) -> None:
        if self.aborted:
            raise EngineError(f"echo: {what}: requests are running or waiting")


class EchoClient(WatchedEngine):
    """An EngineClient of an EchoServer, and its EngineWeights."""

    def __init__(self, server: EchoServer, url: str, engine_id: str, key: str | None) -> None:
        super().__init__(engine_id)
        self.url, self.key, self.flushes, self._closed = url, key, True, False
        self.weights, self._server = self, server

    async def _ask(self, request: GenerateRequest) -> Generation:
        if self._closed:
            raise EngineLostError(f"{self.engine_id}: this connection is closed")
        params = {name: value for name, value in request.sampling_params.items() if value is not None}
        for name in params.keys() - TAKEN:
            raise EngineError(f"{self.engine_id}: sampling_params.{name}: an echo has no such thing")
        if params.get("temperature", 1) < 0:
            raise EngineError(f"{self.engine_id}: sampling_params.temperature: below 0")
        server, whole = self._server, list(request.input_ids)
        prompt = whole[: len(whole) - request.continued]
        made = Generation(NO_TOKENS.ids, NO_TOKENS.logprobs, "", "abort", [], self.engine_id, 0)
        ids, logprobs, spans = list[int](), list[float](), list[tuple[int, int]]()
        server.aborted[request.rid] = False
        try:
            finish: Literal["stop", "length", "abort"] = "length"
            while len(ids) < params.get("max_new_tokens", 128):
                await asyncio.sleep(TOKEN_S)
                if server.aborted[request.rid]:
                    finish = "abort"
                    break
                if not server.generates:
                    continue
                if not spans or spans[-1][1] != int(server.version):
                    spans.append((len(ids), int(server.version)))
                ids.append(prompt[(request.continued + len(ids)) % len(prompt)])
                logprobs.append(_logprob(server.weights, ids[-1]))
                server.tokens += 1
                made = self._made(ids, logprobs, "abort", spans)
                if ids[-1] in params.get("stop_token_ids", ()):
                    finish = "stop"
                    break
                if request.on_part and len(ids) % request.every == 0 and not request.on_part(made):
                    server.end(request.rid)
        finally:
            del server.aborted[request.rid]
        self._note_answer()
        return self._made(ids, logprobs, finish, spans or [(0, int(server.version))])

    def _made(self, ids: list[int], logprobs: list[float], finish: Any, spans: list[Any]) -> Generation:
        arrays = np.array(ids, np.int32), np.array(logprobs, np.float64)
        return Generation(*arrays, " ".join(map(str, ids)), finish, list(spans), self.engine_id, 0)

    async def progress(self, timeout_s: float) -> tuple[Any, bool]:
        return self._server.tokens, self._server.paused

    async def abort(self, rid: str | None = None) -> None:
        self._server.end(rid or "")

    async def pause(self, mode: Literal["retract", "in_place"] = "retract") -> None:
        self._server.paused = True

    async def resume(self) -> None:
        self._server.paused = False

    async def flush(self) -> None:
        self._server.check_idle("flush")

    async def health(self, timeout_s: float = 5.0, generating: bool = False) -> bool:
        return not self._closed and (self._server.generates or not generating)

    async def weight_version(self) -> int | None:
        known = self._server.version.isdecimal() and not self._server.paused
        return int(self._server.version) if known else None

    async def load(self) -> EngineLoad:
        running = len(self._server.aborted)
        return EngineLoad(min(1.0, running / PLACES), PLACES * 100, running, 0)

    async def start_trace(self, folder: str, steps: int) -> None:
        raise EngineError(f"{self.engine_id}: an echo computes nothing that can be traced")

    async def stop_trace(self) -> None:
        """There is none."""

    async def forget_version(self) -> None:
        self._server.version = "forgotten"

    async def check_holds_adapters(self, slots: int) -> None:
        """It holds any number."""

    async def check_keeps_requests(self) -> None:
        """It does."""

    async def close(self) -> None:
        self._closed = True

    async def update_from_disk(self, path: str, version: int) -> None:
        try:
            self._server.weights = _sum(Path(path))
        except OSError as error:
            raise EngineError(f"{self.engine_id}: did not take weight version {version}: {path}") from error
        self._server.version = str(version)

    async def update_from_memory(self, copies: Any, version: int | None) -> None:
        raise EngineError(f"{self.engine_id}: an echo takes no weights by ipc")

    async def join_group(self, host: str, port: int, rank: int, size: int, name: str, backend: str) -> None:
        raise EngineError(f"{self.engine_id}: an echo takes no weights by broadcast")

    async def update_from_broadcast(self, entries: Any, group: str, version: int | None) -> None:
        raise EngineError(f"{self.engine_id}: an echo takes no weights by broadcast")

    def serve_by_name(self, owner: str, *, alone: bool) -> None:
        raise EngineError(f"{self.engine_id}: an echo serves no adapters")

    async def load_adapter(self, folder: str, version: int, oldest: int) -> None:
        raise EngineError(f"{self.engine_id}: an echo serves no adapters")

    async def bracket_update(self, what: Literal["begin", "end"]) -> None:
        """A folder has no brackets."""

    async def release_memory(self, tags: Sequence[str]) -> None:
        self._server.check_idle("release_memory")
        self._server.released |= set(tags)

    async def resume_memory(self, tags: Sequence[str]) -> None:
        self._server.released -= set(tags)

    async def checksum(self) -> dict[str, Any]:
        return {"sum": self._server.weights}

    async def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[_logprob(self._server.weights, token) for token in ids[1:]] for ids in prompts]


def connect(server: EchoServer, url: str, engine_id: str, key: str | None) -> EngineClient:
    """A client of the engine."""
    return EchoClient(server, url, engine_id, key)
