"""Stores the trainer's log-probabilities of an iteration's response tokens: one row per sample, in files.

Owns which rank writes which samples: only the last pipeline stage has the values, and ranks of one tensor or context parallel
group have equal values, so one of them writes the samples of their data parallel rank. A file is named by its content's hash: a repeated step with
the same bits writes the same files, and one with other bits overwrites none. Knows nothing of models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from millrace.connectors.storage import tables
from millrace.connectors.storage.run_folder import LOGPROBS
from millrace.connectors.storage.store import split_url
from millrace.connectors.trainers.megatron.comparison import reports
from millrace.connectors.trainers.megatron.rank_batch import RankBatch
from millrace.core.contracts.sample import SampleLogprobs
from millrace.core.contracts.schema import to_table
from millrace.core.contracts.task_records import FileRecord


def sample_logprobs(batch: RankBatch) -> list[SampleLogprobs]:
    """The rows of a batch's samples, on a rank that writes them; empty on others. Call it after the forward pass, before an update."""
    if not (mpu.is_pipeline_last_stage() and reports()):
        return []
    rows = batch.rows
    values = batch.logprobs_before_update.float().cpu().split([row.response_length for row in rows])
    return [
        SampleLogprobs(sample_id=row.sample_id, train_step=row.train_step, trainer_logprobs=part.numpy())
        for row, part in zip(rows, values, strict=True)
    ]


def write_logprobs(rows: Sequence[SampleLogprobs], batch_url: str) -> list[FileRecord]:
    """Write this rank's rows beside the batch. Every rank returns the records of all ranks' files, relative to that folder."""
    written: FileRecord | None = None
    if rows:
        data = tables.encode(to_table(rows, "logprobs"), "logprobs")
        digest = hashlib.sha256(data).hexdigest()[:16]
        path = f"{LOGPROBS}/rank-{mpu.get_data_parallel_rank():05d}.{digest}.parquet"
        entry = split_url(batch_url)[0].write(path, data)
        written = entry.model_copy(update={"rows": len(rows), "table": "logprobs"}).record()
    everywhere: list[Any] = [written] * dist.get_world_size()
    if len(everywhere) > 1:
        dist.all_gather_object(everywhere, written)
    return [record for record in everywhere if record is not None]
