"""rollout: generate the samples of the released groups on the engines and append them as parts.

Reads prompts.parquet and the parts already there; generates only samples that no part holds. A sample's seed follows
from its id, so a sample generated again is the same sample. Parts are written as samples finish.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pyarrow as pa
from prefect import task

from millrace.connectors.sglang.client import Generation
from millrace.connectors.sglang.dispatcher import Dispatcher
from millrace.connectors.storage.parts import read_parts, write_part
from millrace.core.contracts import schema
from millrace.core.contracts.ids import sample_id, sample_seed
from millrace.core.contracts.task_records import RolloutRecord
from millrace.core.errors import BudgetError, EngineError
from millrace.core.garbage import collect_garbage
from millrace.tasks.context import IterationContext
from millrace.tasks.kill_points import kill_point
from millrace.tasks.run_recorded import may_help

PART_WAIT_S = 0.1  # finished samples wait this long for company before they are written
TIDY_AFTER_S = (
    2.0  # by then every request is out and the loop has nothing to do; later, answers set off collections
)


@task(name="rollout", retries=2, retry_delay_seconds=1, retry_condition_fn=may_help)
async def rollout(ctx: IterationContext) -> RolloutRecord:
    """Generate until the filter has settled every verdict; the record counts samples, tokens and seconds."""
    assert ctx.stream is not None
    started = time.perf_counter()
    prompts = await asyncio.to_thread(_read_prompts, ctx)
    parts = await asyncio.to_thread(read_parts, ctx.folder, "rollouts", "rollouts", ignore_incomplete=True)
    finished = set(parts.column("sample_id").to_pylist())
    generator = _Generator(ctx, failures=parts.column("status").to_pylist().count("failed"))
    released = 0
    tidying = asyncio.get_running_loop().call_later(TIDY_AFTER_S, collect_garbage)
    async with _writer(ctx, generator) as queue, asyncio.TaskGroup() as group:
        while True:
            revision = ctx.stream.revision
            for prompt in prompts[released : ctx.stream.released]:
                for index in range(ctx.config.rollout.samples_per_prompt):
                    if sample_id(prompt["group_id"], index) not in finished:
                        group.create_task(generator.generate(prompt, index, queue))
            released = ctx.stream.released
            if ctx.stream.settled:
                break
            await ctx.stream.wait(revision)
    tidying.cancel()
    seconds = time.perf_counter() - started
    return {
        "samples_found": len(finished),
        "seconds": seconds,
        "samples_generated": generator.samples,
        "tokens_generated": generator.tokens,
        "engines_s": generator.engines_s,
    }


def _read_prompts(ctx: IterationContext) -> list[dict[str, Any]]:
    return ctx.folder.read_table("prompts.parquet", "prompts").sort_by("ordinal").to_pylist()


class _Generator:
    """Generates one sample at a time into a queue of rows; counts what became of them."""

    def __init__(self, ctx: IterationContext, failures: int) -> None:
        self.ctx = ctx
        self.failures = failures
        self.outstanding = 0  # samples begun and not yet queued
        self.samples = self.tokens = 0
        self.engines_s = 0.0
        config = ctx.config.rollout
        s = config.sampling
        self.sampling: dict[str, Any] = {
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k,
            "min_p": s.min_p,
            "max_new_tokens": s.max_new_tokens,
            "stop": s.stop or None,
            "stop_token_ids": s.stop_token_ids or None,
            "no_stop_trim": True,
        }
        self._ready = asyncio.Lock()
        self._engines: Dispatcher | None = None
        self.slots = asyncio.Semaphore(config.max_concurrency * ctx.config.engines.generating)

    async def generate(
        self, prompt: dict[str, Any], index: int, queue: asyncio.Queue[dict[str, Any]]
    ) -> None:
        sid = sample_id(prompt["group_id"], index)
        seed = sample_seed(self.ctx.config.run.seed, sid)
        row = _row(prompt, sid, index, seed)
        self.outstanding += 1
        async with self.slots:
            started = time.time()
            try:
                engines = await self._dispatcher()
                result = await engines.generate(
                    prompt["prompt_tokens"],
                    {**self.sampling, "sampling_seed": seed},
                    rid=sid,
                    session=prompt["group_id"],
                )
            except EngineError as error:
                self._fail(row, str(error))
            else:
                _fill(row, prompt, result)
                self.tokens += row["response_length"]
            row["timings"] = [("started", started), ("generate_s", time.time() - started)]
        self.samples += 1
        self.outstanding -= 1
        await queue.put(row)

    async def _dispatcher(self) -> Dispatcher:
        """The engines at this iteration's version: made ready when the first sample needs them."""
        async with self._ready:
            if self._engines is None:
                started = time.perf_counter()
                self._engines = await self.ctx.runtime.engines(self.ctx.version_before)
                self.engines_s = time.perf_counter() - started
            return self._engines

    def _fail(self, row: dict[str, Any], reason: str) -> None:
        row.update(status="failed", reason=reason)
        self.failures += 1
        config = self.ctx.config
        budget = config.rollout.max_failed_share * config.samples_per_iteration
        if self.failures > budget:
            raise BudgetError(
                f"iteration {self.ctx.index}: {self.failures} samples failed to generate, more than "
                f"rollout.max_failed_share = {config.rollout.max_failed_share:g} allows ({budget:.0f}); the last reason: {reason}. "
                "What finished is kept: mend the cause and start the run again."
            )


