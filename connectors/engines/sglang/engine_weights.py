"""SGLang's endpoints for weights and their memory, typed.

Owns request bodies and refusals; knows nothing of when an engine is to be updated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from millrace.connectors.engines.sglang.connection import Connection
from millrace.core.contracts.weight_bucket import TensorEntry
from millrace.core.errors import EngineError


class EngineWeights:
    """The weights of the engine behind a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.flushes = True  # whether an update clears the prefix cache

    async def update_from_disk(self, path: str, version: int) -> None:
        """Load a Hugging Face folder as a weight version."""
        body = {"model_path": path, "weight_version": str(version), "flush_cache": self.flushes}
        await self._post_or_refuse(
            "/update_weights_from_disk", body, f"did not take weight version {version}"
        )

    async def update_from_tensor(self, payloads: Sequence[str], version: int | None) -> None:
        """Load one bucket: one payload (millrace.connectors.engines.sglang.wire.bucket_payload) per GPU of the engine.

        The last bucket carries the version. When this returns, the engine has copied the tensors that the payload points to.
        """
        body = {"serialized_named_tensors": list(payloads), "disable_draft_model": True}
        await self._take_bucket("/update_weights_from_tensor", body, version)

    async def join_group(self, host: str, port: int, rank: int, size: int, name: str, backend: str) -> None:
        """Let the engine's GPUs, from `rank` on, join a group of `size` that meets at an address."""
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
        """Load one bucket that rank 0 of a group broadcasts at the same time; the last carries the version."""
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

    async def bracket_update(self, what: Literal["begin", "end"]) -> None:
        """Mark the start or end of an update from buckets, as servers since 0.5.21 require; older ones answer 404."""
        try:
            await self._connection.post(f"/{what}_weight_update", {})
        except EngineError as error:
            if "answered 404" not in str(error):
                raise

    async def release_memory(self, tags: Sequence[str] | None = None) -> None:
        """Release GPU memory; the engine must be idle."""
        await self._connection.post("/release_memory_occupation", {"tags": list(tags)} if tags else {})

    async def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        """Take GPU memory again."""
        await self._connection.post("/resume_memory_occupation", {"tags": list(tags)} if tags else {})

    async def checksum(self) -> dict[str, Any]:
        """Checksums of the tensors that the engine holds."""
        answer: dict[str, Any] = await self._connection.post("/weights_checker", {"action": "checksum"})
        return answer

    async def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities of each prompt's tokens except the first, at temperature 1; NaN for a missing number."""
        body = {
            "input_ids": [list(ids) for ids in prompts],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answers = await self._connection.post("/generate", body)
        shown = [answer["meta_info"]["input_token_logprobs"] for answer in answers]
        return [[float("nan") if value is None else value for value, *_ in each[1:]] for each in shown]
