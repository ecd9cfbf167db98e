"""SGLang's endpoints for weights and their memory, typed.

Owns request bodies and refusals; knows nothing of when an engine is to be updated.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from millrace.connectors.engines.sglang.adapters import NamedAdapters
from millrace.connectors.engines.sglang.connection import Connection
from millrace.connectors.engines.sglang.wire.bucket_payload import payload
from millrace.core.contracts.weight_bucket import TensorEntry, WeightBucket
from millrace.core.errors import EngineError


class SglangWeights:
    """The weights of the engine behind a connection, as millrace.connectors.engines.client.EngineWeights."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.flushes = True
        self.adapters: NamedAdapters | None = None

    async def update_from_disk(self, path: str, version: int) -> None:
        body = {"model_path": path, "weight_version": str(version), "flush_cache": self.flushes}
        await self._post_or_refuse(
            "/update_weights_from_disk", body, f"did not take weight version {version}"
        )

    async def update_from_memory(self, copies: Sequence[WeightBucket], version: int | None) -> None:
        payloads = [payload(copy.entries, copy.handle) for copy in copies]
        body = {"serialized_named_tensors": payloads, "disable_draft_model": True}
        await self._take_bucket("/update_weights_from_tensor", body, version)

    async def join_group(self, host: str, port: int, rank: int, size: int, name: str, backend: str) -> None:
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": rank,
            "world_size": size,
            "group_name": name,
            "backend": backend,
        }
        await self._post_or_refuse(
            "/init_weights_update_group", body, "did not join the group of a broadcast"
        )

    async def update_from_broadcast(
        self, entries: Sequence[TensorEntry], group: str, version: int | None
    ) -> None:
        body = {
            "names": [entry.name for entry in entries],
            "shapes": [entry.shape for entry in entries],
            "dtypes": [entry.dtype for entry in entries],
            "group_name": group,
        }
        await self._take_bucket("/update_weights_from_distributed", body, version)

    async def _take_bucket(self, path: str, body: Mapping[str, Any], version: int | None) -> None:
        carried = {} if version is None else {"weight_version": str(version)}
        form = {"load_format": "flattened_bucket", "flush_cache": self.flushes and version is not None}
        await self._post_or_refuse(path, {**body, **form, **carried}, "did not take a bucket of weights")

    async def _post_or_refuse(self, path: str, body: dict[str, Any], refusal: str) -> None:
        answer = await self._connection.post(path, body)
        if not answer.get("success"):
            raise EngineError(f"{self._connection.engine_id}: {refusal}: {answer.get('message')}")

    def serve_by_name(self, owner: str, *, alone: bool) -> None:
        self.adapters = self.adapters or NamedAdapters(self._connection, owner, alone)

    async def load_adapter(self, folder: str, version: int, oldest: int) -> None:
        assert self.adapters is not None, "serve_by_name comes first"
        await self.adapters.load(folder, version, oldest)

    async def bracket_update(self, what: Literal["begin", "end"]) -> None:
        """As servers since 0.5.21 require; older ones answer 404."""
        try:
            await self._connection.post(f"/{what}_weight_update", {})
        except EngineError as error:
            if "answered 404" not in str(error):
                raise

    async def release_memory(self, tags: Sequence[str]) -> None:
        await self._connection.post("/release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[str]) -> None:
        await self._connection.post("/resume_memory_occupation", {"tags": list(tags)})

    async def checksum(self) -> dict[str, Any]:
        answer: dict[str, Any] = await self._connection.post("/weights_checker", {"action": "checksum"})
        return answer

    async def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        body: dict[str, Any] = {
            "input_ids": [list(ids) for ids in prompts],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        with contextlib.ExitStack() as named:
            if self.adapters is not None:
                body["lora_path"] = named.enter_context(self.adapters.naming(None))[1]
            answers = await self._connection.post("/generate", body)
        shown = [answer["meta_info"]["input_token_logprobs"] for answer in answers]
        return [[float("nan") if value is None else value for value, *_ in each[1:]] for each in shown]
