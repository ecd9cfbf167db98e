"""rollout: generate the samples of the released groups on the engines and append them as parts.

Reads prompts.parquet and the parts already there; writes rollouts/part-*.parquet as samples finish. Generates only samples
that no part holds. A sample's seed follows from its place in the run, so a sample generated again is the same sample.
Rollouts of several turns append turns/part-*.parquet as they proceed, and so do long answers with rollout.flush_tokens. Both
resume after the last stored row.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from prefect import task

from millrace.connectors.storage.files import FileEntry
from millrace.connectors.storage.iteration_files import way_out
from millrace.connectors.storage.parts import read_parts
from millrace.connectors.storage.run_folder import CUT
from millrace.core.config import RunConfig
from millrace.core.contracts.ids import iteration_number, sample_id
from millrace.core.contracts.sample import DrawnGroup, GeneratedSample
from millrace.core.contracts.task_records import FileRecord, RolloutRecord
from millrace.core.contracts.turns import TurnRow
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import read_hf_config
from millrace.core.families.routed_experts import RoutingFormat
from millrace.tasks.batching.deferred_groups import is_cut, read_cut, write_deferred
from millrace.tasks.context import IterationContext
from millrace.tasks.generation.answers import Answers
from millrace.tasks.generation.failures import FailureBudget
from millrace.tasks.generation.part_writer import WAIT_S, PartWriter
from millrace.tasks.generation.sessions.rollout_record import stored_events
from millrace.tasks.generation.sessions.runner import MadeSample, session_task
from millrace.tasks.generation.single_samples import SampleGenerator
from millrace.tasks.kill_points import kill_point
from millrace.tasks.run_recorded import may_help

SEGMENTS_WAIT_S = 1.0  # segments of unfinished answers wait this long: few parts, and nobody waits for them
FAILURE = ["sample_id", "status", "reason"]  # columns
POINTS = {"rollouts": "rollout", "turns": "turns"}  # kill points


@task(name="rollout", retries=2, retry_delay_seconds=1, retry_condition_fn=may_help)
async def rollout(ctx: IterationContext) -> RolloutRecord:
    """Generate until the filter has settled every verdict; the record counts samples, tokens and seconds."""
    if ctx.trace is None:
        return await _generated(ctx)
    await ctx.runtime.memory.start_trace(ctx.versions)
    record = await _generated(ctx)
    await ctx.runtime.memory.store_trace(ctx.trace)
    return record


async def _generated(ctx: IterationContext) -> RolloutRecord:
    return await (ctx.shards.rollout() if ctx.shards else generate(ctx))


async def generate(ctx: IterationContext) -> RolloutRecord:
    """Generate this process's share of the groups: all groups on the driver, its own in a shard."""
    started = time.perf_counter()
    groups = await asyncio.to_thread(_read_groups, ctx)
    parts = await asyncio.to_thread(ctx.stored_parts, "rollouts", FAILURE)
    for folder in ("rollouts", "turns"):
        await asyncio.to_thread(ctx.start_parts, folder)
    finished = set(parts.column("sample_id").to_pylist())
    generator = sample_generator(ctx, parts.to_pylist())
    make = await _maker(ctx, generator)
    async with make.open():
        await ctx.stream.begin()
        async with asyncio.TaskGroup() as generating:
            await _until_settled(ctx, groups, partial(_begin, ctx, make, generating, finished))
            cut = await asyncio.to_thread(is_cut, ctx)
            if cut or ctx.config.filter.oversample:
                await generator.stop()
            if cut:
                await kill_point(ctx.index, "rollout", "cut")
        made = await asyncio.to_thread(read_cut, ctx) if cut and ctx.in_shard else None
        if made:
            make.store_begun(made.deferred)
    files = [*ctx.parts["rollouts"], *ctx.parts["turns"]]
    if not ctx.in_shard:
        files += await asyncio.to_thread(_deferral, ctx, make, groups)
    record: RolloutRecord = {
        "samples_found": len(finished),
        "seconds": time.perf_counter() - started,
        "samples_generated": generator.samples,
        "tokens_generated": generator.tokens,
        "engines_s": generator.engines_s,
        "files": files,
    }
    if generator.in_flight_limit is not None:
        record["in_flight_limit"] = generator.in_flight_limit
    if pressure := generator.take_pressure():
        record["kv_used"], record["queue"] = pressure.used, pressure.queue
    return record


