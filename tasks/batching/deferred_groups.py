"""Groups that the previous iteration deferred to this one, with the tokens of their samples.

Owns the files: cut.json and deferred.parquet in the earlier folder, joined.parquet in the later one. Does not know why groups
were deferred.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from millrace.connectors.storage.conditional import RUN, check_seal
from millrace.connectors.storage.files import FileEntry
from millrace.connectors.storage.iteration_files import IterationFiles, record_path
from millrace.connectors.storage.manifests.manifest import JOINED
from millrace.connectors.storage.run_folder import CUT, DEFERRED
from millrace.core.contracts import schema
from millrace.core.contracts.sample import DrawnGroup, GeneratedSample, ScoredSample
from millrace.core.contracts.task_records import Cut
from millrace.core.errors import CorruptFileError
from millrace.tasks.context import IterationContext
from millrace.tasks.scoring.scoring import scored_as_one
from millrace.tasks.stream import Joined

UNFINISHED = "aborted"  # the status of a sample that continues in a later iteration


def is_cut(ctx: IterationContext) -> bool:
    """Whether the first groups to finish fill the batch: by pipeline.select, or by a cut that was made before it changed."""
    return ctx.config.pipeline.select == "finish" or ctx.folder.exists(CUT)


def read_cut(ctx: IterationContext) -> Cut | None:
    """The cut of the iteration; None if it is not made yet."""
    files = IterationFiles(ctx.run_folder, ctx.index)
    with files.with_remedy():
        if not ctx.folder.exists(CUT):
            return None
        content, url = ctx.folder.read_json(CUT), ctx.folder.url_of(CUT)
        cut = _opened(content, url)
        ctx.run_folder.owner.check(content.get(RUN), url)
        return cut


def _opened(content: Any, url: str) -> Cut:
    """Parse cut.json. Raises CorruptFileError if it is corrupt."""
    try:
        return Cut.model_validate(check_seal(content, url))
    except ValidationError as error:
        raise CorruptFileError("does not say which groups are trained", where=url) from error


async def receive_deferred(ctx: IterationContext, generated: Callable[[], Awaitable[None]]) -> None:
    """Tell the iteration's tasks what was deferred to it. generated: returns when the previous iteration has generated."""
    before = ctx.run_folder.iteration(ctx.index - 1)
    if ctx.config.pipeline.select == "finish" or (ctx.index and await asyncio.to_thread(before.exists, CUT)):
        await generated()
    await ctx.stream.join(await asyncio.to_thread(join, ctx))


def join(ctx: IterationContext) -> Joined:
    """Groups that the previous iteration deferred to this one; writes them to joined.parquet. Call it after its rollout."""
    joined = deferred_to(ctx)
    if not joined.groups:
        return joined
    # the record names the file
    if ctx.folder.exists(record_path("rollout")):
        entry = ctx.folder.entry(JOINED)
    else:
        entry = ctx.folder.write_table(JOINED, schema.to_table(joined.groups, "prompts"), "prompts")
    return replace(joined, files=[entry])


def deferred_to(ctx: IterationContext) -> Joined:
    """Groups that the previous iteration deferred to this one, without writing a file."""
    before = IterationFiles(ctx.run_folder, ctx.index - 1)
    if not ctx.index or CUT not in before.entries:
        return Joined()
    deferred = _opened(before.read_json(CUT), before.folder.url_of(CUT)).deferred
    if not deferred:
        return Joined()
    drawn = {group.group_id: group for group in _groups_of(before)}
    groups = [replace(drawn[group_id], deferrals=times) for group_id, times in deferred.items()]
    stored: list[Any] = before.read_table("rollouts", path=DEFERRED).to_pylist()
    rows = [GeneratedSample(**row) for row in stored]
    finished = {row.sample_id: row for row in rows if row.status != UNFINISHED}
    scores = [
        ScoredSample(**row)
        for row in before.read_parts("rewards").to_pylist()
        if row["sample_id"] in finished
    ]
    failed = {score.group_id for score in scores if score.scoring in ("failed", "timed_out")}
    again = scored_as_one(ctx.runtime, stored, failed)
    return Joined(
        groups,
        finished,
        {row.sample_id: row for row in rows if row.status == UNFINISHED},
        {
            score.sample_id: score
            for score in scores
            if score.scoring == "scored" and score.group_id not in again
        },
    )


def write_deferred(
    ctx: IterationContext, cut: Cut, stored: list[dict[str, Any]], begun: list[GeneratedSample]
) -> FileEntry:
    """Write deferred.parquet. stored: the iteration's rows of samples. The last argument: samples that the cut ended."""
    rows = [GeneratedSample(**row) for row in stored if row["group_id"] in cut.deferred]
    rows += [row for row in begun if row.group_id in cut.deferred]
    order = {group_id: at for at, group_id in enumerate(cut.deferred)}
    rows.sort(key=lambda row: (order[row.group_id], row.index, row.sample_id))
    return ctx.folder.write_table(DEFERRED, schema.to_table(rows, "rollouts"), "rollouts")


def _groups_of(files: IterationFiles) -> list[DrawnGroup]:
    """All groups of an iteration: deferred to it, then drawn."""
    joined = files.read_table("prompts", path=JOINED).to_pylist() if JOINED in files.entries else []
    return [DrawnGroup(**row) for row in [*joined, *files.read_table("prompts").to_pylist()]]