def _row(prompt: dict[str, Any], sid: str, index: int, seed: int) -> dict[str, Any]:
    """The row of a sample before it is generated."""
    copied = ("group_id", "prompt_id", "iteration", "source", "prompt", "label", "metadata")
    return {
        "sample_id": sid,
        **{name: prompt[name] for name in copied},
        "index": index,
        "tokens": prompt["prompt_tokens"],
        "response_length": 0,
        "response": "",
        "loss_mask": [],
        "rollout_logprobs": [],
        "policy_versions": [],
        "engine_id": "",
        "seed": seed,
        "turns": 1,
        "status": "failed",
        "reason": None,
        "timings": [],
    }


def _fill(row: dict[str, Any], prompt: dict[str, Any], result: Generation) -> None:
    """Put what an engine answered into the row."""
    length = len(result.output_ids)
    row.update(
        tokens=[*prompt["prompt_tokens"], *result.output_ids],
        response_length=length,
        response=result.text,
        loss_mask=[1] * length,
        rollout_logprobs=result.logprobs,
        policy_versions=[
            {"first_token": first, "version": version} for first, version in result.weight_versions
        ],
        engine_id=result.engine_id,
        status={"stop": "completed", "length": "truncated", "abort": "aborted"}[result.finish],
    )


@asynccontextmanager
async def _writer(
    ctx: IterationContext, generator: _Generator
) -> AsyncIterator[asyncio.Queue[dict[str, Any]]]:
    """A queue whose rows are written as parts, at once when no other is on its way; on leaving, everything queued is written.

    A write that fails ends the body, which may wait for what will never land.
    """
    queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    limit = ctx.config.rollout.part_groups * ctx.config.rollout.samples_per_prompt

    async def drain() -> None:
        open_ = True
        while open_:
            rows = [await queue.get()]
            deadline = asyncio.get_running_loop().time() + PART_WAIT_S
            while rows[-1] is not None and len(rows) < limit and (generator.outstanding or not queue.empty()):
                try:
                    async with asyncio.timeout_at(deadline):
                        rows.append(await queue.get())
                except TimeoutError:
                    break
            open_ = rows[-1] is not None
            await _write(ctx, [row for row in rows if row is not None])

    async with asyncio.TaskGroup() as group:
        writing = group.create_task(drain())
        try:
            yield queue  # type: ignore[misc]
        finally:
            await queue.put(None)
            await asyncio.wait([writing])


async def _write(ctx: IterationContext, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    table = pa.Table.from_pylist(rows, schema=schema.schema("rollouts"))
    entry = await asyncio.to_thread(write_part, ctx.folder, "rollouts", table, "rollouts")
    await kill_point(ctx.index, "rollout", "in")
    assert ctx.stream is not None
    await ctx.stream.land("rollouts", entry.path)
