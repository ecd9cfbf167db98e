"""eager_passes: makes the passes of a batch's first chunks while the rest of it is generated (pipeline.eager).

Runs beside rollout, reward and filter. Reads parts of samples and the filter's verdicts as they land; writes
eager/chunk-*.parquet, rows as the batch will have them, which the ranks read and train_step removes. Commits nothing, and has
no record: gradients are no stored state. train_step passes chunks that a dead trainer held, chunks that an earlier start did
not reach, and the last chunk.
"""

import asyncio
import time
from functools import partial

from prefect import task
from prefect.cache_policies import NO_CACHE

from millrace.connectors.storage.files import FileEntry
from millrace.connectors.storage.run_folder import EAGER
from millrace.connectors.trainers.rank import Rank
from millrace.core.errors import ActorLostError
from millrace.tasks.batching.credited import credited, read_chosen
from millrace.tasks.batching.kept_groups import batch_pieces
from millrace.tasks.context import IterationContext
from millrace.tasks.kill_points import kill_point
from millrace.tasks.run_recorded import after_tries, may_help
from millrace.tasks.scoring.scored_group import ScoredGroup
from millrace.tasks.stream import Stream


async def pass_early(ctx: IterationContext) -> None:
    """Make passes until the batch is filled, if the iteration is trained in chunks."""
    if not ctx.eager:
        return
    try:
        await eager_passes(ctx)
    except ActorLostError as error:
        error.remedy = error.remedy or after_tries(eager_passes.retries + 1)
        raise


@task(
    name="eager_passes",
    retries=2,
    retry_delay_seconds=1,
    retry_condition_fn=may_help,
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def eager_passes(ctx: IterationContext) -> int:
    """Pass chunk after chunk as their groups are whole, until the batch is filled; returns how many chunks the ranks hold."""
    stream, chunks, held = ctx.stream, _Chunks(ctx), 0
    ctx.times.seconds["eager"] = 0.0
    while not stream.settled:
        revision = stream.revision
        if held < len(chunks.files):
            held = await _pass(ctx, held, chunks.files[held])
            await kill_point(ctx.index, "eager_passes", "in")
        elif groups := chunks.next_of(stream):
            await chunks.write(groups)
        else:
            await stream.wait(revision)
    return held


class _Chunks:
    """The chunks of an iteration with known groups, each in a file."""

    def __init__(self, ctx: IterationContext) -> None:
        self._ctx = ctx
        self._size = ctx.config.pipeline.chunk_groups(ctx.config.rollout.prompts)
        self._groups = 0  # groups in chunks so far
        self.files: list[FileEntry] = []

    def next_of(self, stream: Stream) -> list[ScoredGroup]:
        """The groups of the next chunk, if they are all known; never the last chunk, which ends with the batch."""
        end = self._groups + self._size
        whole = end <= len(stream.kept) and end < self._ctx.fresh_groups
        return list(stream.kept[self._groups : end]) if whole else []

    async def write(self, groups: list[ScoredGroup]) -> None:
        """Write the rows of the next chunk. Without rows there is no chunk."""
        ctx = self._ctx
        kept = await asyncio.to_thread(read_chosen, ctx, groups)
        self._groups += len(groups)
        if not kept.scores:
            return
        credit = await credited(ctx, kept)
        steps = {score.sample_id: ctx.version_after for score in kept.scores}
        pieces = partial(batch_pieces, kept, credit, steps)
        path = f"{EAGER}/chunk-{len(self.files):06d}.parquet"
        self.files.append(await asyncio.to_thread(ctx.folder.write_pieces, path, pieces, "batch"))


async def _pass(ctx: IterationContext, number: int, file: FileEntry) -> int:
    """Let the ranks pass a chunk; returns the number of chunks they then hold. Lost ranks are rebuilt and hold none."""
    async with ctx.runtime.memory.for_trainer() as trainer:
        ranks = await trainer.at(ctx.version_before)
        await kill_point(ctx.index, "eager_passes", "before")
        started = time.perf_counter()
        url = ctx.folder.url_of(file.path)
        held = await ranks.together(Rank.pass_chunk, ctx.version_after, number, url, file.sha256)
        ended = time.perf_counter()
    ctx.times.seconds["eager"] += max(0.0, min(ended, ctx.stream.settled_at) - started)
    first, _ = ctx.times.intervals.get("eager_passes", (started, ended))
    ctx.times.intervals["eager_passes"] = first, ended
    return held
