"""sample_supervised: draw rows with reference answers and make them the batch of a supervised iteration.

The prompt's answer is the row's label, as text. Writes prompts.parquet, verdicts.parquet and batch.parquet.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
from prefect import task

from millrace.core.contracts import schema
from millrace.core.contracts.ids import sample_id
from millrace.core.contracts.task_records import SampleSupervisedRecord
from millrace.core.errors import DataError
from millrace.tasks.context import IterationContext
from millrace.tasks.sample_prompts import drawn_table


@task(name="sample_supervised")
async def sample_supervised(ctx: IterationContext) -> SampleSupervisedRecord:
    """Draw the iteration's rows and write its batch; the record counts rows and tokens."""
    return await asyncio.to_thread(_draw, ctx)


def _draw(ctx: IterationContext) -> SampleSupervisedRecord:
    prompts, by_source = drawn_table(ctx, reserve=0)
    entries = [ctx.folder.write_table("prompts.parquet", prompts, "prompts")]
    rows = [_sample(ctx, row, at) for at, row in enumerate(prompts.to_pylist())]
    verdicts = [{name: row.get(name) for name in schema.schema("verdicts").names} for row in rows]
    for name, values in (("verdicts", verdicts), ("batch", rows)):
        table = pa.Table.from_pylist(values, schema=schema.schema(name))
        entries.append(ctx.folder.write_table(f"{name}.parquet", table, name))
    tokens = sum(row["response_length"] for row in rows)
    return {
        "files": [entry.record() for entry in entries],
        "rows": len(rows),
        "tokens": tokens,
        "by_source": by_source,
    }


def _sample(ctx: IterationContext, row: dict[str, Any], at: int) -> dict[str, Any]:
    """A batch row whose response is the reference answer."""
    answer = ctx.runtime.prompts.row(row["source"], row["row"]).label
    if not isinstance(answer, str) or not answer:
        raise DataError(
            f"source {row['source']}, row {row['row']}: the label is no text; supervised training needs an answer in "
            "every row. Set data.sources[].label_key to the column that holds it."
        )
    response = ctx.runtime.tokenizer.encode_response(answer)
    copied = ("group_id", "prompt_id", "iteration", "source", "prompt", "label", "metadata")
    return {
        "sample_id": sample_id(row["group_id"], 0),
        **{name: row[name] for name in copied},
        "index": 0,
        "tokens": [*row["prompt_tokens"], *response],
        "response_length": len(response),
        "response": answer,
        "loss_mask": [1] * len(response),
        "rollout_logprobs": [0.0] * len(response),
        "policy_versions": [],
        "engine_id": "",
        "seed": 0,
        "turns": 1,
        "status": "completed",
        "reason": None,
        "timings": [],
        "reward": None,
        "reward_parts": [],
        "scoring": "skipped",
        "verdict": "kept",
        "advantage": None,
        "train_step": ctx.version_before + 1 + at // ctx.config.global_batch,
    }