async def defer(ctx: IterationContext) -> list[FileRecord]:
    """Write the groups that the cut defers, from the rows that shards stored. Returns the files about deferred groups."""
    if not await asyncio.to_thread(is_cut, ctx):
        joined = await ctx.stream.until_joined()
        return [entry.record() for entry in joined.files]
    groups = await asyncio.to_thread(_read_groups, ctx)
    make = await _maker(ctx, sample_generator(ctx))
    return await asyncio.to_thread(_deferral, ctx, make, groups)


Begin = Callable[[DrawnGroup], None]


async def _until_settled(ctx: IterationContext, drawn: list[DrawnGroup], begin: Begin) -> None:
    """Start released groups until the filter has settled.

    Groups deferred to the iteration come first in the batch. With pipeline.select=finish they start beside the drawn groups, as
    soon as the previous iteration has deferred them.
    """
    beside = await asyncio.to_thread(is_cut, ctx)
    groups = drawn if beside else [*(await ctx.stream.until_joined()).groups, *drawn]
    begun = 0
    while not ctx.stream.settled:
        revision = ctx.stream.revision
        if beside and ctx.stream.joined:
            for group in ctx.stream.joined.groups:
                begin(group)
            beside = False
        for group in groups[begun : ctx.stream.released]:
            begin(group)
            begun += 1
            # let requests go out: thousands at once would block the event loop
            await asyncio.sleep(0)
        await ctx.stream.wait(revision)


def _begin(
    ctx: IterationContext,
    make: Answers | Rollouts,
    generating: asyncio.TaskGroup,
    finished: set[str],
    group: DrawnGroup,
) -> None:
    """Start the samples of a group of this process's share that no part holds."""
    if group.unusable is None and ctx.share.holds(group.ordinal):
        for index in range(ctx.config.rollout.samples_per_prompt):
            if sample_id(group.group_id, index) not in finished:
                generating.create_task(make(group, index))


def _deferral(ctx: IterationContext, make: Answers | Rollouts, drawn: list[DrawnGroup]) -> list[FileRecord]:
    """Files about groups deferred to the iteration and by it, with the samples that the cut ended."""
    entries = list(ctx.stream.joined.files) if ctx.stream.joined else []
    cut = read_cut(ctx)
    if cut:
        # the cut has had its effect, and must not be made again
        entries.append(ctx.folder.entry(CUT))
    if cut and cut.deferred:
        stored = read_parts(ctx.folder, "rollouts", "rollouts")
        of_them = stored.filter(pc.is_in(stored.column("group_id"), pa.array(list(cut.deferred))))
        groups = [*(ctx.stream.joined.groups if ctx.stream.joined else ()), *drawn]
        known = {*of_them.column("sample_id").to_pylist(), *(row.sample_id for row in make.begun)}
        left = [
            # a kill ended it after the cut
            make.left(group, index)
            for group in groups
            if group.group_id in cut.deferred
            for index in range(ctx.config.rollout.samples_per_prompt)
            if sample_id(group.group_id, index) not in known
        ]
        begun = [*make.begun, *(row for row in left if row)]
        entries.append(write_deferred(ctx, cut, of_them.to_pylist(), begun))
    return [entry.record() for entry in entries]


def _read_groups(ctx: IterationContext) -> list[DrawnGroup]:
    return [DrawnGroup(**row) for row in ctx.read_prompts().to_pylist()]


def sample_generator(ctx: IterationContext, stored: Iterable[Mapping[str, Any]] = ()) -> SampleGenerator:
    """The iteration's generator. stored: rows of an earlier attempt, with the columns FAILURE."""
    config = ctx.config
    return SampleGenerator(
        config,
        config.rollout.sampling,
        lambda: ctx.engines_at(ctx.versions),
        rollout_budget(ctx, stored),
        lambda ids: ctx.runtime.prompts.tokenizer.decode(ids, config.rollout.sampling.skip_special_tokens),
        ctx.runtime.places(ctx.share),
        lambda: ctx.runtime.prompts.tokenizer.ends,
        routing_form(config),
        ctx.runtime.prompts.unsampled(config.data.sources),
    )


def routing_form(config: RunConfig) -> RoutingFormat | None:
    """The form of the experts that engines are asked for; None if they are not."""
    if not config.rollout.routing_replay:
        return None
    return RoutingFormat.of(architecture(read_hf_config(config.model.path)))


def rollout_budget(ctx: IterationContext, stored: Iterable[Mapping[str, Any]] = ()) -> FailureBudget:
    """Counts samples that fail to generate, starting with the stored ones."""
    config = ctx.config
    budget = FailureBudget(
        "rollout.max_failed_share",
        config.rollout.max_failed_share,
        config.samples_per_iteration,
        what="failed to generate",
        where=f"iteration {iteration_number(ctx.index)}",
        remedy="fix the cause or raise the share, and start the same command again: finished work is kept. Or "
        f"{way_out(ctx.run_folder, ctx.index)}, which generates its samples again",
        also=partial(ctx.note_failure, "rollout"),
    )
    for row in stored:
        if row["status"] == "failed":
            budget.add(row["reason"], row["sample_id"])
    return budget


async def _maker(ctx: IterationContext, generator: SampleGenerator) -> Answers | Rollouts:
    """The maker of samples: one answer of an engine, or a rollout of several turns."""
    turns = await asyncio.to_thread(ctx.stored_parts, "turns")
    stored = [TurnRow(**row) for row in turns.to_pylist()]
    if ctx.config.rollout.session is None:
        segments = row_writer(ctx, "turns", generator, SEGMENTS_WAIT_S)
        return Answers(ctx, generator, row_writer(ctx, "rollouts", generator), segments, stored)
    return Rollouts(ctx, generator, stored)


class Rollouts:
    """Makes rollouts of several turns, each of one sample, or of a sample for each branch."""

    def __init__(self, ctx: IterationContext, generator: SampleGenerator, stored: Sequence[TurnRow]) -> None:
        """stored: turns of an earlier attempt."""
        self._ctx = ctx
        self._runner = ctx.runtime.sessions.runner(ctx.config.rollout.sampling, generator, ctx.share)
        self._samples, self._turns = (row_writer(ctx, kind, generator) for kind in ("rollouts", "turns"))
        self._stored = stored_events(stored)
        self.begun: list[GeneratedSample] = []  # no rollout is cut

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Write turns and samples in the background, and all of them on leaving."""
        async with self._samples.open(), self._turns.open():
            yield

    def store_begun(self, groups: Collection[str]) -> None:
        """Does nothing: no rollout is cut."""

    def left(self, group: DrawnGroup, index: int) -> GeneratedSample | None:
        """Always None: no rollout is cut."""
        return None

    async def __call__(self, group: DrawnGroup, index: int) -> None:
        """Make a rollout of a group. Its samples are stored after its turns."""
        ctx, rollout_id = self._ctx, sample_id(group.group_id, index)
        seed = ctx.runtime.prompts.sample_seed(group, index)
        source = next(source for source in ctx.config.data.sources if source.name == group.source)
        opening = ctx.runtime.sessions.opening(
            source, rollout_id, group.group_id, group.prompt, group.prompt_tokens, seed
        )
        task = session_task(group.prompt, group.label, group.metadata, group.source, index)

        async def write(row: TurnRow) -> None:
            self._turns.put([row])

        stored = self._stored.get(rollout_id, [])
        samples, started, seconds = await self._runner.run(opening, task, stored, write)
        await self._turns.settled()
        timings = [("started", started), ("generate_s", seconds)]
        self._samples.put([session_sample(group, index, seed, sample, timings) for sample in samples])


def row_writer(
    ctx: IterationContext,
    kind: Literal["rollouts", "turns"],
    generator: SampleGenerator,
    wait_s: float = WAIT_S,
) -> PartWriter:
    """A writer that writes at once when no answer is outstanding."""

    async def landed(entry: FileEntry) -> None:
        await kill_point(ctx.index, POINTS[kind], "in")
        await ctx.announce(kind, entry)

    limit = ctx.config.rollout.part_groups * ctx.config.rollout.samples_per_prompt
    return PartWriter(ctx, kind, limit, lambda: generator.outstanding > 0, landed, wait_s)


def session_sample(
    group: DrawnGroup, index: int, seed: int, made: MadeSample, timings: list[tuple[str, float]]
) -> GeneratedSample:
    """The row of a sample of a rollout of several turns."""
    return GeneratedSample(
        **group.of_sample(index),
        sample_id=made.sample_id,
        tokens=[*made.prompt_ids, *made.response_ids],
        response_length=len(made.response_ids),
        response=made.response,
        loss_mask=made.loss_mask,
        trained_mask=made.trained_mask,
        rollout_logprobs=made.logprobs,
        policy_versions=made.policy_versions,
        engine_id=made.engine_id,
        seed=seed,
        turns=made.turns,
        status=made.status,
        reason=made.reason,
        timings=timings,
        samples=made.samples,
        role=made.role,
        dialogue=made.dialogue,
        session_reward=made.reward,
        session_parts=made.parts,
        session_texts=made.texts,
        session_answer=made.answer,
        routed_experts=made.routed,
    )
